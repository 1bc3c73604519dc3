"""Configure all tests: one thread, a fixed seed, and a separate working folder."""

import importlib
import itertools
import logging
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

from tests.process import (
    ENGINE_THREAD,
    engine_thread_if_asked,
    forget_garbage,
    spare_interpreter,
    spare_time,
)

# Set before torch is imported, and for the processes that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
# Lightning 2.6 calls names that jsonargparse 4.53 deprecates.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"
# Inductor's worker processes serve Triton, and each would import torch first.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# A machine may be slow, and no test measures time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
torch.set_num_threads(1)
# torch formats every graph if its trace logger has a handler. Pytest adds one to each logger that
# does not propagate.
logging.getLogger("torch.__trace").propagate = True

# Marks of tests that may take long.
_LONG = ("slow", "distributed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--cases``, ``--device`` and ``--engine-thread``."""
    help = "run at most so many cases of a test; with -m slow, those that -m 'not slow' runs count"
    parser.addoption("--cases", type=int, help=help)
    help = "where tests/gpu runs: CUDA if there is any by default, else the CPU, as a rehearsal"
    parser.addoption("--device", choices=("cpu", "cuda"), help=help)
    help = "run backward passes on threads of autograd's engine, as an accelerator does"
    parser.addoption("--engine-thread", action="store_true", help=help)


def _test_of(item: pytest.Item) -> str:
    """The test that an item is a case of."""
    return item.nodeid.partition("[")[0]


def _spread(cases: list[pytest.Item], most: int) -> list[pytest.Item]:
    """At most so many cases, from the beginning to the end."""
    return cases[:: -(-len(cases) // most)] if most > 0 else []


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Mark slow tests, drop cases if ``--cases`` is given, and run the longest files first.

    If a worker ran a long file last, the others would be idle.
    """
    seen: Counter[str] = Counter()
    for item in items:
        name = _test_of(item)
        marker = item.get_closest_marker("slow_cases")
        if marker is not None and seen[name] % (marker.args[0] if marker.args else sys.maxsize):
            item.add_marker("slow")
        if "inductor" in item.nodeid and "torch_kernels" not in item.fixturenames:
            item.add_marker("slow")  # it compiles C++
        seen[name] += 1
    quick = Counter(_test_of(item) for item in items if not item.get_closest_marker("slow"))
    yield
    most = config.getoption("--cases")
    if most is not None:
        is_second = config.option.markexpr == "slow"
        cases: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            cases[_test_of(item)].append(item)
        kept = {
            item
            for name, group in cases.items()
            for item in _spread(group, most - quick[name] if is_second else most)
        }
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    longest = {item.path for item in items if any(map(item.get_closest_marker, _LONG))}
    root = Path(__file__).parent
    # The command line takes long as well, and would be last: its file is in no folder.
    items.sort(key=lambda item: (item.path not in longest, item.path.parent != root))


@pytest.fixture(autouse=True, scope="session")
def _spared_time() -> None:
    if "TRITON_INTERPRET" in os.environ:
        spare_interpreter()
        return  # the interpreter's tests capture nothing
    for name in ("lightning.pytorch", "torch._dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(name)
    spare_time()


@pytest.fixture(autouse=True, scope="module")
def _young_heap(_spared_time: None) -> None:
    """Exclude the objects of earlier files from garbage collection."""
    forget_garbage()


_FOLDERS = itertools.count()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new folder. Pytest's own fixture would scan those of all earlier tests."""
    return tmp_path_factory.mktemp(f"test_{next(_FOLDERS)}", numbered=False)


@pytest.fixture(autouse=True)
def _own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seed every generator, and undo a test's global changes after it.

    Files that Lightning writes to its default folder end up in `tmp_path`.
    """
    monkeypatch.chdir(tmp_path)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    environment = dict(os.environ)
    yield
    # Lightning's launchers leave LOCAL_RANK set, and Accelerate would then expect other processes.
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    # Accelerate keeps what its first object was told, e.g. that models are compiled.
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()
    # Trainer(deterministic=True) leaves it on, and max_unpool2d would then raise.
    torch.use_deterministic_algorithms(False)
    # Dynamo counts recompilations per function, over all tests that call it.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def pytest_configure(config: pytest.Config) -> None:
    """Pass ``--engine-thread`` to the processes that a test starts."""
    if config.getoption("--engine-thread"):
        os.environ[ENGINE_THREAD] = "1"


@pytest.fixture(autouse=True)
def _engine_thread_if_asked() -> Iterator[None]:
    with engine_thread_if_asked():
        yield


@pytest.fixture
def torch_kernels() -> Iterator[None]:
    """Make Inductor call torch's kernels, which saves a second of C++ compilation per kernel.

    Its passes, partitioner, order and memory do not change. Tests of its kernels' numbers do not
    use this fixture. Nor do captured steps with scaled attention, where a read of a view could
    then run before the write into it.
    """
    with importlib.import_module("torch._inductor.config").patch(fallback_by_default=True):
        yield


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """Return a small text with a pattern to learn."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(500)))
    return path

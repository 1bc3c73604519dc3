"""Importing the package is cheap, since TensorBoard imports it when it starts."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_unitscale

ROOT = Path(__file__).parents[1]


def _run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def test_importing_package_loads_neither_torch_nor_lightning() -> None:
    code = "import sys, lightning_unitscale; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = set(_run(code).split())
    assert not loaded & {"torch", "lightning", "pytorch_lightning", "numpy", "tensorboard", "scipy"}


STRATEGY = """
import sys
from lightning.pytorch.strategies import StrategyRegistry, __loader__ as loader
print('lightning_unitscale.strategies' in sys.modules, 'exec_module' in vars(loader),
      any('unitscale' in type(one).__module__ for one in sys.meta_path),
      type(StrategyRegistry.get('pipeline')).__name__)
"""
BOTH_PACKAGES = """
import lightning.pytorch, lightning_unitscale, pytorch_lightning
callback = lightning_unitscale.UnitScaleCallback()
print(*(isinstance(callback, package.Callback)
        for package in (lightning.pytorch, pytorch_lightning)))
"""
NAMES = """
import lightning_unitscale as lus
for name in sorted({*lus.__all__, *dir(lus)}): getattr(lus, name)
print(lus.__version__)
"""
FIRST = f"""
import lightning_unitscale, lightning.pytorch
{STRATEGY}
{BOTH_PACKAGES}
"""
LAST = f"""
import lightning.pytorch, lightning_unitscale
{STRATEGY}
{NAMES}
"""
# Looked for, and not imported yet.
FOUND = f"""
import lightning_unitscale as one; from importlib.util import find_spec
find_spec('lightning.pytorch.strategies'); import lightning.pytorch
{STRATEGY}
"""
BEFORE_BOTH = f"""
import lightning_unitscale; lightning_unitscale.UnitScaleCallback
import pytorch_lightning
{BOTH_PACKAGES}
"""
CALLBACKS = """
import sys, lightning_unitscale.callbacks
print('torch.distributed.pipelining' in sys.modules)
import torch
from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback, attach
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with attach(model, optimizer, [UnitScaleCallback(), ScaleMonitor(1)]):
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
print(*{name.split('.')[0] for name in sys.modules})
"""
_FORGET = """
import sys
for name in list(sys.modules):  # torchmetrics has imported it
    if name.partition(".")[0] in ABSENT: del sys.modules[name]
"""
# An environment without some packages: neither they nor their metadata are found.
_WITHOUT = (
    f"{_FORGET}\n"
    + """
import importlib.metadata, inspect, pydoc
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
real = importlib.metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name in ABSENT: raise importlib.metadata.PackageNotFoundError(name)
    return real(cls, name)
importlib.metadata.Distribution.from_name = classmethod(from_name)
import lightning_unitscale as lus
from lightning_unitscale import *
print(sorted(set(lus.__all__) - set(globals())))
print([name for name in dir(lus) if not hasattr(lus, name)])
assert dict(inspect.getmembers(lus))["HFCallback"] is HFCallback
assert "HFCallback" in pydoc.render_doc(lus)
assert HFCallback([UnitScaleCallback()]).attachment is None
"""
)
_STARS = """
for name in sorted(lus._SUBMODULES - {"cli", "strategies"}):
    exec(f"from lightning_unitscale.{name} import *", {})
"""
WITHOUT_TRANSFORMERS = f"""
ABSENT = {{"transformers"}}
{_WITHOUT}
{_STARS}
from lightning_unitscale.cli import *; from lightning_unitscale.strategies import *
print(PipelineStrategy(num_microbatches=2).num_microbatches)
"""
WITHOUT_LIGHTNING = f"""
ABSENT = {{"lightning", "lightning_fabric", "pytorch_lightning", "transformers"}}
{_WITHOUT}
{_STARS}
for make in (lambda: PipelineStrategy(num_microbatches=2), lambda: lus.cli):
    try: make()
    except (ModuleNotFoundError, AttributeError) as error: print(type(error).__name__, error)
"""
# A program of Hugging Face's that has imported the package before its own.
HUGGING_FACE = f"""
ABSENT = {{"transformers"}}
{_FORGET}
from lightning_unitscale import HFCallback, ScaleMonitor
callback = HFCallback([ScaleMonitor()])
before = "transformers" in sys.modules
from transformers.trainer_callback import TrainerCallback
print(before, isinstance(callback, TrainerCallback), callback.on_log(None, None, None))
"""
CODES = [
    *(FIRST, LAST, FOUND, BEFORE_BOTH, CALLBACKS),
    *(WITHOUT_TRANSFORMERS, WITHOUT_LIGHTNING, HUGGING_FACE),
]
# Packages that take seconds to import, and do not import Lightning's Trainer or this package.
_FORKING = """
import os, sys
import torch._dynamo, torchmetrics
for file, code in zip(sys.argv[1::2], sys.argv[2::2]):
    if not os.fork():
        sys.stdout = sys.stderr = open(file, "w")
        exec(code, {})
        sys.exit()
    assert os.wait()[1] == 0, open(file).read()
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the output of each code, run in a separate process."""
    folder = tmp_path_factory.mktemp("printed")
    files = [folder / str(number) for number in range(len(CODES))]
    pairs = zip(map(str, files), CODES, strict=True)
    arguments = [argument for pair in pairs for argument in pair]
    subprocess.run([sys.executable, "-c", _FORKING, *arguments], cwd=ROOT, check=True)
    return {code: file.read_text() for file, code in zip(files, CODES, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("code", [FIRST, LAST, FOUND], ids=["first", "last", "found"])
def test_importing_package_registers_pipeline_strategy(code: str, printed: dict[str, str]) -> None:
    assert "False False False PipelineStrategy" in printed[code].splitlines()


@pytest.mark.slow
def test_callbacks_load_neither_pipeline_engine_nor_lightning(
    printed: dict[str, str],
) -> None:
    """Users of another loop, or of the other package, do not wait for these imports."""
    lines = printed[CALLBACKS].splitlines()
    assert lines[0] == "False"
    assert not set(lines[-1].split()) & {"lightning", "pytorch_lightning", "lightning_fabric"}
    assert "UnitScaleCallback: forward: 2 of 2 matmuls scaled" in printed[CALLBACKS]


@pytest.mark.slow
@pytest.mark.parametrize("code", [FIRST, BEFORE_BOTH], ids=["first", "before both"])
def test_callback_is_a_callback_of_both_lightning_packages(
    code: str, printed: dict[str, str]
) -> None:
    assert printed[code].split()[-2:] == ["True", "True"]


@pytest.mark.slow
def test_exports_are_loaded_on_access(printed: dict[str, str]) -> None:
    assert printed[LAST].split()[-1] == lightning_unitscale.__version__


@pytest.mark.slow
def test_every_export_works_without_transformers(printed: dict[str, str]) -> None:
    assert printed[WITHOUT_TRANSFORMERS].splitlines() == ["[]", "[]", "2"]


@pytest.mark.slow
def test_missing_lightning_is_an_error_on_use(printed: dict[str, str]) -> None:
    unbound, missing, strategy, module = printed[WITHOUT_LIGHTNING].splitlines()
    assert unbound == "[]"
    assert missing == "['cli']"
    assert strategy.startswith("ModuleNotFoundError PipelineStrategy: No module named 'lightning")
    assert module.startswith("AttributeError") and "No module named 'lightning" in module


@pytest.mark.slow
def test_hf_callback_does_not_import_transformers(printed: dict[str, str]) -> None:
    # Imports of transformers may print before.
    assert printed[HUGGING_FACE].split()[-3:] == ["False", "True", "None"]


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'unit_skale'"):
        _ = lightning_unitscale.unit_skale
    assert not hasattr(lightning_unitscale, "pipelines")


def test_every_export_is_listed() -> None:
    assert {"ScaleMonitor", "UnitScaleCallback", "transforms"} <= set(dir(lightning_unitscale))
    assert set(lightning_unitscale.__all__) <= set(dir(lightning_unitscale))
    # Lazy exports are imported for type checkers too.
    exports = set(lightning_unitscale._EXPORTS)
    assert set(lightning_unitscale.__all__) == {*exports, "__version__"}
    tree = ast.parse(Path(lightning_unitscale.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {name.name for block in blocks for one in block.body for name in one.names}
    assert imported == exports

"""The package is built in rooms: what a file may import follows from where it lies."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lightning_unitscale"
ROOT = Path(__file__).parents[1]

# The rooms of the house, from the ground up: a file imports its own room and those above it here.
ROOMS = (
    "arguments.py",
    "compiling.py",
    "formats.py",
    "patching.py",
    "quantize.py",
    "ranks.py",
    "scales",
    "functional",
    "tensorboard",
    "tensorboard/report",
    "dynamo",
    "graph",
    "profiler",
    "capture",
    "optim",
    "lossless",
    "remat",
    "pipeline",
    "precision",
    "dispatch",
    "watching",
    "rules",
    "loops",
    "transforms",
    "strategies",
    "callbacks",
    "cli",
    "__init__.py",
    "__main__.py",
)
MAY_IMPORT_LIGHTNING = ("callbacks/", "strategies/", "cli/")
STDLIB_ONLY = ("scales/alerts.py", "formats.py")
# Read by TensorBoard, which has no torch and must not wait for it.
MAY_NOT_IMPORT_TORCH = (
    "__init__.py",
    "patching.py",
    "scales/__init__.py",
    "scales/alerts.py",
    "scales/layout.py",
    "scales/tensor_statistics.py",
    "tensorboard/__init__.py",
    "tensorboard/history.py",
    "tensorboard/plugin.py",
    "tensorboard/report.py",
    "tensorboard/report_page.py",
    "tensorboard/responses.py",
    "tensorboard/schema.py",
    "tensorboard/table.py",
)
# The only files that may use names of torch that start with an underscore: when one moves, there is
# one place to mend.
TORCH_ADAPTERS = (
    "compiling.py",
    "capture/export.py",
    "dispatch/nodes.py",
    "dispatch/compiler_internals.py",
    "dispatch/torch_internals.py",
    "dynamo",
    "functional/low_precision.py",
    "functional/scale.py",
    "graph/autograd.py",
    "graph/decompose.py",
    "pipeline/breadth_first.py",
    "pipeline/capture.py",
    "pipeline/torch_2_11.py",
    "pipeline/dataflow.py",
    "profiler/fake_device.py",
    "profiler/sharded.py",
    "remat/partitioner.py",
    "strategies/ownership.py",
    "strategies/validation_hooks.py",
    "watching/torch_state.py",
)

# Private by name only: all of the ecosystem walks nested inputs with it, and there is no other way.
COMMON_PROPERTY = "torch.utils._pytree"

FILES = sorted((ROOT / PACKAGE).rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT / PACKAGE).as_posix()


def _room(name: str) -> int:
    rooms = [room for room in ROOMS if name == room or name.startswith(f"{room}/")]
    assert rooms, f"{name} is in no room: add it to ROOMS, as early as what it imports allows"
    return ROOMS.index(max(rooms, key=len))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute dotted name) of everything that is imported, wherever it is done."""
    package = [PACKAGE, *path.relative_to(ROOT / PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*parents, *filter(None, [node.module])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _file_of(dotted: str) -> str | None:
    """The file of this package that a dotted name is in, None for another package's."""
    parts = dotted.split(".")
    if parts[0] != PACKAGE:
        return None
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.exists():
                return _name(candidate)
    raise AssertionError(f"{dotted} is imported, and is in no file")


def _private_torch_names(path: Path) -> Iterator[tuple[int, str]]:
    names = list(_imports(path))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith("torch.") and dotted.replace(".", "").isidentifier():
                names.append((node.lineno, dotted))
    for line, dotted in names:
        if dotted.startswith(COMMON_PROPERTY):
            continue
        first, *rest = dotted.split(".")
        # torch.ops.aten._softmax is not a private name but how the operator is called in a graph.
        if first in ("torch", "functorch") and rest[:1] != ["ops"] and any(map(_is_private, rest)):
            yield line, dotted


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_file_imports_a_room_above_its_own(path: Path) -> None:
    room = _room(_name(path))
    for line, dotted in _imports(path):
        imported = _file_of(dotted)
        # The package itself, through which a room is reached, is no room.
        if imported is not None and imported != "__init__.py":
            assert _room(imported) <= room, f"{path}:{line} imports {dotted} of a room above"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_packages_are_imported_only_where_they_belong(path: Path) -> None:
    name = _name(path)
    for line, dotted in _imports(path):
        top = dotted.split(".")[0]
        where = f"{path}:{line} imports {dotted}"
        assert top not in ("pytorch_lightning", "lightning_fabric"), where
        if top == "lightning":
            assert name.startswith(MAY_IMPORT_LIGHTNING), where
        if top in ("torch", "functorch"):
            assert name not in MAY_NOT_IMPORT_TORCH, where
        if name in STDLIB_ONLY:
            assert top in sys.stdlib_module_names, where


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_private_names_of_torch_stay_in_the_adapters(path: Path) -> None:
    if not _name(path).startswith(TORCH_ADAPTERS):
        found = [f"{path}:{line} {dotted}" for line, dotted in _private_torch_names(path)]
        assert not found, "private names of torch outside of TORCH_ADAPTERS:\n" + "\n".join(found)


def test_the_checks_see_what_they_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that breaks a rule is found, in each of the ways one may write an import."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    graph = tmp_path / PACKAGE / "graph"
    (tmp_path / PACKAGE / "callbacks").mkdir(parents=True)
    graph.mkdir()
    (tmp_path / PACKAGE / "callbacks" / "remat.py").write_text("class RematCallback: ...\n")
    path = graph / "bad.py"
    path.write_text(
        "from ..callbacks.remat import RematCallback\n"
        "def f():\n    from torch._dynamo import optimize\n    return torch._C._foo(optimize)\n"
    )
    assert [_file_of(dotted) for _, dotted in _imports(path)] == ["callbacks/remat.py", None]
    assert {dotted for _, dotted in _private_torch_names(path)} == {
        "torch._dynamo.optimize",
        "torch._C._foo",
        "torch._C",
    }
    with pytest.raises(AssertionError, match="room above"):
        test_no_file_imports_a_room_above_its_own(path)
    with pytest.raises(AssertionError, match="private names"):
        test_private_names_of_torch_stay_in_the_adapters(path)
    path.write_text("import lightning.pytorch\n")
    with pytest.raises(AssertionError, match="imports lightning"):
        test_packages_are_imported_only_where_they_belong(path)

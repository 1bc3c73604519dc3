"""The package is built in layers: what a file may import follows from where it lies."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lightning_unitscale"
ROOT = Path(__file__).parents[1]

# A file's layer is that of its longest prefix here. A lower layer never imports a higher one.
LAYERS = {
    "choices.py": 0,
    "formats.py": 0,
    "native.py": 0,
    "shadowing.py": 0,
    "alerts.py": 1,
    "cpu_kernel.py": 1,
    "cpu_rows.py": 1,
    "export.py": 1,
    "exponents.py": 1,
    "functional": 1,
    "quantize.py": 1,
    "row_layout.py": 1,
    "row_reduction.py": 1,
    "scale_table.py": 1,
    "snapshot.py": 1,
    "statistics.py": 1,
    "tensor_statistics.py": 1,
    "trends.py": 1,
    "violations.py": 1,
    "tensorboard/__init__.py": 1,
    "tensorboard/schema.py": 1,
    "tensorboard/history.py": 1,
    "tensorboard/responses.py": 1,
    "graph": 2,
    "tensorboard/event_files.py": 2,
    "tensorboard/records.py": 2,
    "tensorboard/summaries.py": 2,
    "tensorboard/plugin.py": 2,
    "dispatch": 3,
    "report": 3,
    "profiler": 3,
    "tracking": 3,
    "transforms": 3,
    "pipeline": 4,
    "remat": 4,
    "tensorboard/graph_def.py": 4,
    "tensorboard/writer.py": 4,
    "callbacks": 5,
    "strategies": 5,
    "cli.py": 6,
    "registration.py": 6,
    "__init__.py": 6,
    "__main__.py": 6,
}
MAY_IMPORT_LIGHTNING = ("callbacks/", "strategies/", "cli.py")
STDLIB_ONLY = ("alerts.py", "formats.py")
# Read by TensorBoard, which has no torch and must not wait for it.
MAY_NOT_IMPORT_TORCH = (
    "__init__.py",
    "alerts.py",
    "registration.py",
    "report/__init__.py",
    "report/command.py",
    "report/figure.py",
    "report/graph.py",
    "report/page.py",
    "scale_table.py",
    "tensorboard/__init__.py",
    "tensorboard/event_files.py",
    "tensorboard/history.py",
    "tensorboard/plugin.py",
    "tensorboard/responses.py",
    "tensorboard/schema.py",
)
# The only files that may use names of torch that start with an underscore: when one moves, there is
# one place to mend.
TORCH_ADAPTERS = (
    "dispatch/inductor_internals.py",
    "dispatch/torch_internals.py",
    "functional/func_transforms.py",
    "functional/scaled_product.py",
    "graph/absent_packages.py",
    "graph/attention_kernels.py",
    "graph/capture.py",
    "graph/dispatch_modes.py",
    "graph/exported.py",
    "graph/graph_breaks.py",
    "graph/inference_regions.py",
    "graph/kept_whole.py",
    "graph/lowering.py",
    "graph/partitioned.py",
    "graph/passed_over.py",
    "graph/plain_algorithm.py",
    "graph/plain_kernels.py",
    "graph/plain_numbers.py",
    "graph/plain_optimizers.py",
    "graph/symbols.py",
    "pipeline/modes.py",
    "pipeline/runtime.py",
    "pipeline/stage_on_torch_2_11.py",
    "pipeline/step_program.py",
    "profiler/memory.py",
    "remat/partitioner.py",
    "remat/real_inputs.py",
    "strategies/freed.py",
    "tracking/torch_state.py",
)

# Private by name only: all of the ecosystem walks nested inputs with it, and there is no other way.
COMMON_PROPERTY = "torch.utils._pytree"

FILES = sorted((ROOT / PACKAGE).rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT / PACKAGE).as_posix()


def _layer(name: str) -> int:
    prefixes = [p for p in LAYERS if name == p or name.startswith(f"{p}/")]
    assert prefixes, f"{name} has no layer: add it to LAYERS, as low as what it imports allows"
    return LAYERS[max(prefixes, key=len)]


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
def test_no_file_imports_a_higher_layer(path: Path) -> None:
    layer = _layer(_name(path))
    for line, dotted in _imports(path):
        imported = _file_of(dotted)
        # A folder's own __init__.py, through which a sibling is reached, is no higher than it.
        if imported is not None and imported != "__init__.py":
            assert _layer(imported) <= layer, f"{path}:{line} imports {dotted} of a higher layer"


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
    if _name(path) not in TORCH_ADAPTERS:
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
    with pytest.raises(AssertionError, match="higher layer"):
        test_no_file_imports_a_higher_layer(path)
    with pytest.raises(AssertionError, match="private names"):
        test_private_names_of_torch_stay_in_the_adapters(path)
    path.write_text("import lightning.pytorch\n")
    with pytest.raises(AssertionError, match="imports lightning"):
        test_packages_are_imported_only_where_they_belong(path)

"""Check that each file imports only what its folder allows."""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.structure import PACKAGE, ROOT, circles, file_of, files, imports, name_of, parsed

# Folders and top-level files. A file may import from its own folder and from earlier entries.
FOLDERS = (
    "arguments.py",
    "compiling.py",
    "formats",
    "patching.py",
    "quantize.py",
    "scales",
    "functional",
    "tensorboard",
    "capture",
    "memory",
    "profiler.py",
    "remat.py",
    "matmuls",
    "rules",
    "optim.py",
    "monitor",
    "precision",
    "loops",
    "pipeline",
    "strategies.py",
    "transforms",
    "callbacks",
    "cli",
    "__init__.py",
    "__main__.py",
)
MAY_IMPORT_LIGHTNING = (
    "callbacks/",
    "cli/",
    "pipeline/checks.py",
    "pipeline/data_parallel.py",
    "pipeline/evaluation.py",
    "pipeline/strategy.py",
)
STDLIB_ONLY = ("scales/alerts.py", "formats/__init__.py")
# Imported by TensorBoard, which may have no torch and must not wait for it.
MAY_NOT_IMPORT_TORCH = (
    "__init__.py",
    "patching.py",
    "scales/__init__.py",
    "scales/alerts.py",
    "scales/layout.py",
    "tensorboard/__init__.py",
    "tensorboard/chance.py",
    "tensorboard/divergence.py",
    "tensorboard/history.py",
    "tensorboard/plugin.py",
    "tensorboard/run_report.py",
    "tensorboard/report_page.py",
    "tensorboard/responses.py",
    "tensorboard/run_pair.py",
    "tensorboard/schema.py",
    "tensorboard/table.py",
)
# The only files that may use private names of torch, so that a change in torch affects few files.
TORCH_ADAPTERS = (
    "capture/absent_ranks.py",
    "capture/answers.py",
    "capture/aot_backend.py",
    "capture/breaks.py",
    "capture/module_steps.py",
    "capture/copy_graphs.py",
    "capture/decompose.py",
    "capture/dynamo_capture.py",
    "capture/executors.py",
    "capture/fake_device.py",
    "capture/patches.py",
    "compiling.py",
    "functional/low_precision.py",
    "functional/scale.py",
    "matmuls/autograd_nodes.py",
    "matmuls/compiler_internals.py",
    "matmuls/torch_internals.py",
    "memory/partitioner.py",
    "monitor/torch_state.py",
    "pipeline/captured_program.py",
    "pipeline/dataflow.py",
    "pipeline/rank_parameters.py",
    "pipeline/torch_engine.py",
    "scales/launches.py",
)

# Private by name only: the whole ecosystem uses it for nested inputs, and torch has no alternative.
COMMON_PROPERTY = "torch.utils._pytree"


def _place(name: str) -> int:
    folders = [folder for folder in FOLDERS if name == folder or name.startswith(f"{folder}/")]
    assert folders, f"{name} is not in FOLDERS. Add it as early as its imports allow."
    return FOLDERS.index(max(folders, key=len))


def _private_torch_names(path: Path) -> Iterator[tuple[int, str]]:
    names = list(imports(path, ROOT))
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith("torch.") and dotted.replace(".", "").isidentifier():
                names.append((node.lineno, dotted))
    for line, dotted in names:
        if dotted.startswith(COMMON_PROPERTY):
            continue
        first, *rest = dotted.split(".")
        # torch.ops.aten._softmax is not private but an operator's name in a graph.
        if first in ("torch", "functorch") and rest[:1] != ["ops"] and any(map(_is_private, rest)):
            yield line, dotted


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _check_folder(path: Path) -> None:
    place = _place(name_of(path, ROOT))
    for line, dotted in imports(path, ROOT):
        imported = file_of(dotted, ROOT)
        # The package's __init__.py comes late in FOLDERS but may be imported by every file.
        if imported is not None and imported != "__init__.py":
            assert _place(imported) <= place, f"{path}:{line} imports {dotted} of a later folder"


def _check_packages(path: Path) -> None:
    name = name_of(path, ROOT)
    for line, dotted in imports(path, ROOT):
        top = dotted.split(".")[0]
        where = f"{path}:{line} imports {dotted}"
        assert top not in ("pytorch_lightning", "lightning_fabric"), where
        if top == "lightning":
            assert name.startswith(MAY_IMPORT_LIGHTNING), where
        if top in ("torch", "functorch"):
            assert name not in MAY_NOT_IMPORT_TORCH, where
        if name in STDLIB_ONLY:
            assert top in sys.stdlib_module_names, where


def _check_private_names(path: Path) -> None:
    if not name_of(path, ROOT).startswith(TORCH_ADAPTERS):
        found = [f"{path}:{line} {dotted}" for line, dotted in _private_torch_names(path)]
        assert not found, "private names of torch outside of TORCH_ADAPTERS:\n" + "\n".join(found)


@pytest.mark.parametrize("check", [_check_folder, _check_packages, _check_private_names])
def test_every_file_imports_only_allowed_folders(check: Callable[[Path], None]) -> None:
    for path in files():
        check(path)


def test_no_circular_imports() -> None:
    """Imports at the top, in functions and for types all count."""
    assert not circles()


def test_import_checks_detect_violations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check finds a file that breaks its rule, for every form of import."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    scales = tmp_path / PACKAGE / "scales"
    (tmp_path / PACKAGE / "callbacks").mkdir(parents=True)
    scales.mkdir()
    (tmp_path / PACKAGE / "callbacks" / "memory_budget.py").write_text("class RematCallback: ...\n")
    path = scales / "bad.py"
    path.write_text(
        "from ..callbacks.memory_budget import RematCallback\n"
        "def f():\n    from torch._dynamo import optimize\n    return torch._C._foo(optimize)\n"
    )
    assert [file_of(dotted, ROOT) for _, dotted in imports(path, ROOT)] == [
        "callbacks/memory_budget.py",
        None,
    ]
    assert {dotted for _, dotted in _private_torch_names(path)} == {
        "torch._dynamo.optimize",
        "torch._C._foo",
        "torch._C",
    }
    with pytest.raises(AssertionError, match="later folder"):
        _check_folder(path)
    with pytest.raises(AssertionError, match="private names"):
        _check_private_names(path)
    (scales / "good.py").write_text("def f():\n    from .bad import g\n    return g\n")
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .good import f\n"
    )
    assert circles(tmp_path) == [["scales/bad.py", "scales/good.py"]]
    path.write_text("import lightning.pytorch\n")
    with pytest.raises(AssertionError, match="imports lightning"):
        _check_packages(path)

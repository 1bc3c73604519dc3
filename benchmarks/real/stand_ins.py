"""What some packages ask for at their import, and this machine's torch does not have."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from typing_extensions import override

_NEW_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class _SameModule(importlib.abc.Loader):
    """Loads a module of the old name by importing the one of the new name."""

    @override
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        root, dot, rest = spec.name.partition(".")
        module = importlib.import_module(_NEW_NAMES[root] + dot + rest)
        # The import system writes the new spec into the module, which is not its own.
        spec.loader_state = module.__spec__
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class _Alias(importlib.abc.MetaPathFinder):
    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _NEW_NAMES:
            return None
        return importlib.util.spec_from_loader(fullname, _SameModule())


def alias_pytorch_lightning() -> None:
    """``pytorch_lightning`` and what belongs to it are modules of ``lightning``.

    The two distributions have the same code but different classes, and the callbacks know one.
    """
    sys.meta_path.insert(0, _Alias())


def declare_torchvision_operators() -> None:
    """Let torchvision be imported beside a torch that its compiled operators do not go with.

    PyPI's wheel is linked against CUDA. Beside a CPU build of torch its library does not load, and
    its Python files then describe operators that nobody has declared. Only box operators are gone:
    models and transforms are Python.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


# A library's operators end with it.
_KEPT: list[torch.library.Library] = []

"""Replacements for modules that some packages import and this machine does not have."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch


def declare_torchvision_operators() -> None:
    """Let torchvision be imported beside a torch that its compiled operators do not go with.

    PyPI's wheel is linked against CUDA. Beside a CPU build of torch its library does not load, and
    its Python files then describe operators that are not declared. Only box operators are gone:
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

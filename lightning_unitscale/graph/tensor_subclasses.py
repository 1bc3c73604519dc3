"""Inputs of a class that takes part in every operation on them, and whether Dynamo follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# What was found out of each class.
_is_followed: dict[type, bool] = {}
Compile = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]


def not_followed(inputs: Any, compile_whole: Compile) -> str | None:
    """Name of a class among the inputs' whose ``__torch_function__`` Dynamo does not capture.

    It would be traced in pieces, with other results or errors of its own: MONAI's ``MetaTensor``.

    Args:
        inputs: Whatever a step is called with.
        compile_whole: Compiles a function, or raises when it is called.
    """
    for one in tree_leaves(inputs):
        kind = type(one)
        if kind is Tensor or not isinstance(one, Tensor) or not _takes_part(kind):
            continue
        if kind not in _is_followed:
            _is_followed[kind] = _can_follow(one, compile_whole)
        if not _is_followed[kind]:
            return kind.__name__
    return None


def _takes_part(kind: type) -> bool:
    # Parameters, and others that it is switched off for, have a function of C's there.
    function = getattr(kind.__torch_function__, "__func__", None)  # type: ignore[attr-defined]
    return function not in {None, getattr(Tensor.__torch_function__, "__func__", None)}


def _can_follow(tensor: Tensor, compile_whole: Compile) -> bool:
    try:
        with torch.no_grad():
            compile_whole(_some_operations)(tensor)
    except Exception:
        return False
    return True


def _some_operations(x: Tensor) -> Tensor:
    doubled = (x * 2).view(x.shape)
    return torch.stack([doubled, doubled]).clone()

"""Copies of what a step is called with, for a rehearsal of it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def copied_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
    """Deep copies of the arguments of a call, whose tensors are leaves of autograd's.

    ``copy.deepcopy`` takes only tensors that the user has made, and of a subclass only one that has
    learned to be copied; what another part of a program has computed is no such tensor.
    """
    memo: dict[int, Any] = {}
    given = (args, dict(kwargs))
    for tensor in _tensors(given, set()):
        memo[id(tensor)] = _copied(tensor, memo)
    return copy.deepcopy(given, memo)


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    try:
        if tensor.is_leaf:
            return copy.deepcopy(tensor, memo)
    except RuntimeError:
        pass  # of a subclass
    new = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    vars(new).update(copy.deepcopy(vars(tensor), memo))
    return new


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors behind containers and attributes, each once."""
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        inner += value
    inner += getattr(value, "__dict__", {}).values()
    for one in inner:
        yield from _tensors(one, seen)

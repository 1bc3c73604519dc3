"""The tensors that a step starts from, and what they are called."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

# How far a batch is looked into, and how many elements of one list.
_MAX_DEPTH = 4
_MAX_ELEMENTS = 64


def given_tensors(
    module: nn.Module, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int, tuple[str, str]]:
    """Name and module of each tensor that a call of a step starts from, by the tensor's identity.

    Args:
        module: The module; parameters and buffers are called as there.
        step: The step, whose parameters give names to its arguments.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    given: dict[int, tuple[str, str]] = {}
    for name, value in _arguments(step, args, kwargs).items():
        for path, tensor in _tensors(value, name, 0):
            given.setdefault(id(tensor), (f"input.{path}", ""))
    for fqn, held in (*module.named_buffers(), *module.named_parameters()):
        given[id(held)] = (fqn, fqn.rpartition(".")[0])
    return given


def _arguments(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        bound = inspect.signature(step).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the call itself will say so
        return {}
    return dict(bound.arguments)


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    items: list[tuple[Any, Any]] = []
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            items = list(value.items())
        elif isinstance(value, (list, tuple)):
            names = getattr(value, "_fields", range(len(value)))
            items = list(zip(names, value, strict=False))[:_MAX_ELEMENTS]
        elif dataclasses.is_dataclass(value):
            items = list(vars(value).items()) if hasattr(value, "__dict__") else []
    for key, item in items:
        yield from _tensors(item, f"{name}_{key}", depth + 1)

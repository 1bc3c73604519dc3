"""Sizes that change from call to call: the numbers behind them, and how far a plan reaches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from math import ceil
from typing import Any

import torch
from torch import fx

# A size that nothing is known of, such as a number of rows that depends on values.
_UNKNOWN = 4096
# By how much the sizes may outgrow those that were planned for; the largest that fits is taken.
_FACTORS = (8.0, 4.0, 2.0, 1.5, 1.25, 1.1)
_assumed: ContextVar[Mapping[Any, int]] = ContextVar("assumed")


def hint(size: Any) -> int:
    """The number behind a symbolic size, without a guard on it; 4096 if there is none."""
    if isinstance(size, int):
        return size
    node = size.node
    assumed = _assumed.get({})
    if assumed and node.expr.free_symbols <= assumed.keys():
        return int(node.expr.xreplace(assumed))
    value = node.hint if node.has_hint() else None
    return _UNKNOWN if value is None else int(value)


def changing_sizes(graph: fx.Graph) -> tuple[torch.SymInt, ...]:
    """The sizes that are inputs of a graph because they change from call to call."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return tuple(one for one in values if isinstance(one, torch.SymInt) and _is_free(one))


def limit_reach(sizes: Sequence[torch.SymInt], fits: Callable[[], bool]) -> None:
    """Let a plan serve sizes only as far as it fits: beyond, the step is captured and planned anew.

    Args:
        sizes: What changes from call to call.
        fits: Whether the plan is within its budget; asked for larger sizes than those planned for.
    """
    if not sizes:
        return
    limits = [hint(one) for one in sizes]
    for factor in _FACTORS:
        larger = [ceil(factor * one) for one in limits]
        with _assuming(sizes, larger):
            if fits():
                limits = larger
                break
    for size, limit in zip(sizes, limits, strict=True):
        bool(size <= limit)  # asking makes it a guard of the captured graph


@contextlib.contextmanager
def _assuming(sizes: Sequence[torch.SymInt], numbers: Sequence[int]) -> Iterator[None]:
    """Within this context the sizes have other numbers."""
    symbols = [one.node.expr for one in sizes]
    token = _assumed.set(dict(zip(symbols, numbers, strict=True)))
    try:
        yield
    finally:
        _assumed.reset(token)


def _is_free(size: torch.SymInt) -> bool:
    return bool(size.node.expr.is_Symbol)

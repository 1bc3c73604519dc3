"""Shapes as plain numbers: what a scale rule reads of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def concrete_size(size: int | torch.SymInt) -> int:
    """The number behind a symbolic size, without adding a guard on it.

    Raises:
        ValueError: If the size depends on the values of a tensor.
    """
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise ValueError(
            f"size={size}: it depends on the values of a tensor; expected a size that is known "
            "before the step runs."
        )
    return int(hint)


def specialized(size: int) -> int:
    """The number of a size for a computation that a compiler does not look into.

    A compiled graph is then one of this size, and is made anew for another.
    """
    return len(range(size)) if torch.compiler.is_compiling() else size


def shape_of(value: Any) -> tuple[int, ...]:
    """Sizes of a tensor; those of a number are none."""
    if not isinstance(value, torch.Tensor):
        return ()
    return tuple([concrete_size(size) for size in value.shape])


def product(sizes: Iterable[float]) -> float:
    """Product of numbers, 1 of none; ``math.prod`` that a compiler can look into."""
    result: float = 1
    for size in sizes:
        result = result * size
    return result


def numel_of(value: Any) -> float:
    """Number of elements of a tensor; a number is one."""
    return product(shape_of(value))


def tuple_of(value: int | Iterable[int] | None, length: int, default: int) -> tuple[int, ...]:
    """One number per spatial dimension, where torch takes one for all of them or a sequence."""
    if value is None:
        return (default,) * length
    if isinstance(value, (int, torch.SymInt)):
        return (concrete_size(value),) * length
    numbers = tuple([concrete_size(one) for one in value])
    if not numbers:
        return (default,) * length
    return numbers * length if len(numbers) == 1 else numbers

"""Relate the values of microbatches to the value of the whole batch.

A step is captured twice: for a microbatch and for the whole batch. Sizes and numbers that differ
between the two graphs depend on the batch. Each tensor then has one of four relations to the batch,
which :func:`compare_graphs` finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Same:
    """The value of any microbatch, times ``count ** power``."""

    power: int = 0


@dataclass(frozen=True)
class Rows:
    """The rows of all samples in the order of the batch, times ``count ** power``."""

    dim: int
    # How many times the samples repeat, as in ``torch.cat([first, second])``. It is 0 for a tensor
    # that is the same for all samples.
    blocks: int = 1
    power: int = 0


@dataclass(frozen=True)
class Mean:
    """The mean of the values of the microbatches, times ``count ** power``."""

    # 0 for a mean over samples, 1 for a sum.
    power: int = 0


@dataclass(frozen=True)
class Coupled:
    """A value of the batch that does not follow from those of the microbatches."""

    # The operation that couples the samples, and why.
    reason: str


Fact = Same | Rows | Mean | Coupled


def power_of(part: Any, whole: Any, count: int) -> int | None:
    """Return ``k`` if a number of the batch is ``count ** k`` times one of a microbatch."""
    if type(part) is not type(whole):
        return None
    if part == whole or (part != part and whole != whole):  # NaN also counts as a constant
        return 0
    if not isinstance(part, (int, float)) or not part:
        return None
    powers = (power for power in (1, -1, 2, -2))
    return next((k for k in powers if math.isclose(whole / part, float(count) ** k)), None)


def batch_dims(part: Tensor, whole: Tensor, count: int) -> list[int] | None:
    """Return the dimensions of the samples, or ``None`` if another dimension's size differs."""
    if part.ndim != whole.ndim:
        return None
    dims = [dim for dim in range(part.ndim) if part.shape[dim] != whole.shape[dim]]
    if any(whole.shape[dim] != count * part.shape[dim] for dim in dims):
        return None
    return dims


def joined(values: Sequence[Any], fact: Fact | None) -> Any:
    """Join the values of the microbatches into the value of the batch."""
    first, count = values[0], len(values)
    if not isinstance(first, Tensor) or count == 1:
        return first
    if isinstance(fact, Same):
        return _times(first, count, fact.power)
    if isinstance(fact, Rows):
        return _times(_in_order(values, fact), count, fact.power)
    if isinstance(fact, Mean) or not first.ndim:
        is_whole = not (first.is_floating_point() or first.is_complex())
        power = fact.power if isinstance(fact, Mean) else int(is_whole)
        stacked = torch.stack(list(values))
        if is_whole and power == 1:
            return stacked.sum(0)
        return _times((stacked.double() if is_whole else stacked).mean(0), count, power)
    return torch.cat(list(values))


def _times(value: Tensor, count: int, power: int) -> Tensor:
    # Without a power integers stay integers.
    return value * float(count) ** power if power else value


def _in_order(values: Sequence[Tensor], rows: Rows) -> Tensor:
    if rows.blocks <= 1:
        return torch.cat(list(values), rows.dim)
    split = [value.unflatten(rows.dim, (rows.blocks, -1)) for value in values]
    return torch.cat(split, rows.dim + 1).flatten(rows.dim, rows.dim + 1)

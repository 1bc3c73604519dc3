"""What the value of a whole batch is, given those of its microbatches.

A step is captured twice, for a microbatch and for the whole batch. Sizes that differ between the
two graphs are sizes of the batch, and so are numbers that differ. Each tensor then has one of four
relations to the batch, which :func:`compare_graphs` finds.
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
    """A value of the batch is one of a microbatch, times ``count ** power``.

    Attributes:
        power: Power of the number of microbatches.
    """

    power: int = 0


@dataclass(frozen=True)
class Rows:
    """Each sample has rows of its own, in the order of the batch.

    Attributes:
        dim: The dimension with the samples.
        blocks: How often the samples follow each other there, as in ``torch.cat([first, second])``;
            0 for a tensor that is the same for all samples.
        power: As in :class:`Same`.
    """

    dim: int
    blocks: int = 1
    power: int = 0


@dataclass(frozen=True)
class Mean:
    """A value of the batch is the mean of those of the microbatches, times ``count ** power``.

    Attributes:
        power: 0 for a mean over samples, 1 for a sum over them.
    """

    power: int = 0


@dataclass(frozen=True)
class Coupled:
    """The values of the microbatches do not tell that of the batch.

    Attributes:
        reason: The operation that couples the samples, and why.
    """

    reason: str


Fact = Same | Rows | Mean | Coupled


def power_of(part: Any, whole: Any, count: int) -> int | None:
    """Return ``k`` if a number of the batch is ``count ** k`` times one of a microbatch."""
    if type(part) is not type(whole):
        return None
    if part == whole or (part != part and whole != whole):  # NaN is a constant as well
        return 0
    if not isinstance(part, (int, float)) or not part:
        return None
    powers = (power for power in (1, -1, 2, -2))
    return next((k for k in powers if math.isclose(whole / part, float(count) ** k)), None)


def batch_dims(part: Tensor, whole: Tensor, count: int) -> list[int] | None:
    """Return the dimensions with the samples; ``None`` if one has another ratio of sizes."""
    if part.ndim != whole.ndim:
        return None
    dims = [dim for dim in range(part.ndim) if part.shape[dim] != whole.shape[dim]]
    if any(whole.shape[dim] != count * part.shape[dim] for dim in dims):
        return None
    return dims


def joined(values: Sequence[Any], fact: Fact | None) -> Any:
    """Return the value of the batch."""
    first, count = values[0], len(values)
    if not isinstance(first, Tensor) or count == 1:
        return first
    if isinstance(fact, Same):
        return first if not fact.power else first * float(count) ** fact.power
    if isinstance(fact, Rows):
        rows = _in_order(values, fact)
        return rows if not fact.power else rows * float(count) ** fact.power
    if isinstance(fact, Mean) or not first.ndim:
        is_whole = not (first.is_floating_point() or first.is_complex())
        power = fact.power if isinstance(fact, Mean) else int(is_whole)
        stacked = torch.stack(list(values))
        if is_whole and power == 1:
            return stacked.sum(0)
        mean = (stacked.double() if is_whole else stacked).mean(0)
        return mean if not power else mean * float(count) ** power
    return torch.cat(list(values))


def _in_order(values: Sequence[Tensor], rows: Rows) -> Tensor:
    if rows.blocks <= 1:
        return torch.cat(list(values), rows.dim)
    split = [value.unflatten(rows.dim, (rows.blocks, -1)) for value in values]
    return torch.cat(split, rows.dim + 1).flatten(rows.dim, rows.dim + 1)

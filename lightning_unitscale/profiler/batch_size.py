"""The largest batch that fits: found by a fit over two batch sizes, checked by profiling it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_unitscale.graph.nodes import tensors_in


@dataclass(frozen=True)
class BatchFit:
    """Live bytes at every moment of a step as a line over the batch size.

    The peak is the upper envelope of the lines, so it is right also where another moment becomes
    the highest (at small batches the optimizer, at large ones the backward pass).

    Attributes:
        batch_sizes: The two that were profiled.
        fixed_bytes: What each moment has at batch size 0.
        bytes_per_sample: What each sample adds to each moment.
    """

    batch_sizes: tuple[int, int]
    fixed_bytes: tuple[float, ...] = field(repr=False)
    bytes_per_sample: tuple[float, ...] = field(repr=False)

    def peak_bytes(self, batch_size: int) -> int:
        """The highest of all moments at a batch size."""
        lines = zip(self.fixed_bytes, self.bytes_per_sample, strict=True)
        return int(max(fixed + slope * batch_size for fixed, slope in lines))

    def largest(self, budget_bytes: int) -> int:
        """The largest batch size whose peak is within the budget; 0 if there is none.

        Raises:
            ValueError: If no batch is too large, since the peak does not depend on it.
        """
        fixed, slopes = np.array(self.fixed_bytes), np.array(self.bytes_per_sample)
        grows = slopes > 0
        if not grows.any():
            raise ValueError(
                "`max_batch_size`: the peak does not grow with the batch; expected inputs whose "
                "first dimension is the batch; give tensors of that shape to profile_graph."
            )
        if (fixed[~grows] > budget_bytes).any():
            return 0
        limit = ((budget_bytes - fixed[grows]) / slopes[grows]).min()
        return max(0, int(limit + 1e-6))


def fit(batch_sizes: tuple[int, int], first: Sequence[int], second: Sequence[int]) -> BatchFit:
    """Lines through two profiles.

    Args:
        batch_sizes: The batch size of each.
        first: Live bytes over the step at the first batch size.
        second: The same at the second. If the step has other moments there, the peaks alone are
            fitted.
    """
    if len(first) != len(second):
        first, second = [max(first)], [max(second)]
    low, high = batch_sizes
    slopes = tuple((b - a) / (high - low) for a, b in zip(first, second, strict=True))
    fixed = tuple(a - slope * low for a, slope in zip(first, slopes, strict=True))
    return BatchFit(batch_sizes, fixed, slopes)


def largest_batch(lines: BatchFit, budget_bytes: int, peak_at: Callable[[int], int]) -> int:
    """The largest batch whose own profile is within the budget; 0 if there is none.

    Args:
        lines: The fit.
        budget_bytes: Bytes that the peak may have.
        peak_at: Profiles a batch size.
    """
    size = lines.largest(budget_bytes)
    while size > 0 and (peak := peak_at(size)) > budget_bytes:
        # Where the step is not linear in the batch, by the share that it is off.
        size = min(size - 1, int(size * budget_bytes / peak))
    return size


def batch_size_of(inputs: Any) -> int | None:
    """The first dimension that most of the input tensors have; ``None`` without one."""
    sizes = [int(tensor.shape[0]) for tensor in tensors_in(inputs) if tensor.dim()]
    return Counter(sizes).most_common(1)[0][0] if sizes else None


def resized(inputs: Any, batch_size: int) -> Any:
    """The inputs with another batch size, as tensors without memory."""
    before = batch_size_of(inputs)

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != before:
            return value
        shape = (batch_size, *value.shape[1:])
        meta = torch.empty(shape, dtype=value.dtype, device="meta")
        return meta.requires_grad_(value.requires_grad)

    return tree_map(resize, inputs)

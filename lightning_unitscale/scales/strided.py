"""Choose the elements of a tensor's sample, at a fixed stride in memory order.

A stride that has a common factor with the row length would sample only some channels, since most
lengths are multiples of a power of two. A stride near a multiple or a simple fraction of that
length would sample only neighboring channels in successive rows. So the fractional part of stride
over length is near one of the golden ratio, which rational numbers approximate badly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

_GOLDEN: Final = (math.sqrt(5) - 1) / 2
# Numbers whose continued fractions end in ones, like that of the golden ratio.
_FRACTIONS: Final = (1 / (2 + _GOLDEN + 1), 1 - _GOLDEN, _GOLDEN, 1 - 1 / (2 + _GOLDEN + 1))
# Below this, a sample covers all parts of a row within a few rows, whatever the fraction.
_SHORT: Final = 16


@functools.lru_cache(maxsize=4096)
def sample_stride(numel: int, row_length: int, sample_size: int) -> int:
    """Return the distance between the sampled elements of a tensor."""
    shortest = -(-numel // sample_size)
    if shortest <= 1:
        return 1
    stride = shortest
    if min(shortest, row_length) >= _SHORT:
        ratios = [shortest / row_length, row_length / shortest]
        whole = [math.floor(ratio) for ratio in ratios]
        longer = [(q + f) * row_length for q in (whole[0], whole[0] + 1) for f in _FRACTIONS]
        parts = [row_length / (q + f) for q in (whole[1], whole[1] - 1) for f in _FRACTIONS
                 if q + f > 0]  # fmt: skip
        # Several strides per row, or several rows per stride.
        found = longer if ratios[0] >= 1 else [*parts, longer[-1]]
        stride = min(math.ceil(one) for one in found if one >= shortest)
    while math.gcd(stride, row_length) > 1:
        stride += 1
    return stride


@dataclass(frozen=True)
class Elements:
    """The elements of a tensor in the order of memory."""

    # Without repetitions by ``expand``, and without dimensions of one element.
    tensor: Tensor
    repeats: int

    @staticmethod
    def of(tensor: Tensor) -> Elements:
        """Return the elements of a tensor, without a copy."""
        tensor = tensor.resolve_neg()
        if tensor.is_contiguous():
            return Elements(tensor, 1)
        dims, repeats = dims_in_memory(tensor.shape, tensor.stride())
        shape, strides = [size for size, _ in dims], [stride for _, stride in dims]
        return Elements(tensor.as_strided(shape, strides), repeats)

    def stride(self, sample_size: int) -> int:
        """Return the distance between sampled elements."""
        row = next((size for size in reversed(self.tensor.shape) if size > 1), 1)
        return sample_stride(self.tensor.numel(), row, sample_size)


def dims_in_memory(
    shape: Sequence[int], strides: Sequence[int]
) -> tuple[list[tuple[int, int]], int]:
    """Return sizes and strides in the order of memory, and how often elements are repeated."""
    dims = sorted(
        ((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1),
        reverse=True,
    )
    repeats = math.prod(size for stride, size in dims if not stride and size)
    return [(size, stride) for stride, size in dims if stride or not size], repeats

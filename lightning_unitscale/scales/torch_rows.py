"""Compute rows with torch operations only, without control flow on data or waiting for a device.

They are the reference for all other implementations. They count all elements per format and
exponent, and support devices without a kernel.

All implementations sample the elements at the same fixed stride in memory order. A stride that has
a common factor with the row length would sample only some channels, since most lengths are
multiples of a power of two. A stride near a multiple or a simple fraction of that length would
sample only neighboring channels in successive rows. So the fractional part of stride over length is
near one of the golden ratio, which rational numbers approximate badly.

The losses of block formats come from whole blocks of a sample. Blocks lie along one dimension, the
one that the matmul sums over. If that is not the order of memory, only the elements of the sampled
blocks are gathered, so the tensor is never copied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lightning_unitscale.formats import FP32, BlockFormat
from lightning_unitscale.formats.round_numbers import block_scales, in_blocks
from lightning_unitscale.scales.layout import (
    BLOCK_COLUMNS,
    MAX_EXPONENT,
    MIN_EXPONENT,
    NUM_EXPONENTS,
    RowLayout,
)
from lightning_unitscale.scales.reduce import empty_rows, row_dtype

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

    tensor: Tensor  # without repetitions by ``expand``, and without dimensions of one element
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


# Counts are summed in 32 bits as long as they fit: 64-bit sums take twice the time.
_INT32_ELEMENTS = 2**31


def functional_row(tensor: Tensor, layout: RowLayout, *, factor: Tensor | None = None) -> Tensor:
    """Compute ``statistics_row`` with torch operations only, as the reference implementation."""
    check_floating(tensor)
    dtype = row_dtype(tensor.device)
    if tensor.numel() == 0:
        return empty_rows(1, layout, tensor.device)[0].clone()
    wide = tensor.detach()
    if wide.dtype not in (torch.float32, torch.float64):
        wide = wide.float()  # exact, so that every threshold is one comparison
    magnitude = wide.abs()
    finite = magnitude < math.inf
    # In FP32, squares of 1e-25 vanish and squares of 1e25 overflow. In FP64 they do not.
    exact = torch.where(finite, wide, 0.0).to(dtype)
    num_finite, infs = _count(finite), _count(magnitude == math.inf)
    elements = Elements.of(wide)
    sample, repeats = elements.tensor.reshape(-1), elements.repeats
    if layout.is_sampled and layout.sample_size is not None:
        sample = sample[:: elements.stride(layout.sample_size)]
    sampled = sample.abs()
    zeros = _count(sampled == 0) * repeats
    values = [
        torch.full((), tensor.numel(), dtype=dtype, device=tensor.device),
        zeros,
        tensor.numel() - num_finite - infs,
        infs,
        exact.sum(),
        torch.where(sampled < math.inf, sampled, 0.0).to(dtype).sum() * repeats,
        exact.square().sum(),
        torch.where(finite, magnitude, 0.0).amax(),
        torch.where(sampled > 0, sampled, math.inf).amin(),
    ]
    cuts = _cuts(layout, wide, factor)
    all_zeros = _count(magnitude == 0) if cuts else zeros
    for position in range(0, len(cuts), 3):
        # NaN and infinities are not below any cut.
        flushed, denormal, in_range = (_count(magnitude < cut) for cut in cuts[position:][:3])
        values += [num_finite - in_range, denormal - flushed, flushed - all_zeros]
    row = torch.stack([value.to(dtype) for value in values])
    if not layout.histogram:
        return row
    return torch.cat([row, exponent_counts(sample, dtype) * repeats])


def _count(condition: Tensor) -> Tensor:
    few = condition.numel() < _INT32_ELEMENTS
    return condition.sum(dtype=torch.int32 if few else torch.int64)


def check_floating(tensor: Tensor) -> None:
    """Check that a tensor has statistics."""
    if not tensor.is_floating_point():
        raise ValueError(
            f"tensor.dtype={tensor.dtype}: no statistics of this type. Expected a real "
            "floating-point tensor. Leave integer, boolean and complex tensors out."
        )
    if tensor.is_sparse:
        raise ValueError(
            f"tensor of shape {tuple(tensor.shape)}: no statistics of a sparse tensor. Expected a "
            "dense one. Leave it out or call to_dense()."
        )


def _cuts(layout: RowLayout, wide: Tensor, factor: Tensor | None) -> Sequence[float | Tensor]:
    """``RowLayout.fp32_cuts`` or ``fp64_cuts``, for ``x * factor``."""
    # The edges are divided by the factor instead of multiplying the elements. So nothing leaves the
    # range, and no rounding moves an element across an edge.
    if factor is None or not layout.edges:
        return layout.fp64_cuts if wide.dtype == torch.float64 else layout.fp32_cuts
    # Not a constant tensor, because copying it would wait for the device.
    inverse = factor.to(row_dtype(wide.device)).reciprocal()
    edges = torch.stack([inverse * edge for edge in layout.edges])
    nearest = edges.to(wide.dtype)
    following = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
    return torch.where(nearest.to(edges.dtype) <= edges, following, nearest).unbind()


def exponent_counts(sample: Tensor, dtype: torch.dtype) -> Tensor:
    """Count the elements, and the finite non-zero ones per exponent from -150 to 128."""
    magnitude = sample.abs()
    if sample.dtype == torch.float64:
        exponent = (magnitude.view(torch.int64) >> 52) - 1023
    else:
        # The exponent field of a subnormal number is 0. Multiplied by 2**64, the number is normal.
        tiny = magnitude < 2.0**-100
        lifted = torch.where(tiny, magnitude * 2.0**64, magnitude)
        exponent = (lifted.view(torch.int32) >> 23) - torch.where(tiny, 127 + 64, 127)
    bins = exponent.clamp(MIN_EXPONENT, MAX_EXPONENT) - MIN_EXPONENT
    counted = (magnitude > 0) & (magnitude < math.inf)
    # One more bin, which is dropped, for zeros, NaN and infinities.
    bins = torch.where(counted, bins, NUM_EXPONENTS).to(torch.int64)
    counts = torch.zeros(NUM_EXPONENTS + 1, dtype=dtype, device=sample.device)
    counts = counts.index_add(0, bins, torch.ones_like(bins, dtype=dtype))
    sampled = torch.full((1,), sample.numel(), dtype=dtype, device=sample.device)
    return torch.cat([sampled, counts[:NUM_EXPONENTS]])


def block_row(
    tensor: Tensor, axis: int, layout: RowLayout, tensor_scale: float | None = None
) -> Tensor:
    """Return the ``block_columns`` of a real floating-point tensor, with blocks along ``axis``."""
    # Without ``tensor_scale``, formats that need one take it from the tensor's largest magnitude.
    tensor = tensor.detach()
    if tensor.dim() == 0:
        tensor, axis = tensor[None], 0
    dtype = row_dtype(tensor.device)
    values: list[Tensor] = []
    sampled: dict[int, tuple[Tensor, int]] = {}
    for format in layout.block_formats:
        if tensor.numel() == 0:
            values += [torch.zeros((), dtype=dtype, device=tensor.device)] * len(BLOCK_COLUMNS)
            continue
        size = format.block_size
        if size not in sampled:
            sampled[size] = sampled_blocks(tensor, axis, size, layout.sample_size)
        scale: float | Tensor | None = tensor_scale
        if format.has_tensor_scale and scale is None:
            scale = _own_scale(tensor, format)
        values += _counts(*sampled[size], format, scale if format.has_tensor_scale else None)
    return torch.stack([value.to(dtype) for value in values])


def sampled_blocks(
    tensor: Tensor, axis: int, size: int, sample_size: int | None
) -> tuple[Tensor, int]:
    """Return blocks along a dimension in FP32, ``(blocks, size)``, and their number of elements."""
    # There are as many blocks as ``sample_size`` elements have, spread over the tensor, or all of
    # them. A last partial block is filled with zeros.
    axis %= tensor.dim()
    length, step = tensor.shape[axis], tensor.stride(axis)
    per_line = -(-length // size)
    number = tensor.numel() // length * per_line
    most = number if sample_size is None else max(1, sample_size // size)
    if number <= most:
        blocks, _, _ = in_blocks(tensor.float(), (axis - tensor.dim(),), size, False)
        return blocks.flatten(0, -2), tensor.numel()
    stride = sample_stride(number, per_line, most)
    chosen = torch.arange(0, number, stride, device=tensor.device)
    lines, begin = chosen // per_line, chosen % per_line * size
    # Where each line begins in memory.
    places = begin * step
    dims = list(zip(tensor.shape, tensor.stride(), strict=True))
    for dim_size, dim_stride in reversed(dims[:axis] + dims[axis + 1 :]):
        places += lines % dim_size * dim_stride
        lines = lines // dim_size
    offsets = torch.arange(size, device=tensor.device)
    is_there = begin[:, None] + offsets < length
    index = torch.where(is_there, places[:, None] + offsets * step, 0)
    last = sum((dim_size - 1) * dim_stride for dim_size, dim_stride in dims)
    memory = tensor.as_strided((last + 1,), (1,), tensor.storage_offset())
    found = memory[index.flatten()].view(index.shape).float()
    num_last = int(np.count_nonzero(np.arange(0, number, stride) % per_line == per_line - 1))
    return torch.where(is_there, found, 0.0), index.numel() - num_last * (-length % size)


def _own_scale(tensor: Tensor, format: BlockFormat) -> Tensor:
    """Return the scale that a tensor's largest finite magnitude gives it."""
    smallest, largest = torch.aminmax(tensor)
    amax = torch.maximum(-smallest, largest).float()
    scale = amax / amax.new_full((), format.largest_block)
    return torch.where(scale.isfinite() & (scale > 0), scale, 1.0)


def _counts(
    blocks: Tensor, numel: int, format: BlockFormat, tensor_scale: float | Tensor | None
) -> list[Tensor]:
    """Return the ``BLOCK_COLUMNS`` of a format; blocks with NaN or infinities count as zeros."""
    largest = blocks.abs().amax(-1, keepdim=True)
    is_finite = largest < math.inf
    blocks = torch.where(is_finite, blocks, 0.0)
    largest = torch.where(is_finite, largest, 0.0)
    present = largest > 0
    before, *_ = block_scales(largest, format, tensor_scale)
    zeros = (blocks * before).abs() <= format.element.flush_threshold
    outer = 1.0 if tensor_scale is None else tensor_scale
    # The end of E8M0's range is beyond that of FP32.
    saturated = largest > min(format.largest_block, FP32.max) * outer
    underflow = present & (largest < format.smallest_block * outer)
    log2 = torch.where(present, largest, 1.0).to(row_dtype(blocks.device)).log2()
    return [
        largest.new_full((), numel),
        (zeros & (blocks != 0)).sum(),
        present.sum(),
        saturated.sum(),
        underflow.sum(),
        log2.sum(),
        log2.square().sum(),
    ]

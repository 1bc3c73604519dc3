"""On-device statistics of a tensor, as one row of fixed columns.

``statistics_row`` runs anywhere: eagerly, under AOTAutograd with fake tensors, under Inductor. It
is one operator, which a C kernel computes in one read on the CPU, and Triton kernels on CUDA. Other
devices, and those without a C compiler or Triton, have torch operations, which are purely
functional: no mutation, no synchronisation, no control flow on data.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_unitscale.scales import cpu_kernel
from lightning_unitscale.scales.layout import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    NUM_EXPONENTS,
    SAMPLE_GROUP,
    RowLayout,
)
from lightning_unitscale.scales.reduce import empty_rows, row_dtype

# Counts are summed in 32 bits as long as they fit: 64-bit sums take twice the time.
_INT32_ELEMENTS = 2**31


def statistics_row(tensor: Tensor, layout: RowLayout, *, factor: Tensor | None = None) -> Tensor:
    """Statistics of one tensor.

    Args:
        tensor: Real floating-point tensor of any shape, type and strides; it may be empty, and may
            hold NaN and infinities, which are counted and left out of everything else.
        layout: The columns.
        factor: Power of two, 0-d tensor on the same device. The format counts are then those of
            ``tensor * factor``, without rounding the product. Moments and exponent counts stay
            those of ``tensor``: a power of two only shifts them.

    Returns:
        Shape ``(layout.num_columns,)`` of type ``row_dtype(tensor.device)``, without gradient.

    Raises:
        ValueError: If the tensor is not a real floating-point one.
    """
    _check(tensor)
    tensor = tensor.detach()
    if tensor.device.type == "cpu" or (tensor.device.type == "cuda" and has_triton()):
        row: Tensor = ROW_OPERATOR(tensor, [] if factor is None else [factor], layout.key)
        return row
    return functional_row(tensor, layout, factor=factor)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, which makes the kernels for CUDA; it is imported when used."""
    return importlib.util.find_spec("triton") is not None


def functional_row(tensor: Tensor, layout: RowLayout, *, factor: Tensor | None = None) -> Tensor:
    """``statistics_row`` from torch operations alone; the reference for every other way to it.

    Args:
        tensor: As there.
        layout: As there.
        factor: As there.

    Returns:
        As there; sums may differ in their last digits, nothing else.

    Raises:
        ValueError: As there.
    """
    _check(tensor)
    dtype = row_dtype(tensor.device)
    if tensor.numel() == 0:
        return empty_rows(1, layout, tensor.device)[0].clone()
    wide = _widen(tensor.detach())
    magnitude = wide.abs()
    finite = magnitude < math.inf
    # Squares of gradients of 1e-25 vanish in FP32 and those of 1e25 overflow; not so in FP64.
    exact = torch.where(finite, wide, 0.0).to(dtype)
    num_finite = _count(finite)
    infs = _count(magnitude == math.inf)
    zeros = _count(magnitude == 0)
    values = [
        torch.full((), tensor.numel(), dtype=dtype, device=tensor.device),
        zeros,
        tensor.numel() - num_finite - infs,
        infs,
        exact.sum(),
        exact.abs().sum(),
        exact.square().sum(),
        torch.where(finite, magnitude, 0.0).amax(),
        torch.where(magnitude > 0, magnitude, math.inf).amin(),
    ]
    cuts = _cuts(layout, wide, factor)
    for position in range(0, len(cuts), 3):
        # NaN and infinities are not below any cut.
        flushed, denormal, in_range = (_count(magnitude < cut) for cut in cuts[position:][:3])
        values += [num_finite - in_range, denormal - flushed, flushed - zeros]
    row = torch.stack([value.to(dtype) for value in values])
    if not layout.histogram:
        return row
    return torch.cat([row, _exponent_counts(wide, layout.sample_size, dtype)])


def _count(condition: Tensor) -> Tensor:
    few = condition.numel() < _INT32_ELEMENTS
    return condition.sum(dtype=torch.int32 if few else torch.int64)


def _check(tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(
            f"tensor.dtype={tensor.dtype}: no statistics of this type; expected a real "
            "floating-point tensor; leave integer, boolean and complex tensors out"
        )
    if tensor.is_sparse:
        raise ValueError(
            f"tensor of shape {tuple(tensor.shape)}: no statistics of a sparse tensor; expected a "
            "dense one; leave it out or call to_dense()"
        )


def _widen(tensor: Tensor) -> Tensor:
    """To FP32, exactly, whatever is narrower: every threshold is then one comparison."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def _cuts(layout: RowLayout, wide: Tensor, factor: Tensor | None) -> Sequence[float | Tensor]:
    """``RowLayout.fp32_cuts`` or ``fp64_cuts``, for ``x * factor``.

    The edges are divided by the factor, not the elements multiplied: nothing then leaves the range,
    and no rounding can move an element across an edge.
    """
    if factor is None:
        return layout.fp64_cuts if wide.dtype == torch.float64 else layout.fp32_cuts
    # No constant tensor: a copy of it to the device would wait for the device.
    inverse = factor.to(row_dtype(wide.device)).reciprocal()
    edges = torch.stack([inverse * edge for edge in layout.edges])
    nearest = edges.to(wide.dtype)
    following = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
    return torch.where(nearest.to(edges.dtype) <= edges, following, nearest).unbind()


def _exponent_counts(wide: Tensor, sample_size: int | None, dtype: torch.dtype) -> Tensor:
    """Number of elements looked at, then of finite non-zero ones per exponent -150 to 128.

    Returns:
        Shape ``(1 + NUM_EXPONENTS,)``.
    """
    sample = wide.reshape(-1)
    if sample_size is not None and sample.numel() > sample_size:
        sample = sample[_sample_index(sample.numel(), sample_size, sample.device)]
    bins = _exponent_bins(sample)
    # One bin more, thrown away, for zeros, NaN and infinities.
    counts = torch.zeros(NUM_EXPONENTS + 1, dtype=dtype, device=wide.device)
    counts = counts.index_add(0, bins, torch.ones_like(bins, dtype=dtype))
    sampled = torch.full((1,), sample.numel(), dtype=dtype, device=wide.device)
    return torch.cat([sampled, counts[:NUM_EXPONENTS]])


def _sample_index(numel: int, sample_size: int, device: torch.device) -> Tensor:
    """Four neighbouring elements of each of equal stretches, at a pseudo-random position in it.

    A constant position would hit the same few channels each time, since both the length of a
    stretch and the row length of a tensor are mostly multiples of a power of two. Single elements
    would be a better sample, but on a CPU to collect them costs half as much as all sums.
    """
    groups, number = numel // SAMPLE_GROUP, sample_size // SAMPLE_GROUP
    position = torch.arange(number, device=device)
    # Stretches are as long as the quotient, and the remainder is spread between them.
    length, more = groups // number, groups % number * 2**32 // number
    # Multiples of the golden ratio (in units of 2**-32, modulo 1) spread most evenly.
    offset = (position * 2_654_435_769) & 0xFFFF_FFFF
    group = position * length + ((position * more) >> 32) + ((offset * length) >> 32)
    return (group[:, None] * SAMPLE_GROUP + torch.arange(SAMPLE_GROUP, device=device)).flatten()


def _exponent_bins(sample: Tensor) -> Tensor:
    """Bin of every element: its exponent from -150 on; the last one for zero, NaN and infinity."""
    magnitude = sample.abs()
    if sample.dtype == torch.float64:
        exponent = (magnitude.view(torch.int64) >> 52) - 1023
    else:
        # The exponent field of a subnormal says nothing; 2**64 times as large it is normal.
        tiny = magnitude < 2.0**-100
        lifted = torch.where(tiny, magnitude * 2.0**64, magnitude)
        exponent = (lifted.view(torch.int32) >> 23) - torch.where(tiny, 127 + 64, 127)
    bins = exponent.clamp(MIN_EXPONENT, MAX_EXPONENT) - MIN_EXPONENT
    counted = (magnitude > 0) & (magnitude < math.inf)
    return torch.where(counted, bins, NUM_EXPONENTS).to(torch.int64)


_LIBRARY = torch.library.Library(cpu_kernel.NAMESPACE, "FRAGMENT")
# A list of no or one factor stands for an optional one: torch's C interface hands over an optional
# value as memory that its reader has to free, which only C++ can in all of its versions.
ROW_SCHEMA = "(Tensor tensor, Tensor[] factor, str layout) -> Tensor"
# Any strides will do: without the tag Inductor writes a tensor twice that it would have fused, once
# for this operator and once for everybody else.
_LIBRARY.define(f"statistics_row{ROW_SCHEMA}", tags=(torch.Tag.flexible_layout,))
# What the kernel does not take comes back here.
_LIBRARY.define(f"statistics_row_of_any{ROW_SCHEMA}")
ROW_OPERATOR = torch.ops.lightning_unitscale.statistics_row.default


# Not for the CPU alone: the C kernel is registered there when it is compiled, and goes first.
@torch.library.impl(_LIBRARY, "statistics_row", "CompositeExplicitAutograd")
def _row(tensor: Tensor, factor: Sequence[Tensor], key: str) -> Tensor:
    if cpu_kernel.is_available():
        row: Tensor = ROW_OPERATOR(tensor, factor, key)
        return row
    return _row_without_kernel(tensor, factor, key)


@torch.library.impl(_LIBRARY, "statistics_row", "CUDA")
def _row_on_cuda(tensor: Tensor, factor: Sequence[Tensor], key: str) -> Tensor:
    if not has_triton():
        return _row_without_kernel(tensor, factor, key)
    from lightning_unitscale.scales.triton_statistics import triton_row

    return triton_row(tensor, RowLayout.from_key(key), factor[0] if factor else None)


@torch.library.impl(_LIBRARY, "statistics_row_of_any", "CompositeExplicitAutograd")
def _row_of_any(tensor: Tensor, factor: Sequence[Tensor], key: str) -> Tensor:
    if tensor.dtype != torch.float64 and tensor.numel():
        wide = _widen(tensor).contiguous()
        if cpu_kernel.add_new_layout(RowLayout.from_key(key)) or wide is not tensor:
            row: Tensor = ROW_OPERATOR(wide, factor, key)
            return row
    return _row_without_kernel(tensor, factor, key)


def _row_without_kernel(tensor: Tensor, factor: Sequence[Tensor], key: str) -> Tensor:
    return functional_row(tensor, RowLayout.from_key(key), factor=factor[0] if factor else None)


@torch.library.register_fake("lightning_unitscale::statistics_row", lib=_LIBRARY)
def _fake_row(tensor: Tensor, factor: Sequence[Tensor], key: str) -> Tensor:
    return tensor.new_empty(RowLayout.from_key(key).num_columns, dtype=torch.float64)

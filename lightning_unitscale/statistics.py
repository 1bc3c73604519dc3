"""On-device statistics of a tensor, as one row of fixed columns.

``statistics_row`` is purely functional (no mutation, no synchronisation, no control flow on data),
so it runs unchanged in eager, under AOTAutograd with fake tensors and under Inductor, where it
fuses with the kernel that makes the tensor. ``eager_statistics_row`` gives the same row with the
fewest passes over memory that separate kernels allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_unitscale.row_layout import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    NUM_EXPONENTS,
    RowLayout,
)
from lightning_unitscale.row_reduction import empty_rows, row_dtype


def statistics_row(tensor: Tensor, layout: RowLayout, *, factor: Tensor | None = None) -> Tensor:
    """Statistics of one tensor, in a form that every compiler can trace.

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
    dtype = row_dtype(tensor.device)
    if tensor.numel() == 0:
        return empty_rows(1, layout, tensor.device)[0]
    wide = _widen(tensor.detach())
    magnitude = wide.abs()
    finite = magnitude < math.inf
    clean = torch.where(finite, wide, 0.0)
    magnitude = clean.abs()
    # Squares of gradients of 1e-25 vanish in FP32 and those of 1e25 overflow; not so in FP64.
    exact = clean.to(dtype)
    values = [
        torch.full((), tensor.numel(), dtype=dtype, device=tensor.device),
        (wide == 0).sum(),
        wide.isnan().sum(),
        wide.isinf().sum(),
        exact.sum(),
        exact.abs().sum(),
        exact.square().sum(),
        magnitude.amax(),
        torch.where(magnitude > 0, magnitude, math.inf).amin(),
    ]
    cuts = _cuts(layout, wide, factor)
    zeros = values[1]
    nonfinite = values[2] + values[3]
    for position in range(len(layout.formats)):
        # ``clean`` turned NaN and infinities into zeros, which lie below every cut.
        below = [(magnitude < cuts[3 * position + k]).sum() for k in range(3)]
        values += [tensor.numel() - below[2], below[1] - below[0], below[0] - zeros - nonfinite]
    row = torch.stack([value.to(dtype) for value in values])
    if not layout.histogram:
        return row
    return torch.cat([row, _exponent_counts(wide, layout.sample_size, dtype)])


def eager_statistics_row(
    tensor: Tensor, layout: RowLayout, *, factor: Tensor | None = None
) -> Tensor:
    """The same as ``statistics_row``, as fast as separate kernels can be.

    Args:
        tensor: As for ``statistics_row``.
        layout: The columns.
        factor: As for ``statistics_row``.

    Returns:
        As ``statistics_row``: equal counts and extremes, and sums equal but for rounding.

    Raises:
        ValueError: If the tensor is not a real floating-point one.
    """
    with torch.no_grad():
        return statistics_row(tensor, layout, factor=factor)


def _check(tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(
            f"tensor.dtype={tensor.dtype}: no statistics of this type; expected a real "
            "floating-point tensor; leave integer, boolean and complex tensors out"
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"tensor.layout={tensor.layout}: no statistics of this layout; expected a dense "
            "(strided) tensor; leave it out or call to_dense()"
        )


def _widen(tensor: Tensor) -> Tensor:
    """To FP32, exactly, whatever is narrower: every threshold is then one comparison."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def _cuts(layout: RowLayout, wide: Tensor, factor: Tensor | None) -> Sequence[float | Tensor]:
    """The numbers ``cut`` of ``RowLayout.fp32_cuts`` or ``fp64_cuts``, for ``x * factor``.

    Thresholds are divided by the factor instead, and moved to the next number of the type of
    ``wide``, so that no rounding can move an element across one.
    """
    if factor is None:
        return layout.fp64_cuts if wide.dtype == torch.float64 else layout.fp32_cuts
    dtype = row_dtype(wide.device)
    limits, limit_is_below = layout.limits()
    scaled = torch.tensor(limits, dtype=dtype, device=wide.device) / factor.to(dtype)
    below = torch.tensor(limit_is_below, device=wide.device)
    cuts = scaled.to(wide.dtype)
    following = torch.nextafter(cuts, torch.full_like(cuts, math.inf))
    rounded = cuts.to(dtype)
    return torch.where((rounded < scaled) | (below & (rounded == scaled)), following, cuts).unbind()


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
    """One element of each of ``sample_size`` equal strides, at a pseudo-random place inside it.

    A constant offset would hit the same few channels each time, since both the stride and the row
    length of a tensor are mostly multiples of a power of two.
    """
    stride = numel // sample_size
    position = torch.arange(sample_size, device=device)
    # Knuth's multiplicative hash, 2**32 / golden ratio.
    return position * stride + ((position * 2_654_435_761) >> 15) % stride


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

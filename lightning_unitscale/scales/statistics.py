"""On-device statistics of a tensor, as one row of fixed columns.

There are two kinds of rows. The exact one reads everything for every column; it serves measuring
units and ``track_scales``, which need it rarely. The light one serves the monitor: extremes and
sums are of all elements, the rest of a strided sample. Each is one operator, so that a compiler
sees one node: ``host_rows.py`` computes it on a CPU and ``triton_statistics.py`` on CUDA. In a
compiled graph ``step_rows.py`` has one node for several light rows. Other devices, and exact
counts per format and exponent, have the torch operations of this file, which have no control flow
on data and do not wait for the device.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_unitscale.scales.layout import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    NUM_EXPONENTS,
    RowLayout,
)
from lightning_unitscale.scales.reduce import completed_rows, empty_rows, row_dtype
from lightning_unitscale.scales.strided import Elements

# Counts are summed in 32 bits as long as they fit: 64-bit sums take twice the time.
_INT32_ELEMENTS = 2**31


def statistics_row(tensor: Tensor, layout: RowLayout, *, factor: Tensor | None = None) -> Tensor:
    """Statistics of one tensor."""
    check_floating(tensor)
    tensor = tensor.detach()
    measured = layout.measured
    if measured is not layout and tensor.numel() <= (layout.sample_size or 0):
        return functional_row(tensor, layout, factor=factor)
    row: Tensor = ROW_OPERATOR(tensor, factor if measured is layout else None, measured.key)
    return row if measured is layout else completed_rows(row[None].cpu(), layout)[0].to(row.device)


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed; it makes the kernels for CUDA."""
    return importlib.util.find_spec("triton") is not None


def functional_row(tensor: Tensor, layout: RowLayout, *, factor: Tensor | None = None) -> Tensor:
    """``statistics_row`` from torch operations alone; the reference for every other way to it."""
    check_floating(tensor)
    dtype = row_dtype(tensor.device)
    if tensor.numel() == 0:
        return empty_rows(1, layout, tensor.device)[0].clone()
    wide = widened(tensor.detach())
    magnitude = wide.abs()
    finite = magnitude < math.inf
    # Squares of gradients of 1e-25 vanish in FP32 and those of 1e25 overflow; not so in FP64.
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
            f"tensor.dtype={tensor.dtype}: no statistics of this type; expected a real "
            "floating-point tensor; leave integer, boolean and complex tensors out"
        )
    if tensor.is_sparse:
        raise ValueError(
            f"tensor of shape {tuple(tensor.shape)}: no statistics of a sparse tensor; expected a "
            "dense one; leave it out or call to_dense()"
        )


def widened(tensor: Tensor) -> Tensor:
    """To FP32, exactly, whatever is narrower: every threshold is then one comparison."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def _cuts(layout: RowLayout, wide: Tensor, factor: Tensor | None) -> Sequence[float | Tensor]:
    """``RowLayout.fp32_cuts`` or ``fp64_cuts``, for ``x * factor``.

    The edges are divided by the factor, not the elements multiplied: nothing then leaves the range,
    and no rounding can move an element across an edge.
    """
    if factor is None or not layout.edges:
        return layout.fp64_cuts if wide.dtype == torch.float64 else layout.fp32_cuts
    # No constant tensor: a copy of it to the device would wait for the device.
    inverse = factor.to(row_dtype(wide.device)).reciprocal()
    edges = torch.stack([inverse * edge for edge in layout.edges])
    nearest = edges.to(wide.dtype)
    following = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
    return torch.where(nearest.to(edges.dtype) <= edges, following, nearest).unbind()


def exponent_counts(sample: Tensor, dtype: torch.dtype) -> Tensor:
    """Number of elements, then of finite non-zero ones per exponent -150 to 128."""
    bins = _exponent_bins(sample)
    # One bin more, thrown away, for zeros, NaN and infinities.
    counts = torch.zeros(NUM_EXPONENTS + 1, dtype=dtype, device=sample.device)
    counts = counts.index_add(0, bins, torch.ones_like(bins, dtype=dtype))
    sampled = torch.full((1,), sample.numel(), dtype=dtype, device=sample.device)
    return torch.cat([sampled, counts[:NUM_EXPONENTS]])


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


_LIBRARY = torch.library.Library("lightning_unitscale", "FRAGMENT")
# Any strides will do: without the tag Inductor writes a tensor twice that it would have fused, once
# for this operator and once for everybody else.
_LIBRARY.define(
    "statistics_row(Tensor tensor, Tensor? factor, str layout) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
ROW_OPERATOR = torch.ops.lightning_unitscale.statistics_row.default
_LIBRARY.define(
    "statistics_rows(Tensor[] tensors, str layout) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
JOINT_ROWS_OPERATOR = torch.ops.lightning_unitscale.statistics_rows.default


@torch.library.impl(_LIBRARY, "statistics_row", "CompositeExplicitAutograd")
def _row(tensor: Tensor, factor: Tensor | None, key: str) -> Tensor:
    layout = RowLayout.from_key(key)
    if tensor.device.type != "cpu" or _counts_all(layout):
        return functional_row(tensor, layout, factor=factor)
    from lightning_unitscale.scales.host_rows import host_row

    return host_row(tensor, layout)


@torch.library.impl(_LIBRARY, "statistics_row", "CUDA")
def _row_on_cuda(tensor: Tensor, factor: Tensor | None, key: str) -> Tensor:
    layout = RowLayout.from_key(key)
    if not has_triton() or _counts_all(layout):
        return functional_row(tensor, layout, factor=factor)
    from lightning_unitscale.scales.triton_statistics import triton_row

    return triton_row(tensor, layout)


def _counts_all(layout: RowLayout) -> bool:
    """Return whether formats or exponents are counted of all elements."""
    return not layout.is_sampled and (layout.histogram or bool(layout.formats))


@torch.library.impl(_LIBRARY, "statistics_rows", "CompositeExplicitAutograd")
def _joint_rows(tensors: Sequence[Tensor], key: str) -> Tensor:
    from lightning_unitscale.scales.step_rows import new_rows

    rows = new_rows(RowLayout.from_key(key), tensors[0].device)
    for tensor in tensors:
        rows.add(tensor)
    joint: Tensor = rows.finish()
    return joint


@torch.library.register_fake("lightning_unitscale::statistics_rows", lib=_LIBRARY)
def _fake_rows(tensors: Sequence[Tensor], key: str) -> Tensor:
    shape = (len(tensors), RowLayout.from_key(key).num_columns)
    return tensors[0].new_empty(shape, dtype=torch.float64)


@torch.library.register_fake("lightning_unitscale::statistics_row", lib=_LIBRARY)
def _fake_row(tensor: Tensor, factor: Tensor | None, key: str) -> Tensor:
    return tensor.new_empty(RowLayout.from_key(key).num_columns, dtype=torch.float64)

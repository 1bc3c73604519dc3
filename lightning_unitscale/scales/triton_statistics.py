"""Triton kernels that make the statistics row of a CUDA tensor in one read, in two launches.

Every program reads its share of the tensor, block by block, each thread adding up what it sees, and
writes a row of its own; a second kernel adds up the rows. Results are the same from run to run: the
shares follow from the number of elements alone, and every sum has one order; nothing is atomic but
the counting of exponents, in integers. Everything is exact but the three sums, whose additions are
in FP64 (squares too; those of FP32 and narrower are exact there): each one has a relative error of
2**-53, and of N elements of e bytes one goes through at most ``96 + N e / 2**19`` of them.

Bytes moved: ``N e``, and for each program a row of 8 bytes a column, written and read. There is one
program for every 16 KiB, and at most 512; without exponents a row has 18 columns (three formats),
and with a sample of 16,384 elements the exponents are in the rows of 4 to 32 programs only.

Checked with Triton 3.6 (which belongs to torch 2.11) and 3.7 (to torch 2.13).
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_unitscale.scales.layout import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    MOMENT_COLUMNS,
    NUM_EXPONENTS,
    SAMPLE_GROUP,
    RowLayout,
)
from lightning_unitscale.scales.reduce import empty_rows

NUM_WARPS: Final = 8
_THREADS: Final = 32 * NUM_WARPS
# What a thread reads at once; then it needs so few registers that five such programs fit on a
# multiprocessor, with bytes enough on their way.
_THREAD_BYTES: Final = 16
_MIN_BLOCKS: Final = 4
# What large GPUs run at a time, so that the last programs do not leave much of it idle.
_MAX_PROGRAMS: Final = 512
_JOINT_COLUMNS: Final = 32
_MAX_DIMS: Final = 4
_TYPES: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

# As kernels see them.
_INF = tl.constexpr(math.inf)
_LOWEST, _HIGHEST = tl.constexpr(MIN_EXPONENT), tl.constexpr(MAX_EXPONENT)
_EXPONENTS = tl.constexpr(NUM_EXPONENTS)
_BINS = tl.constexpr(512)  # a power of two above that
_GROUP = tl.constexpr(SAMPLE_GROUP)
_MOMENTS = tl.constexpr(len(MOMENT_COLUMNS))
_ABS_MAX = tl.constexpr(MOMENT_COLUMNS.index("abs_max"))
_ABS_MIN = tl.constexpr(MOMENT_COLUMNS.index("abs_min"))


def triton_row(tensor: Tensor, layout: RowLayout, factor: Tensor | None = None) -> Tensor:
    """``statistics_row`` of a CUDA tensor; of a CPU tensor in Triton's interpreter.

    A tensor with gaps is read where it lies, in the order of memory, which is also the order of its
    sample. Copied first, at the price of another launch, are FP8 tensors and those whose elements
    take more than four strides to describe.

    Args:
        tensor: As there, without gradient.
        layout: As there.
        factor: As there.
    """
    numel = tensor.numel()
    if numel == 0:
        return empty_rows(1, layout, tensor.device)[0].clone()
    if tensor.dtype not in _TYPES:
        tensor = tensor.float()
    dims = _dims(tensor)
    if len(dims) > _MAX_DIMS:
        dims = [(numel, 1)]
        tensor = tensor.contiguous()
    last = sum((size - 1) * stride for size, stride in dims)
    is_long = max(numel, last) >= 2**30  # with as much again for what fills up the last program
    each = _THREAD_BYTES // tensor.element_size()
    if len(dims) > 1:
        # Divisions take registers, those of 64 bits twice as many.
        each = 2 if is_long else min(4, each)
    block = _THREADS * each
    num_blocks = -(-numel // block)
    blocks = -(-num_blocks // min(_MAX_PROGRAMS, -(-num_blocks // _MIN_BLOCKS)))
    num_programs = -(-num_blocks // blocks)
    sample_size = layout.sample_size
    is_sampled = layout.histogram and sample_size is not None and numel > sample_size
    num_groups = sample_size // SAMPLE_GROUP if is_sampled and sample_size else 1
    groups = numel // SAMPLE_GROUP
    sizes, strides = zip(*dims, *[(1, 0)] * (_MAX_DIMS - len(dims)), strict=True)
    shape = (num_programs, layout.num_columns)
    rows = torch.empty(shape, dtype=torch.float64, device=tensor.device)
    with torch.cuda.device_of(tensor):
        partial_rows[(num_programs,)](
            tensor,
            factor,
            rows,
            numel,
            *sizes[1:],
            *strides,
            blocks,
            num_groups * SAMPLE_GROUP,
            groups // num_groups,
            groups % num_groups * 2**32 // num_groups,
            SAMPLED=is_sampled,
            LONG=is_long,
            EACH=each,
            **constants_of(layout),
            num_warps=NUM_WARPS,
        )
        if num_programs == 1:
            return rows[0]
        row = torch.empty(layout.num_columns, dtype=torch.float64, device=tensor.device)
        # The rows beyond those of programs that have seen a part of the sample have no exponents.
        counting = -(-num_groups * SAMPLE_GROUP // block) if is_sampled else num_programs
        joint_row[(-(-layout.num_columns // _JOINT_COLUMNS),)](
            rows,
            row,
            num_programs,
            min(num_programs, counting),
            COLUMNS=layout.num_columns,
            NUM_HEAD=layout.num_head,
            WIDTH=_JOINT_COLUMNS,
            ROWS=64,
        )
    return row


def constants_of(layout: RowLayout) -> dict[str, Any]:
    """What the first kernel is compiled with for a layout."""
    return {
        "EDGES": layout.edges,
        "NUM_EDGES": len(layout.edges),
        "HISTOGRAM": layout.histogram,
        "COLUMNS": layout.num_columns,
        "THREADS": _THREADS,
    }


def _dims(tensor: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides in the order of memory, of as few dimensions as there can be."""
    dims: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True):
        if dims and dims[-1][1] == stride * size:
            dims[-1] = (dims[-1][0] * size, stride)
        elif size > 1:
            dims.append((size, stride))
    return dims or [(1, 1)]


@triton.jit
def partial_rows(
    tensor: tl.tensor,  # FP16, BF16, FP32 or FP64
    factor: tl.tensor,  # 0-d, or ``None``
    rows: tl.tensor,  # FP64 of shape ``(programs, COLUMNS)``
    numel: tl.tensor,  # number of elements
    size1: tl.tensor,  # size of the second dimension; that of the first follows
    size2: tl.tensor,  # of the third
    size3: tl.tensor,  # of the fourth
    stride0: tl.tensor,  # stride of the first dimension, in elements
    stride1: tl.tensor,  # of the second
    stride2: tl.tensor,  # of the third
    stride3: tl.tensor,  # of the fourth
    blocks: tl.tensor,  # number of blocks of each program
    sample_size: tl.tensor,  # number of elements whose exponents are counted, if ``SAMPLED``
    stretch: tl.tensor,  # groups of elements for each group of the sample
    remainder: tl.tensor,  # the rest of that division, in units of 2**-32
    SAMPLED: tl.constexpr,  # whether exponents are counted of a sample only
    LONG: tl.constexpr,  # whether positions take 64 bits
    EACH: tl.constexpr,  # elements that a thread reads at once
    EDGES: tl.constexpr,  # ``RowLayout.edges``
    NUM_EDGES: tl.constexpr,  # their number
    HISTOGRAM: tl.constexpr,  # whether exponents are counted
    COLUMNS: tl.constexpr,  # number of columns
    THREADS: tl.constexpr,  # threads of a program
) -> None:
    """The row of each program's share."""
    program = tl.program_id(0)
    if LONG:
        program = program.to(tl.int64)
    inverse = tl.full((), 1.0, tl.float64)
    if factor is not None:
        inverse /= tl.load(factor).to(tl.float64)
    zeros = tl.full([THREADS], 0, tl.int32)
    nans = tl.full([THREADS], 0, tl.int32)
    infs = tl.full([THREADS], 0, tl.int32)
    sums = tl.full([THREADS], 0, tl.float64)
    abs_sums = tl.full([THREADS], 0, tl.float64)
    square_sums = tl.full([THREADS], 0, tl.float64)
    largest = wide(tl.full([THREADS], 0, tensor.dtype.element_ty))
    smallest = largest + _INF
    limits: tl.tuple = ()
    within: tl.tuple = ()
    for edge in tl.static_range(NUM_EDGES):
        # The largest number of the tensor's type that is not above the edge; nothing is rounded.
        limit = tl.full((), EDGES[edge], tl.float64) * inverse
        if largest.dtype == tl.float32:
            nearest = limit.to(tl.float32)
            # Codes of positive numbers are in the order of the numbers.
            below = (nearest.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
            limit = tl.where(nearest.to(tl.float64) > limit, below, nearest)
        limits += (limit,)
        within += (tl.full([THREADS], 0, tl.int32),)
    exponents = tl.full([_BINS], 0, tl.int32)
    lane = tl.arange(0, THREADS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    BLOCK: tl.constexpr = THREADS * EACH
    for block in range(blocks):
        index = (program * blocks + block) * BLOCK + lane
        offset = _offset(index, size1, size2, size3, stride0, stride1, stride2, stride3)
        # The last block is filled up with zeros.
        x = wide(tl.load(tensor + offset, mask=index < numel, other=0.0))
        magnitude = tl.abs(x)
        finite = magnitude < _INF
        exact = tl.where(finite, x, 0.0).to(tl.float64)
        zeros += tl.sum((magnitude == 0).to(tl.int32), 1)
        nans += tl.sum((magnitude != magnitude).to(tl.int32), 1)
        infs += tl.sum((magnitude == _INF).to(tl.int32), 1)
        sums += tl.sum(exact, 1)
        abs_sums += tl.sum(tl.abs(exact), 1)
        square_sums += tl.sum(exact * exact, 1)
        largest = tl.maximum(largest, tl.max(tl.where(finite, magnitude, 0.0), 1))
        smallest = tl.minimum(smallest, tl.min(tl.where(magnitude > 0, magnitude, _INF), 1))
        counts: tl.tuple = ()
        for edge in tl.static_range(NUM_EDGES):
            is_within = (magnitude <= limits[edge]).to(tl.int32)
            counts += (within[edge] + tl.sum(is_within, 1),)
        within = counts
        if HISTOGRAM and not SAMPLED:
            exponents += _exponent_counts(x)
    rows += program.to(tl.int64) * COLUMNS
    share = blocks * BLOCK
    num_elements = tl.minimum(share, numel - program * share)
    num_zeros, num_nans, num_infs = tl.sum(zeros), tl.sum(nans), tl.sum(infs)
    tl.store(rows, num_elements)
    tl.store(rows + 1, num_zeros + num_elements - share)
    tl.store(rows + 2, num_nans)
    tl.store(rows + 3, num_infs)
    tl.store(rows + 4, tl.sum(sums))
    tl.store(rows + 5, tl.sum(abs_sums))
    tl.store(rows + 6, tl.sum(square_sums))
    tl.store(rows + _ABS_MAX, tl.max(largest))
    tl.store(rows + _ABS_MIN, tl.min(smallest))
    rows += _MOMENTS
    for edge in tl.static_range(0, NUM_EDGES, 3):
        flushed, denormal = tl.sum(within[edge]), tl.sum(within[edge + 1])
        in_range = tl.sum(within[edge + 2])
        tl.store(rows + edge, share - num_nans - num_infs - in_range)
        tl.store(rows + edge + 1, denormal - flushed)
        tl.store(rows + edge + 2, flushed - num_zeros)
    rows += NUM_EDGES
    if HISTOGRAM:
        if SAMPLED:
            num_elements = program * 0
            # As _sample_index in statistics.py: four neighbours at a spot in each stretch.
            for first in range(program * BLOCK, sample_size, tl.num_programs(0) * BLOCK):
                position = first + lane
                which = (position // _GROUP).to(tl.int64)
                spot = (which * 2654435769) & 0xFFFFFFFF
                group = which * stretch + ((which * remainder) >> 32) + ((spot * stretch) >> 32)
                index = (group * _GROUP + position % _GROUP).to(program.dtype)
                offset = _offset(index, size1, size2, size3, stride0, stride1, stride2, stride3)
                x = wide(tl.load(tensor + offset, mask=position < sample_size, other=0.0))
                exponents += _exponent_counts(x)
                num_elements += tl.minimum(BLOCK, sample_size - first)
        tl.store(rows, num_elements)
        bins = tl.arange(0, _BINS)
        # Nobody reads those of a program that has seen no part of the sample.
        tl.store(rows + 1 + bins, exponents, mask=(bins < _EXPONENTS) & (num_elements > 0))


@triton.jit
def joint_row(
    rows: tl.tensor,  # FP64 of shape ``(num_rows, COLUMNS)``
    row: tl.tensor,  # FP64 of shape ``(COLUMNS,)``
    num_rows: tl.tensor,  # number of rows
    num_counted: tl.tensor,  # number of rows, from the first on, that count exponents
    COLUMNS: tl.constexpr,  # number of columns
    NUM_HEAD: tl.constexpr,  # number of columns before the exponents
    WIDTH: tl.constexpr,  # columns of a program
    ROWS: tl.constexpr,  # rows that are read together
) -> None:
    """One row of many: sums, but for the two extremes; each program makes some of the columns."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.full([WIDTH], 0, tl.float64)
    largest = tl.full([WIDTH], 0, tl.float64)
    smallest = tl.full([WIDTH], _INF, tl.float64)
    end = tl.where(column < NUM_HEAD, num_rows, num_counted)
    for first in range(0, num_rows, ROWS):
        which = first + tl.arange(0, ROWS)
        inside = (which[:, None] < end[None, :]) & (column[None, :] < COLUMNS)
        part = tl.load(rows + which[:, None] * COLUMNS + column[None, :], mask=inside, other=0.0)
        total += tl.sum(part, 0)
        largest = tl.maximum(largest, tl.max(part, 0))
        smallest = tl.minimum(smallest, tl.min(tl.where(inside, part, _INF), 0))
    total = tl.where(column == _ABS_MAX, largest, total)
    total = tl.where(column == _ABS_MIN, smallest, total)
    tl.store(row + column, total, mask=column < COLUMNS)


@triton.jit
def _offset(
    index: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    size3: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    stride3: tl.tensor,
) -> tl.tensor:
    """Where the element of a position lies; divisions by sizes of 1 are gone when compiled."""
    rest = index // size3
    offset = index % size3 * stride3 + rest % size2 * stride2
    rest = rest // size2
    return offset + rest % size1 * stride1 + rest // size1 * stride0


@triton.jit
def wide(x: tl.tensor) -> tl.tensor:
    """To FP32, exactly, whatever is narrower; with subnormals, which the interpreter would lose."""
    if x.dtype == tl.float64:
        return x
    elif x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _exponent_counts(x: tl.tensor) -> tl.tensor:
    """Numbers of elements in the bins of ``_exponent_bins`` in statistics.py."""
    magnitude = tl.abs(x)
    if x.dtype == tl.float64:
        exponent = ((magnitude.to(tl.int64, bitcast=True) >> 52) - 1023).to(tl.int32)
    else:
        # The exponent field of a subnormal says nothing; 2**64 times as large it is normal.
        tiny = magnitude < 2.0**-100
        lifted = tl.where(tiny, magnitude * 2.0**64, magnitude)
        exponent = (lifted.to(tl.int32, bitcast=True) >> 23) - tl.where(tiny, 127 + 64, 127)
    bins = tl.minimum(tl.maximum(exponent, _LOWEST), _HIGHEST) - _LOWEST
    bins = tl.where((magnitude > 0) & (magnitude < _INF), bins, _EXPONENTS)
    return tl.histogram(tl.ravel(bins), _BINS)

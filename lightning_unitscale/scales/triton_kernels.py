"""Compute statistics rows with Triton kernels, in two stages.

Every program reads its share of a tensor, block by block, and writes the moments of that share. For
the light row, a few more programs read the sample and count its exponents. A second kernel adds up
the results of the programs, for many tensors in one launch. Results are reproducible: the shares
depend only on the number of elements, and every sum has a fixed order. Only the counts of exponents
use atomics, on integers in a program's own memory.

Each thread divides the few elements that it reads at once by the power of two of the largest, and
adds them in FP32. So squares of 1e25 and 1e-25 neither overflow nor vanish. All further additions
are in FP64. The relative error of a sum is about 2**-23 divided by the root of the number of
elements.

Checked with Triton 3.6 (of torch 2.11), 3.7 (of 2.13) and, in its interpreter, 3.8 (of 2.14).
"""

from __future__ import annotations

import math
from typing import Final

import triton
import triton.language as tl

from lightning_unitscale.scales.layout import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    MOMENT_COLUMNS,
    NUM_EXPONENTS,
)

# The same numbers as constants for kernels.
_INF = tl.constexpr(math.inf)
_LOWEST, _HIGHEST = tl.constexpr(MIN_EXPONENT), tl.constexpr(MAX_EXPONENT)
_ALIGNMENT = tl.constexpr(16)
_EXPONENTS = tl.constexpr(NUM_EXPONENTS)
_BINS = tl.constexpr(512)  # a power of two above that
_MOMENTS = tl.constexpr(len(MOMENT_COLUMNS))
_WIDTH = tl.constexpr(16)  # a power of two above that
_ABS_MAX = tl.constexpr(MOMENT_COLUMNS.index("abs_max"))
_ABS_MIN = tl.constexpr(MOMENT_COLUMNS.index("abs_min"))
# Numbers that differ from tensor to tensor. None is worth another kernel.
_NUMBERS: Final = (
    *("row", "slots", "sample_slots", "numel", "repeats", "blocks", "num_programs"),
    *("sampled", "sample_stride"),
)


@triton.jit(do_not_specialize=_NUMBERS)
def partial_rows(
    tensor: tl.tensor,  # FP16, BF16, FP32 or FP64
    parts: tl.tensor,  # FP64 of shape ``(rows, slots, 9)``
    exponents: tl.tensor,  # INT32 of shape ``(rows, sample_slots, 280)``
    counts: tl.tensor,  # INT64 of shape ``(rows, 3)``
    row: tl.tensor,  # which row
    slots: tl.tensor,
    sample_slots: tl.tensor,
    numel: tl.tensor,  # number of elements
    repeats: tl.tensor,  # how often each of them counts
    blocks: tl.tensor,  # number of blocks of each program
    num_programs: tl.tensor,  # number of programs that read shares; those after them read samples
    sampled: tl.tensor,  # number of elements in the sample
    sample_stride: tl.tensor,  # distance between them
    size1: tl.tensor,  # size of the second dimension, ``None`` of a tensor without gaps
    size2: tl.tensor,  # of the third
    size3: tl.tensor,  # of the fourth
    stride0: tl.tensor,  # stride of the first dimension, in elements
    stride1: tl.tensor,  # of the second
    stride2: tl.tensor,  # of the third
    stride3: tl.tensor,  # of the fourth
    SAMPLED: tl.constexpr,  # whether zeros, magnitudes and exponents are of the sample only
    ALIGNED: tl.constexpr,  # whether the number of elements is a multiple of 16
    LONG: tl.constexpr,  # whether positions take 64 bits
    EACH: tl.constexpr,  # elements that a thread reads at once
    THREADS: tl.constexpr,  # threads of a program
    SAMPLE: tl.constexpr,  # elements of a sample that a program reads
) -> None:
    """Measure each program's share of a tensor, or its part of the sample."""
    program = tl.program_id(0)
    if LONG:
        program = program.to(tl.int64)
    if ALIGNED:
        # This lets the compiler load all elements of a thread in one instruction.
        numel = numel // _ALIGNMENT * _ALIGNMENT
    part = parts + (row * slots + program) * _MOMENTS
    if program == 0:
        tl.store(counts + row * 3, num_programs)
        tl.store(counts + row * 3 + 1, tl.num_programs(0) - num_programs)
        tl.store(counts + row * 3 + 2, repeats)
    if program < num_programs:
        BLOCK: tl.constexpr = THREADS * EACH
        lane = tl.arange(0, THREADS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        nans = tl.full([THREADS], 0, tl.int32)
        infs = tl.full([THREADS], 0, tl.int32)
        zeros = tl.full([THREADS], 0, tl.int32)
        sums = tl.full([THREADS], 0, tl.float64)
        abs_sums = tl.full([THREADS], 0, tl.float64)
        square_sums = tl.full([THREADS], 0, tl.float64)
        largest = wide(tl.full([THREADS], 0, tensor.dtype.element_ty))
        smallest = largest + _INF
        for block in range(blocks):
            index = (program * blocks + block) * BLOCK + lane
            offset = index
            if size1 is not None:
                offset = _offset(index, size1, size2, size3, stride0, stride1, stride2, stride3)
            # The last block is padded with zeros.
            x = wide(tl.load(tensor + offset, mask=index < numel, other=0.0))
            magnitude = tl.abs(x)
            finite = magnitude < _INF
            x = tl.where(finite, x, 0.0)
            nans += tl.sum((magnitude != magnitude).to(tl.int32), 1)
            infs += tl.sum((magnitude == _INF).to(tl.int32), 1)
            top = tl.max(tl.where(finite, magnitude, 0.0), 1)
            largest = tl.maximum(largest, top)
            scale, unit = _unit(top)
            x = x * scale[:, None]
            sums += tl.sum(x, 1).to(tl.float64) * unit
            square_sums += tl.sum(x * x, 1).to(tl.float64) * unit * unit
            if not SAMPLED:
                zeros += tl.sum((magnitude == 0).to(tl.int32), 1)
                abs_sums += tl.sum(tl.abs(x), 1).to(tl.float64) * unit
                smallest = tl.minimum(smallest, tl.min(tl.where(magnitude > 0, magnitude, _INF), 1))
        share = blocks * BLOCK
        num_elements = tl.minimum(share, numel - program * share)
        tl.store(part, num_elements)
        num_zeros = tl.sum(zeros).to(tl.int64)
        if not SAMPLED:
            num_zeros += num_elements - share
        tl.store(part + 1, num_zeros)
        tl.store(part + 2, tl.sum(nans))
        tl.store(part + 3, tl.sum(infs))
        tl.store(part + 4, tl.sum(sums))
        tl.store(part + 5, tl.sum(abs_sums))
        tl.store(part + 6, tl.sum(square_sums))
        tl.store(part + _ABS_MAX, tl.max(largest))
        tl.store(part + _ABS_MIN, tl.min(smallest))
    elif SAMPLED:
        which = program - num_programs
        spot = which * SAMPLE + tl.arange(0, SAMPLE)
        # Positions after the end of the sample also fit 32 bits, if the tensor's do.
        place = spot * sample_stride
        if size1 is not None:
            place = _offset(place, size1, size2, size3, stride0, stride1, stride2, stride3)
        is_sampled = spot < sampled
        sample = tl.abs(wide(tl.load(tensor + place, mask=is_sampled, other=0.0)))
        looked_at = tl.minimum(SAMPLE, sampled - which * SAMPLE)
        for column in tl.static_range(_MOMENTS):
            tl.store(part + column, 0)
        tl.store(part + 1, tl.sum((sample == 0).to(tl.int32)) + looked_at - SAMPLE)
        tl.store(part + 5, tl.sum(tl.where(sample < _INF, sample, 0.0).to(tl.float64)))
        tl.store(part + _ABS_MIN, tl.min(tl.where(sample > 0, sample, _INF)))
        counted = exponents + (row * sample_slots + which) * (_EXPONENTS + 1)
        tl.store(counted, looked_at.to(tl.int32))
        bins = tl.arange(0, _BINS)
        tl.store(counted + 1 + bins, _exponent_counts(sample), mask=bins < _EXPONENTS)


@triton.jit
def joint_rows(
    parts: tl.tensor,  # FP64 of shape ``(rows, slots, 9)``
    exponents: tl.tensor,  # INT32 of shape ``(rows, sample_slots, 280)``
    counts: tl.tensor,  # INT64 of shape ``(rows, 3)``
    rows: tl.tensor,  # FP64 of shape ``(rows, COLUMNS)``
    slots: tl.tensor,
    sample_slots: tl.tensor,
    COLUMNS: tl.constexpr,  # number of columns
    SAMPLED: tl.constexpr,  # whether there are exponents
    ROWS: tl.constexpr,  # parts that are read together
) -> None:
    """Merge the rows of parts: add them, except for the two extremes. A program makes one row."""
    row = tl.program_id(0).to(tl.int64)
    num_sampled = tl.load(counts + row * 3 + 1)
    num_parts = tl.load(counts + row * 3) + num_sampled
    repeats = tl.load(counts + row * 3 + 2).to(tl.float64)
    column = tl.arange(0, _WIDTH)
    total = tl.full([_WIDTH], 0, tl.float64)
    largest = tl.full([_WIDTH], 0, tl.float64)
    smallest = tl.full([_WIDTH], _INF, tl.float64)
    for first in range(0, num_parts.to(tl.int32), ROWS):
        which = first + tl.arange(0, ROWS)
        inside = (which[:, None] < num_parts) & (column[None, :] < _MOMENTS)
        place = (row * slots + which[:, None]) * _MOMENTS + column[None, :]
        part = tl.load(parts + place, mask=inside, other=0.0)
        total += tl.sum(part, 0)
        largest = tl.maximum(largest, tl.max(part, 0))
        smallest = tl.minimum(smallest, tl.min(tl.where(inside, part, _INF), 0))
    total = total * repeats
    total = tl.where(column == _ABS_MAX, largest, total)
    total = tl.where(column == _ABS_MIN, smallest, total)
    tl.store(rows + row * COLUMNS + column, total, mask=column < _MOMENTS)
    if SAMPLED:
        column = tl.arange(0, _BINS)
        inside = column < _EXPONENTS + 1
        counted = tl.full([_BINS], 0, tl.int32)
        for which in range(num_sampled.to(tl.int32)):
            place = (row * sample_slots + which) * (_EXPONENTS + 1) + column
            counted += tl.load(exponents + place, mask=inside, other=0)
        counted = counted.to(tl.float64) * repeats
        tl.store(rows + row * COLUMNS + _MOMENTS + column, counted, mask=inside)


@triton.jit
def _unit(top: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the power of two of magnitudes, inverted and itself, in FP64."""
    if top.dtype == tl.float64:
        one = top * 0 + 1.0
        return one, one
    else:
        # The second to last, so that the inverse is a normal number too.
        field = tl.minimum(tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 1), 253)
        scale = ((254 - field) << 23).to(tl.float32, bitcast=True)
        return scale, (field << 23).to(tl.float32, bitcast=True).to(tl.float64)


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
    """Return the offset of the element at a position. Sizes of 1 compile to no division."""
    rest = index // size3
    offset = index % size3 * stride3 + rest % size2 * stride2
    rest = rest // size2
    return offset + rest % size1 * stride1 + rest // size1 * stride0


@triton.jit
def wide(x: tl.tensor) -> tl.tensor:
    """Cast narrower types to FP32 exactly, with subnormals, which the interpreter would lose."""
    if x.dtype == tl.float64:
        return x
    elif x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _exponent_counts(x: tl.tensor) -> tl.tensor:
    """Count elements by exponent, as ``exponent_counts`` in torch_rows.py."""
    magnitude = tl.abs(x)
    if x.dtype == tl.float64:
        exponent = ((magnitude.to(tl.int64, bitcast=True) >> 52) - 1023).to(tl.int32)
    else:
        # The exponent field of a subnormal number is 0. Multiplied by 2**64, the number is normal.
        tiny = magnitude < 2.0**-100
        lifted = tl.where(tiny, magnitude * 2.0**64, magnitude)
        exponent = (lifted.to(tl.int32, bitcast=True) >> 23) - tl.where(tiny, 127 + 64, 127)
    bins = tl.minimum(tl.maximum(exponent, _LOWEST), _HIGHEST) - _LOWEST
    bins = tl.where((magnitude > 0) & (magnitude < _INF), bins, _EXPONENTS)
    return tl.histogram(tl.ravel(bins), _BINS)

"""Triton kernels that make rows of CUDA tensors: each tensor is read once, in one launch.

Every program reads its share of a tensor, block by block, and writes the moments of that share. In
the light row some more programs read the sample and count its exponents. A second kernel adds up
what the programs have found, for many tensors in one launch. Results are the same from run to run:
the shares follow from the number of elements alone, and every sum has one order; nothing is atomic
but the counting of exponents, in integers, in a program's own memory.

Each thread adds up the few elements that it reads at once in FP32, over the power of two of the
largest of them: squares of 1e25 and 1e-25 then neither overflow nor vanish. All further additions
are in FP64. So a sum has a relative error of some 2**-23 divided by the root of their number.

Bytes moved: those of the tensor, and 72 for each program. There is one program for every 16 KiB, at
most 1,024.

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
    RowLayout,
)
from lightning_unitscale.scales.reduce import empty_rows
from lightning_unitscale.scales.strided import Elements

NUM_WARPS: Final = 8
_THREADS: Final = 32 * NUM_WARPS
# What a thread reads at once; then it needs so few registers that several such programs fit on a
# multiprocessor, with bytes enough on their way.
_THREAD_BYTES: Final = 16
_MIN_BLOCKS: Final = 4
_MAX_PROGRAMS: Final = 1024
_SAMPLE_BLOCK: Final = 2048
_MAX_DIMS: Final = 4
_TYPES: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# Rows that wait for one launch of the second kernel.
_WAITING: Final = 64

# As kernels see them.
_INF = tl.constexpr(math.inf)
_LOWEST, _HIGHEST = tl.constexpr(MIN_EXPONENT), tl.constexpr(MAX_EXPONENT)
_ALIGNMENT = tl.constexpr(16)
_EXPONENTS = tl.constexpr(NUM_EXPONENTS)
_BINS = tl.constexpr(512)  # a power of two above that
_MOMENTS = tl.constexpr(len(MOMENT_COLUMNS))
_WIDTH = tl.constexpr(16)  # a power of two above that
_ABS_MAX = tl.constexpr(MOMENT_COLUMNS.index("abs_max"))
_ABS_MIN = tl.constexpr(MOMENT_COLUMNS.index("abs_min"))


def triton_row(tensor: Tensor, layout: RowLayout) -> Tensor:
    """``statistics_row`` of a CUDA tensor; of a CPU tensor in Triton's interpreter.

    Args:
        tensor: As there, without gradient.
        layout: ``MOMENTS``, or a sampled one without formats.
    """
    rows = TritonRows(layout, tensor.device, num_waiting=1)
    rows.add(tensor)
    return rows.finish()[0]


class TritonRows:
    """Collects rows of tensors of one device and stream, in memory that they share.

    A tensor with gaps is read where it lies, in the order of memory. Copied first, at the price of
    another launch, are FP8 tensors and those whose elements take more than four strides to
    describe.

    Args:
        layout: ``MOMENTS``, or a sampled one without formats.
        device: The device.
        num_waiting: After how many tensors the second kernel runs.
    """

    def __init__(
        self, layout: RowLayout, device: torch.device, num_waiting: int = _WAITING
    ) -> None:
        self._layout = layout
        self._device = device
        self._num_waiting = num_waiting
        self._sample_size = layout.sample_size if layout.is_sampled else None
        self._sample_programs = -(-(self._sample_size or 0) // _SAMPLE_BLOCK)
        # The second kernel has read what is in these before the next tensor's programs write.
        self._parts: Tensor | None = None
        self._exponents: Tensor | None = None
        self._counts: Tensor | None = None
        self._slots = 0
        self._used = 0
        # Whether one program has made the whole row, as it does of the moments of a small tensor.
        self._is_whole = False
        self._number = 0
        self._rows: list[Tensor] = []

    def add(self, tensor: Tensor) -> int:
        """Measure a tensor as it is now; returns the place of its row."""
        self._number += 1
        elements = Elements.of(tensor)
        numel = elements.tensor.numel()
        if numel == 0:
            self._join()
            self._rows.append(empty_rows(1, self._layout, self._device))
            return self._number - 1
        part = elements.tensor if tensor.dtype in _TYPES else elements.tensor.float()
        dims = _dims(part)
        if len(dims) > _MAX_DIMS:
            dims, part = [(numel, 1)], part.contiguous()
        is_plain = dims == [(numel, 1)]
        last = sum((size - 1) * stride for size, stride in dims)
        is_long = max(numel, last) >= 2**30  # with as much again for what fills up the last program
        each = _THREAD_BYTES // part.element_size()
        if not is_plain:
            # Divisions take registers, those of 64 bits twice as many.
            each = 2 if is_long else min(4, each)
        num_blocks = -(-numel // (_THREADS * each))
        blocks = -(-num_blocks // min(_MAX_PROGRAMS, -(-num_blocks // _MIN_BLOCKS)))
        num_programs = -(-num_blocks // blocks)
        stride = 1 if self._sample_size is None else elements.stride(self._sample_size)
        sampled = 0 if self._sample_size is None else -(-numel // stride)
        sample_programs = -(-sampled // _SAMPLE_BLOCK)
        parts, exponents, counts = self._memory(num_programs + sample_programs)
        described = [] if is_plain else _described(dims)
        with torch.cuda.device_of(part):
            kernel: Any = partial_rows if is_plain else partial_strided_rows
            kernel[(num_programs + sample_programs,)](
                part,
                parts,
                exponents,
                counts,
                self._used,
                self._slots,
                max(self._sample_programs, 1),
                numel,
                elements.repeats,
                blocks,
                num_programs,
                sampled,
                stride,
                *described,
                SAMPLED=self._sample_size is not None,
                ALIGNED=numel % 16 == 0,
                LONG=is_long,
                EACH=each,
                THREADS=_THREADS,
                SAMPLE=_SAMPLE_BLOCK,
                num_warps=NUM_WARPS,
            )
        self._used += 1
        self._is_whole = self._slots == 1 and elements.repeats == 1 and self._sample_size is None
        if self._used == self._num_waiting:
            self._join()
        return self._number - 1

    def finish(self) -> Tensor:
        """Return the rows, shape ``(num_tensors, layout.num_columns)``, in the order of adding."""
        self._join()
        if len(self._rows) == 1:
            return self._rows[0]
        return torch.cat(self._rows) if self._rows else empty_rows(0, self._layout, self._device)

    def _memory(self, num_programs: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return memory for parts of rows, for their exponents and for numbers of parts."""
        if self._num_waiting > 1:
            num_programs = _MAX_PROGRAMS + self._sample_programs
        if self._parts is None or self._exponents is None or self._counts is None:
            self._slots = num_programs
            waiting, device = self._num_waiting, self._device
            shape = (waiting, num_programs, len(MOMENT_COLUMNS))
            self._parts = torch.empty(shape, dtype=torch.float64, device=device)
            shape = (waiting, max(self._sample_programs, 1), 1 + NUM_EXPONENTS)
            self._exponents = torch.empty(shape, dtype=torch.int32, device=device)
            self._counts = torch.empty((waiting, 4), dtype=torch.int64, device=device)
        return self._parts, self._exponents, self._counts

    def _join(self) -> None:
        """Make rows of the parts of those that wait."""
        if not self._used:
            return
        if self._is_whole and self._parts is not None:
            self._rows.append(self._parts[:, 0])
            self._used = 0
            return
        shape = (self._used, self._layout.num_columns)
        rows = torch.empty(shape, dtype=torch.float64, device=self._device)
        with torch.cuda.device_of(rows):
            joint_rows[(self._used,)](
                self._parts,
                self._exponents,
                self._counts,
                rows,
                self._slots,
                max(self._sample_programs, 1),
                COLUMNS=self._layout.num_columns,
                SAMPLED=self._sample_size is not None,
                ROWS=64,
            )
        self._rows.append(rows)
        self._used = 0


def _dims(tensor: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of a tensor in the order of memory, of as few dimensions as there can be."""
    if tensor.is_contiguous():
        return [(tensor.numel(), 1)]
    dims: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if dims and dims[-1][1] == stride * size:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


def _described(dims: list[tuple[int, int]]) -> list[int]:
    """Return the sizes but the first, and all strides, of four dimensions."""
    sizes, strides = zip(*dims, *[(1, 0)] * (_MAX_DIMS - len(dims)), strict=True)
    return [*sizes[1:], *strides]


# Numbers that differ from tensor to tensor: none is worth a kernel of its own.
_NUMBERS: Final = (
    *("row", "slots", "sample_slots", "numel", "repeats", "blocks", "num_programs"),
    *("sampled", "sample_stride"),
)


@triton.jit(do_not_specialize=_NUMBERS)
def partial_rows(
    tensor: tl.tensor,  # FP16, BF16, FP32 or FP64, without gaps
    parts: tl.tensor,  # FP64 of shape ``(rows, slots, 9)``
    exponents: tl.tensor,  # INT32 of shape ``(rows, sample_slots, 280)``
    counts: tl.tensor,  # INT64 of shape ``(rows, 4)``
    row: tl.tensor,  # which row
    slots: tl.tensor,
    sample_slots: tl.tensor,
    numel: tl.tensor,  # number of elements
    repeats: tl.tensor,  # how often each of them counts
    blocks: tl.tensor,  # number of blocks of each program
    num_programs: tl.tensor,  # number of programs that read shares; those after them read samples
    sampled: tl.tensor,  # number of elements in the sample
    sample_stride: tl.tensor,  # distance between them
    SAMPLED: tl.constexpr,  # whether zeros, magnitudes and exponents are of the sample only
    ALIGNED: tl.constexpr,  # whether the number of elements is a multiple of 16
    LONG: tl.constexpr,  # whether positions take 64 bits
    EACH: tl.constexpr,  # elements that a thread reads at once
    THREADS: tl.constexpr,  # threads of a program
    SAMPLE: tl.constexpr,  # elements of a sample that a program reads
) -> None:
    """What each program finds in its share, or in its part of the sample."""
    _programs(tensor, parts, exponents, counts, row, slots, sample_slots, numel, repeats, blocks,
              num_programs, sampled, sample_stride, 1, 1, 1, 1, 0, 0, 0,
              True, SAMPLED, ALIGNED, LONG, EACH, THREADS, SAMPLE)  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def partial_strided_rows(
    tensor: tl.tensor,
    parts: tl.tensor,
    exponents: tl.tensor,
    counts: tl.tensor,
    row: tl.tensor,
    slots: tl.tensor,
    sample_slots: tl.tensor,
    numel: tl.tensor,
    repeats: tl.tensor,
    blocks: tl.tensor,
    num_programs: tl.tensor,
    sampled: tl.tensor,
    sample_stride: tl.tensor,
    size1: tl.tensor,  # size of the second dimension; that of the first follows
    size2: tl.tensor,  # of the third
    size3: tl.tensor,  # of the fourth
    stride0: tl.tensor,  # stride of the first dimension, in elements
    stride1: tl.tensor,  # of the second
    stride2: tl.tensor,  # of the third
    stride3: tl.tensor,  # of the fourth
    SAMPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    LONG: tl.constexpr,
    EACH: tl.constexpr,
    THREADS: tl.constexpr,
    SAMPLE: tl.constexpr,
) -> None:
    """The same of a tensor with gaps."""
    _programs(tensor, parts, exponents, counts, row, slots, sample_slots, numel, repeats, blocks,
              num_programs, sampled, sample_stride, size1, size2, size3, stride0, stride1, stride2,
              stride3, False, SAMPLED, ALIGNED, LONG, EACH, THREADS, SAMPLE)  # fmt: skip


@triton.jit
def _programs(
    tensor: tl.tensor,
    parts: tl.tensor,
    exponents: tl.tensor,
    counts: tl.tensor,
    row: tl.tensor,
    slots: tl.tensor,
    sample_slots: tl.tensor,
    numel: tl.tensor,
    repeats: tl.tensor,
    blocks: tl.tensor,
    num_programs: tl.tensor,
    sampled: tl.tensor,
    sample_stride: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    size3: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    stride3: tl.tensor,
    PLAIN: tl.constexpr,
    SAMPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    LONG: tl.constexpr,
    EACH: tl.constexpr,
    THREADS: tl.constexpr,
    SAMPLE: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    if LONG:
        program = program.to(tl.int64)
    if ALIGNED:
        # Tells the compiler so, which then reads what a thread reads at once in one instruction.
        numel = numel // _ALIGNMENT * _ALIGNMENT
    part = parts + (row * slots + program) * _MOMENTS
    if program == 0:
        tl.store(counts + row * 4, num_programs)
        tl.store(counts + row * 4 + 1, tl.num_programs(0) - num_programs)
        tl.store(counts + row * 4 + 2, repeats)
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
            if not PLAIN:
                offset = _offset(index, size1, size2, size3, stride0, stride1, stride2, stride3)
            # The last block is filled up with zeros.
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
        # Also those behind the end of the sample stay within 32 bits, if the tensor does.
        place = spot * sample_stride
        if not PLAIN:
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
    counts: tl.tensor,  # INT64 of shape ``(rows, 4)``
    rows: tl.tensor,  # FP64 of shape ``(rows, COLUMNS)``
    slots: tl.tensor,
    sample_slots: tl.tensor,
    COLUMNS: tl.constexpr,  # number of columns
    SAMPLED: tl.constexpr,  # whether there are exponents
    ROWS: tl.constexpr,  # parts that are read together
) -> None:
    """Rows of their parts: sums, but for the two extremes; a program makes one of them."""
    row = tl.program_id(0).to(tl.int64)
    num_sampled = tl.load(counts + row * 4 + 1)
    num_parts = tl.load(counts + row * 4) + num_sampled
    repeats = tl.load(counts + row * 4 + 2).to(tl.float64)
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
    """The inverse of the power of two of magnitudes, and the power itself, in FP64."""
    if top.dtype == tl.float64:
        one = top * 0 + 1.0
        return one, one
    else:
        # The last but one, so that the inverse is a normal number too.
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

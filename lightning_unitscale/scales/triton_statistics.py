"""Rows of CUDA tensors by the kernels of ``triton_kernels.py``: each tensor is read once.

A tensor has one launch, and many rows together have one more. Bytes moved: those of the tensor, and
72 for each program. There is one program for every 16 KiB, at most 1,024.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from lightning_unitscale.scales.layout import (
    MOMENT_COLUMNS,
    NUM_EXPONENTS,
    RowLayout,
)
from lightning_unitscale.scales.reduce import empty_rows
from lightning_unitscale.scales.strided import Elements
from lightning_unitscale.scales.triton_kernels import joint_rows, partial_rows

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


def triton_row(tensor: Tensor, layout: RowLayout) -> Tensor:
    """``statistics_row`` of a CUDA tensor; of a CPU tensor in Triton's interpreter."""
    rows = TritonRows(layout, tensor.device, num_waiting=1)
    rows.add(tensor)
    return rows.finish()[0]


class TritonRows:
    """Collects rows of tensors of one device and stream, in memory that they share."""

    # A tensor with gaps is read where it lies, in the order of memory. Copied first, at the price
    # of another launch, are FP8 tensors and those whose elements take more than four strides to
    # describe.

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
        described = [None] * 7 if is_plain else _described(dims)
        with torch.cuda.device_of(part):
            partial_rows[(num_programs + sample_programs,)](
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
            self._counts = torch.empty((waiting, 3), dtype=torch.int64, device=device)
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
    """Sizes and strides in the order of memory, of as few dimensions as there can be."""
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

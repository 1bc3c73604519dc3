"""Compute rows of CUDA tensors with the kernels of ``triton_kernels.py``, reading each tensor once.

Each tensor needs one launch, and many rows together need one more. Bytes moved are those of the
tensor, and 72 for each program. There is one program for every 16 KiB, at most 1,024.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from lightning_unitscale.scales.launches import (
    RepeatedLaunch,
    can_repeat,
    current_device,
    repeated_launch,
    stream_of,
)
from lightning_unitscale.scales.layout import MOMENT_COLUMNS, NUM_EXPONENTS, RowLayout
from lightning_unitscale.scales.reduce import empty_rows
from lightning_unitscale.scales.torch_rows import Elements, dims_in_memory, sample_stride
from lightning_unitscale.scales.triton_kernels import joint_rows, partial_rows

NUM_WARPS: Final = 8
_THREADS: Final = 32 * NUM_WARPS
# Bytes that a thread reads at once. It then needs so few registers that several such programs fit
# on a multiprocessor, with enough bytes in transit.
_THREAD_BYTES: Final = 16
_MIN_BLOCKS: Final = 4
_MAX_PROGRAMS: Final = 1024
_SAMPLE_BLOCK: Final = 2048
_MAX_DIMS: Final = 4
# In bytes. Triton compiles another kernel for an address that is not a multiple of it.
_ALIGNMENT: Final = 16
_TYPES: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# Rows that wait for one launch of the second kernel, and parts that it reads together.
_WAITING: Final = 64
_JOINED: Final = 64
# Earlier launches of the second kernel, by device and numbers.
_JOINT_LAUNCHES: dict[tuple[int | None, ...], RepeatedLaunch | None] = {}


def triton_row(tensor: Tensor, layout: RowLayout) -> Tensor:
    """``statistics_row`` of a CUDA tensor; of a CPU tensor in Triton's interpreter."""
    rows = TritonRows(layout, tensor.device, num_waiting=1)
    rows.add(tensor)
    return rows.finish()[0]


class TritonRows:
    """A collector of rows for one device and stream, in shared memory."""

    # A tensor with gaps is read in place, in the order of memory. FP8 tensors, and those that need
    # more than four strides, are copied first, which takes another launch.

    def __init__(
        self, layout: RowLayout, device: torch.device, num_waiting: int = _WAITING
    ) -> None:
        self._layout = layout
        self._device = device
        self._num_waiting = num_waiting
        self._sample_size = layout.sample_size if layout.is_sampled else None
        self._sample_programs = -(-(self._sample_size or 0) // _SAMPLE_BLOCK)
        self._sample_slots = max(self._sample_programs, 1)
        # The second kernel has read these before the next tensor's programs write them.
        self._shared: tuple[Tensor, ...] = ()
        self._slots = 0
        self._used = 0
        # True if one program computed the whole row, as for the moments of a small tensor.
        self._is_whole = False
        self._number = 0
        self._rows: list[Tensor] = []
        self._pointers: tuple[int, ...] = ()
        self._can_repeat = can_repeat()

    def add(self, tensor: Tensor) -> int:
        """Measure the current values of a tensor, and return the place of its row."""
        self._number += 1
        if tensor.numel() == 0:
            self._join()
            self._rows.append(empty_rows(1, self._layout, self._device))
            return self._number - 1
        elements = Elements.of(tensor)
        plan = self._plan_of(tensor)
        part = elements.tensor
        if plan.is_copied:
            part = (part if part.dtype in _TYPES else part.float()).contiguous()
        memory, pointer = self._memory(plan.grid), part.data_ptr()
        with torch.cuda.device_of(part):
            stream = stream_of(self._device)
            if not (self._can_repeat and self._launch_again(plan, pointer, stream)):
                where = self._used, self._slots, self._sample_slots
                launched = partial_rows[(plan.grid,)](
                    part, *memory, *where, *plan.arguments, num_warps=NUM_WARPS
                )
                plan.launches[pointer % _ALIGNMENT == 0] = repeated_launch(launched)
        self._used += 1
        self._is_whole = self._slots == 1 and elements.repeats == 1 and self._sample_size is None
        if self._used == self._num_waiting:
            self._join()
        return self._number - 1

    def repeat(self, tensor: Tensor, stream: int) -> int | None:
        """Measure a tensor like an earlier one, without any torch operation."""
        # Return `None` if there was no such tensor, or if memory has to be allocated.
        if not self._can_repeat or self._used + 1 >= self._num_waiting or not self._pointers:
            return None
        if tensor.layout is not torch.strided or tensor.is_neg() or not tensor.numel():
            return None
        plan = self._plan_of(tensor)
        if plan.is_copied or current_device() != self._device.index:
            return None
        if not self._launch_again(plan, tensor.data_ptr(), stream):
            return None
        self._used += 1
        self._number += 1
        return self._number - 1

    def _launch_again(self, plan: _Plan, pointer: int, stream: int) -> bool:
        """Repeat an earlier launch for a tensor at an address, if there was one."""
        launch = plan.launches.get(pointer % _ALIGNMENT == 0)
        if launch is None:
            return False
        launch(
            plan.grid,
            stream,
            pointer,
            *self._pointers,
            self._used,
            self._slots,
            self._sample_slots,
            *plan.arguments,
        )
        return True

    def _plan_of(self, tensor: Tensor) -> _Plan:
        index = self._device.index
        return _plan(tensor.shape, tensor.stride(), tensor.dtype, self._sample_size, index)

    def finish(self) -> Tensor:
        """Return the rows, shape ``(num_tensors, layout.num_columns)``, in the order of adding."""
        self._join()
        if len(self._rows) == 1:
            return self._rows[0]
        return torch.cat(self._rows) if self._rows else empty_rows(0, self._layout, self._device)

    def _memory(self, num_programs: int) -> tuple[Tensor, ...]:
        """Return memory for parts of rows, for their exponents and for numbers of parts."""
        if not self._shared:
            if self._num_waiting > 1:
                num_programs = _MAX_PROGRAMS + self._sample_programs
            self._slots = num_programs
            self._shared = tuple(
                torch.empty((self._num_waiting, *shape), dtype=dtype, device=self._device)
                for shape, dtype in (
                    ((num_programs, len(MOMENT_COLUMNS)), torch.float64),
                    ((self._sample_slots, 1 + NUM_EXPONENTS), torch.int32),
                    ((3,), torch.int64),
                )
            )
            self._pointers = tuple(one.data_ptr() for one in self._shared)
        return self._shared

    def _join(self) -> None:
        """Make the rows of all waiting tensors from their parts."""
        if not self._used:
            return
        if self._is_whole:
            self._rows.append(self._shared[0][:, 0])
            self._used = 0
            return
        columns, is_sampled = self._layout.num_columns, self._sample_size is not None
        rows = torch.empty((self._used, columns), dtype=torch.float64, device=self._device)
        numbers = self._slots, self._sample_slots, columns, is_sampled, _JOINED
        # Triton has another kernel for numbers of 1 and multiples of 16.
        key = self._device.index, *numbers
        with torch.cuda.device_of(rows):
            launch = _JOINT_LAUNCHES.get(key)
            if launch is not None and self._can_repeat:
                pointers = *self._pointers, rows.data_ptr()
                launch(self._used, stream_of(self._device), *pointers, *numbers)
            else:
                launched = joint_rows[(self._used,)](*self._shared, rows, *numbers)
                _JOINT_LAUNCHES[key] = repeated_launch(launched)
        self._rows.append(rows)
        self._used = 0


@dataclass(frozen=True, eq=False)
class _Plan:
    """The way to read tensors of one type, shape and strides."""

    grid: int  # programs: those that read shares, then those that read samples
    is_copied: bool  # true if they are copied first
    arguments: tuple[Any, ...]  # arguments of the kernel, from the number of elements on
    # An earlier launch, by whether the tensor's address is aligned.
    launches: dict[bool, RepeatedLaunch | None] = field(default_factory=dict)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    sample_size: int | None,
    device_index: int | None,
) -> _Plan:
    """Return how to read such tensors. Each device has its own compiled kernels."""
    found, repeats = dims_in_memory(shape, strides)
    numel = math.prod(size for size, _ in found)
    row_length = next((size for size, _ in reversed(found) if size > 1), 1)
    dims = _joined(found)
    is_copied = len(dims) > _MAX_DIMS or dtype not in _TYPES
    if is_copied:
        dims = [(numel, 1)]
    is_plain = dims == [(numel, 1)]
    last = sum((size - 1) * stride for size, stride in dims)
    is_long = max(numel, last) >= 2**30  # twice as many, to include the padding of the last program
    each = _THREAD_BYTES // (dtype if dtype in _TYPES else torch.float32).itemsize
    if not is_plain:
        # Divisions need registers, and 64-bit divisions twice as many.
        each = 2 if is_long else min(4, each)
    num_blocks = -(-numel // (_THREADS * each))
    blocks = -(-num_blocks // min(_MAX_PROGRAMS, -(-num_blocks // _MIN_BLOCKS)))
    num_programs = -(-num_blocks // blocks)
    stride = 1 if sample_size is None else sample_stride(numel, row_length, sample_size)
    sampled = 0 if sample_size is None else -(-numel // stride)
    numbers = numel, repeats, blocks, num_programs, sampled, stride
    described = [None] * 7 if is_plain else _described(dims)
    constants = {
        "SAMPLED": sample_size is not None,
        "ALIGNED": numel % _ALIGNMENT == 0,
        "LONG": is_long,
        "EACH": each,
        "THREADS": _THREADS,
        "SAMPLE": _SAMPLE_BLOCK,
    }
    grid = num_programs - (-sampled // _SAMPLE_BLOCK)
    return _Plan(grid, is_copied, (*numbers, *described, *constants.values()))


def _joined(found: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sizes and strides in the order of memory, with as few dimensions as possible."""
    dims: list[tuple[int, int]] = []
    for size, stride in found:
        if dims and dims[-1][1] == stride * size:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims or [(1, 1)]


def _described(dims: list[tuple[int, int]]) -> list[int]:
    """Return all sizes except the first, and all strides, of four dimensions."""
    sizes, strides = zip(*dims, *[(1, 0)] * (_MAX_DIMS - len(dims)), strict=True)
    return [*sizes[1:], *strides]

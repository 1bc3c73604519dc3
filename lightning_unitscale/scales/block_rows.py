"""Count the losses of a tensor to block formats, from whole blocks of a sample of it.

Blocks lie along one dimension, the one that the matmul sums over. If that is not the order of
memory, only the elements of the sampled blocks are gathered, so the tensor is never copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_unitscale.formats import FP32, BlockFormat
from lightning_unitscale.formats.round_numbers import block_scales, in_blocks
from lightning_unitscale.scales.layout import BLOCK_COLUMNS, FloatArray, RowLayout
from lightning_unitscale.scales.reduce import row_dtype
from lightning_unitscale.scales.torch_rows import sample_stride
from lightning_unitscale.scales.transfer import HostCopy


@dataclass(eq=False, slots=True)
class TakenBlocks:
    """The place of a tensor's row of blocks among those of its device."""

    device: torch.device
    index: int


# Returns the sum of each list of rows, shape ``(lists, columns)``. An empty list gives zeros.
ReadBlocks: TypeAlias = Callable[[Sequence[Sequence[TakenBlocks]]], FloatArray]


class BlockRows:
    """Collects the block rows of a step's tensors, on any devices."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._rows: dict[torch.device, list[Tensor]] = {}

    def add(self, tensor: Tensor, axis: int, tensor_scale: float | None) -> TakenBlocks:
        """Measure a tensor along a dimension, without waiting for its device."""
        rows = self._rows.setdefault(tensor.device, [])
        rows.append(block_row(tensor, axis, self._layout, tensor_scale))
        return TakenBlocks(tensor.device, len(rows) - 1)

    def send(self) -> ReadBlocks:
        """Send for the rows, with one transfer from each device. The result waits for it."""
        sent = {device: HostCopy(torch.stack(rows)) for device, rows in self._rows.items()}
        self._rows = {}
        num_columns = len(self._layout.block_columns)

        def read(lists: Sequence[Sequence[TakenBlocks]]) -> FloatArray:
            tables = {device: copy.numbers().double().numpy() for device, copy in sent.items()}
            found = np.zeros((len(lists), num_columns))
            for row, taken in zip(found, lists, strict=True):
                for one in taken:
                    row += tables[one.device][one.index]
            return found

        return read


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

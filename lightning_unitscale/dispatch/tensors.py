"""What is done to one tensor: copies in units, laid out as it is itself, and how large it is."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.dispatch.torch_internals import current_node
from lightning_unitscale.functional.scale import (
    POWERS_OF_TWO,
    empty_placed_like,
    multiply,
    placed_strides,
)
from lightning_unitscale.patching import nothing
from lightning_unitscale.scales.layout import MOMENTS
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.scales.tensor_statistics import FloatArray, TensorStatistics
from lightning_unitscale.scales.transfer import joint_copy

_LINE_BYTES = 64


@functools.lru_cache(maxsize=2**12)
def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements of memory from the first one of a tensor to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@functools.lru_cache(maxsize=2**12)
def _copy_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], line: int
) -> tuple[bool, tuple[int, ...] | None]:
    """How a copy has to lie that begins with a cache line, like its source."""
    is_kept = (torch.empty_strided(shape, strides, device="meta") * 2.0).stride() == strides
    if 0 in strides or 0 < _span(shape, strides) < math.prod(shape):
        return is_kept, None
    return is_kept, placed_strides(shape, strides, line)[0]


def scaled_copy(tensor: Tensor, exponent: int) -> Tensor:
    """``tensor * 2**exponent`` with the strides and the alignment of ``tensor``."""
    # BLAS may add in another order for another stride, and for another place within a cache line.
    factor = POWERS_OF_TWO[tensor.dtype][exponent]
    # Memory that is allocated begins with a line, so that only what does too can be like its copy.
    offset = tensor.data_ptr() % _LINE_BYTES
    if offset == 0:
        line = _LINE_BYTES // tensor.element_size()
        is_kept, strides = _copy_strides(tensor.shape, tensor.stride(), line)
        if is_kept:
            return torch.mul(tensor, factor)
        if strides is not None:
            return torch.mul(tensor, factor, out=tensor.new_empty_strided(tensor.shape, strides))
    if 0 in tensor.stride():
        return multiply(tensor, 2.0**exponent)
    if 0 < (span := _span(tensor.shape, tensor.stride())) < tensor.numel():
        # Rows lie over each other, and cuBLAS takes them another way than rows side by side.
        memory = scaled_copy(tensor.as_strided((span,), (1,)), exponent)
        return memory.as_strided(tensor.shape, tensor.stride())
    placed = empty_placed_like(tensor, tensor.dtype, offset // tensor.element_size())
    torch.mul(tensor, factor, out=placed)
    return placed


# By thread, the last gradient that was scaled: within which autograd node, by which exponent, the
# gradient, and its copy. No variable of a thread: the steps' thread frees what an engine's thread
# has kept.
_LAST: dict[int, tuple[Any, int, Tensor, Tensor]] = {}


def shared_copy(tensor: Tensor, exponent: int) -> Tensor:
    """:func:`scaled_copy` of a gradient, or another view of the copy that was made just before."""
    # Within one node of autograd's own nothing can have written into the gradient meanwhile.
    node, thread = current_node(), get_ident()
    line = _LINE_BYTES // tensor.element_size()
    is_shared = node is not None and _copy_strides(tensor.shape, tensor.stride(), line)[0]
    if is_shared and (last := _LAST.pop(thread, None)) is not None:
        last_node, last_exponent, source, copy = last
        is_same = last_node is node and last_exponent == exponent
        if is_same and source.data_ptr() == tensor.data_ptr() and source.numel() == tensor.numel():
            return copy.as_strided(tensor.shape, tensor.stride(), copy.storage_offset())
    copy = scaled_copy(tensor, exponent)
    if is_shared:
        _LAST[thread] = node, exponent, tensor, copy
    return copy


def forget_copy() -> None:
    """Let go of the last copy of each thread; those that go on scale once more."""
    _LAST.clear()


@dataclass(eq=False, slots=True)
class Extent:
    """How large the elements of a tensor are."""

    # Root of their mean square; NaN if there are none, or some that are not finite.
    rms: float = math.nan
    smallest: float = math.inf  # smallest magnitude other than zero; infinite if there is none
    largest: float = 0.0  # largest finite magnitude
    row: Tensor | None = None  # the statistics that they are read from, on their device until then
    log2_unit: int = 0  # exponent of what the tensor of the row was divided by

    @property
    def gives_unit(self) -> bool:
        """Whether its RMS gives a unit: not if all is zero, or nothing, or not all is finite."""
        return self.rms > 0.0  # NaN is not

    @staticmethod
    def of(tensor: Tensor, log2_unit: int = 0) -> Extent:
        """Measure a tensor, without waiting for its device."""
        return Extent(row=statistics_row(tensor, MOMENTS), log2_unit=log2_unit)

    def read(self, row: FloatArray) -> None:
        """Take the numbers of a row that has arrived."""
        statistics = TensorStatistics(row, MOMENTS, self.log2_unit)
        # What is not finite, or not there, says nothing of the next.
        is_finite = 0 < statistics.numel == statistics.num_finite
        self.rms = statistics.rms if is_finite else math.nan
        self.smallest = math.ldexp(row[MOMENTS.index("abs_min")], self.log2_unit)
        self.largest = math.ldexp(row[MOMENTS.index("abs_max")], self.log2_unit)
        self.row = None


# What was measured of each operand in this step; empty where nothing was.
Extents = tuple[Extent | None, ...]


def reading(extents: Iterable[Extent]) -> Callable[[], None]:
    """Send for what was measured, with one transfer; what is returned waits for it and fills in."""
    unread = {id(extent): extent for extent in extents if extent.row is not None}
    rows = [extent.row for extent in unread.values() if extent.row is not None]
    if not rows:
        return nothing
    copy = joint_copy(rows)

    def fill_in() -> None:
        for extent, row in zip(unread.values(), copy.numbers().numpy(), strict=True):
            extent.read(row)

    return fill_in

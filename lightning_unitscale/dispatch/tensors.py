"""What is done to one tensor: copies in units, laid out as it is itself, and how large it is."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.dispatch.torch_internals import current_node
from lightning_unitscale.functional.scale import multiply, placed_strides
from lightning_unitscale.patching import nothing
from lightning_unitscale.scales.layout import MOMENTS
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.scales.tensor_statistics import FloatArray, TensorStatistics
from lightning_unitscale.scales.transfer import joint_copy

_LINE_BYTES = 64


# Beyond it a power of two, or its inverse, is no normal number of FP32.
_LARGEST_LOG2 = 126
# torch makes a tensor of each number that it multiplies by, which takes longer than to multiply a
# small one. FP16 has no room for all of these factors, and numbers are taken in FP32.
_POWERS: dict[torch.dtype, tuple[Tensor, ...]] = {
    dtype: torch.tensor(
        [2.0**e for e in range(-_LARGEST_LOG2, _LARGEST_LOG2 + 1)], dtype=dtype, device="cpu"
    ).unbind()
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
}


def power_of_two(exponent: int, dtype: torch.dtype) -> Tensor | float:
    """``2**exponent``, for ``exponent`` within +-126, as tensors of a type are multiplied by it."""
    powers = _POWERS.get(dtype)
    return 2.0**exponent if powers is None else powers[exponent + _LARGEST_LOG2]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the elements of a tensor lie in memory.

    Attributes:
        span: Elements of memory from the first one to the last.
        is_dense: Whether they lie without gaps, in whatever order.
        is_expanded: Whether a dimension is not stepped over.
        overlaps: Whether rows lie over each other.
        placed: Strides of a copy, which merge where those of the tensor do.
        reach: Elements that a copy reaches over.
    """

    span: int
    is_dense: bool
    is_expanded: bool
    overlaps: bool
    placed: tuple[int, ...]
    reach: int


@functools.lru_cache(maxsize=2**12)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...], line: int) -> _Layout:
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    numel = math.prod(shape)
    placed, reach = placed_strides(shape, strides, line)
    return _Layout(span, span == numel, 0 in strides, 0 < span < numel, placed, reach)


def _layout_of(tensor: Tensor) -> _Layout:
    return _layout(tensor.shape, tensor.stride(), _LINE_BYTES // tensor.element_size())


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or _layout_of(tensor).is_dense


def scaled_copy(tensor: Tensor, exponent: int) -> Tensor:
    """``tensor * 2**exponent`` with the strides and the alignment of ``tensor``.

    BLAS may add in another order for another stride, and for another place within a cache line.

    Args:
        tensor: Floating point, of any shape and layout.
        exponent: Within +-126.
    """
    factor = power_of_two(exponent, tensor.dtype)
    # Memory that is allocated begins with a line, so that only what does too can be like its copy.
    offset = tensor.data_ptr() % _LINE_BYTES
    if offset == 0 and _is_dense(tensor):
        product = tensor * factor
        aligned = product.data_ptr() % _LINE_BYTES == 0
        if (aligned or tensor.numel() == 0) and product.stride() == tensor.stride():
            return product
    layout = _layout_of(tensor)
    if layout.is_expanded:
        return multiply(tensor, 2.0**exponent)
    if layout.overlaps:
        # Rows lie over each other, and cuBLAS takes them another way than rows side by side.
        memory = scaled_copy(tensor.as_strided((layout.span,), (1,)), exponent)
        return memory.as_strided(tensor.shape, tensor.stride())
    start = offset // tensor.element_size()
    placed = torch.empty(start + layout.reach, dtype=tensor.dtype, device=tensor.device)
    placed = placed.as_strided(tensor.shape, layout.placed, start)
    torch.mul(tensor, factor, out=placed)
    return placed


def scale_result(tensor: Tensor, exponent: int) -> None:
    """Multiply what a kernel has made by ``2**exponent``, in steps where one would overflow."""
    while exponent:
        part = max(-_LARGEST_LOG2, min(exponent, _LARGEST_LOG2))
        tensor.mul_(power_of_two(part, tensor.dtype))
        exponent -= part


@dataclass(frozen=True)
class _Copy:
    """The last gradient that was scaled, with its copy; within one autograd node only."""

    node: Any
    source: Tensor
    exponent: int
    copy: Tensor


# By thread. No variable of a thread: the steps' thread frees what an engine's thread has kept.
_LAST: dict[int, _Copy] = {}


def shared_copy(tensor: Tensor, exponent: int) -> Tensor:
    """:func:`scaled_copy` of a gradient, or another view of the copy that was made just before.

    Within one node of autograd's own nothing can have written into the gradient meanwhile.
    """
    node, thread = current_node(), threading.get_ident()
    last = _LAST.get(thread)
    if (
        last is not None
        and last.exponent == exponent
        and last.node is node
        and last.source.data_ptr() == tensor.data_ptr()
        and last.source.numel() == tensor.numel()
        and _is_dense(tensor)
    ):
        copy = last.copy.as_strided(tensor.shape, tensor.stride(), last.copy.storage_offset())
        _LAST.pop(thread, None)
        return copy
    copy = scaled_copy(tensor, exponent)
    if node is not None and _is_dense(tensor):
        _LAST[thread] = _Copy(node, tensor, exponent, copy)
    return copy


def forget_copy() -> None:
    """Let go of the last copy of each thread; those that go on scale once more."""
    _LAST.clear()


@dataclass(eq=False, slots=True)
class Extent:
    """How large the elements of a tensor are.

    Attributes:
        rms: Root of their mean square; NaN if there are none, or some that are not finite.
        smallest: Smallest magnitude other than zero; infinite if there is none.
        largest: Largest finite magnitude.
        row: The statistics that they are read from, on their device until then.
        log2_unit: Exponent of what the tensor of the row was divided by.
    """

    rms: float = math.nan
    smallest: float = math.inf
    largest: float = 0.0
    row: Tensor | None = None
    log2_unit: int = 0

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

"""Rows of tensors on the CPU, from torch's and NumPy's own reductions.

Each of them reads a tensor once, part by part, so that the next one finds the part in the cache.
Extremes, sum and sum of squares of a light row are taken in FP32, part by part, and added up in
FP64; a part whose squares would leave the range of FP32 is first multiplied by a power of two. The
exact row is all in FP64. Reading a number waits for nothing here, so that what is rare (a NaN, an
infinity, FP64) has torch operations.

Exponents are counted for many tensors together: their samples lie behind each other in one buffer.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lightning_unitscale.scales.layout import (
    MIN_EXPONENT,
    MOMENT_COLUMNS,
    MOMENTS,
    RowLayout,
)
from lightning_unitscale.scales.reduce import empty_rows
from lightning_unitscale.scales.statistics import functional_row
from lightning_unitscale.scales.strided import Elements
from lightning_unitscale.scales.tensor_statistics import FloatArray

# Elements of a part, which stays in the second level of cache.
_LIGHT_PART: Final = 2**17
_EXACT_PART: Final = 2**16
# Within these, sums of the squares of a part neither overflow nor lose anything in FP32.
_SMALLEST, _LARGEST = 2.0**-40, 2.0**40
# Elements of the buffer for samples, which stays in the second level of cache.
_BUFFER: Final = 2**17
_FIELDS: Final = 256  # values of an FP32 exponent, as its bits have it
_BIAS: Final = 127


def host_row(tensor: Tensor, layout: RowLayout) -> Tensor:
    """``statistics_row`` of a CPU tensor: the light row, or exact moments.

    Args:
        tensor: As there, without gradient.
        layout: ``MOMENTS``, or a sampled one without formats.
    """
    if not layout.is_sampled:
        return _exact_row(tensor)
    rows = HostRows(layout, buffer_size=min(tensor.numel(), layout.sample_size or 1))
    rows.add(tensor)
    return rows.finish()[0]


class HostRows:
    """Collects the light rows of CPU tensors.

    Args:
        layout: A sampled one without formats.
        buffer_size: Elements of the buffer that samples are counted in.
    """

    def __init__(self, layout: RowLayout, buffer_size: int = _BUFFER) -> None:
        self._layout = layout
        self._sample_size = layout.sample_size or 1
        size = max(buffer_size, 1)
        self._buffer = torch.empty(size, dtype=torch.float32, device="cpu")
        self._fields = np.empty(size, np.uint32)
        self._used = 0
        # Of the rows whose samples are in the buffer.
        self._waiting: list[tuple[tuple[float, ...], int, int]] = []
        self._rows: list[Tensor] = []
        self._number = 0

    def add(self, tensor: Tensor) -> int:
        """Measure a real floating-point tensor on the CPU; returns the place of its row."""
        self._number += 1
        elements = Elements.of(tensor.detach())
        flat = elements.tensor.reshape(-1)
        moments = None
        if flat.numel() and flat.dtype != torch.float64:
            moments = _light_moments(flat)
        if moments is None:
            self._count()
            self._rows.append(functional_row(tensor, self._layout)[None])
            return self._number - 1
        stride = elements.stride(self._sample_size)
        sample = flat[::stride] if stride > 1 else flat
        length = sample.numel()
        if self._used + length > len(self._buffer):
            self._count()
        self._buffer[self._used : self._used + length].copy_(sample)
        self._used += length
        self._waiting.append((moments, elements.repeats, length))
        return self._number - 1

    def finish(self) -> Tensor:
        """Return the rows, shape ``(num_tensors, layout.num_columns)``, in the order of adding."""
        self._count()
        if len(self._rows) == 1:
            return self._rows[0]
        return torch.cat(self._rows) if self._rows else empty_rows(0, self._layout)

    def _count(self) -> None:
        """Make rows of what is in the buffer."""
        if not self._waiting:
            return
        moments, repeats, lengths = zip(*self._waiting, strict=True)
        magnitudes, fields = self._buffer.numpy()[: self._used], self._fields[: self._used]
        np.abs(magnitudes, out=magnitudes)
        codes = magnitudes.view(np.uint32)
        np.right_shift(codes, 23, out=fields)
        starts = np.cumsum([0, *lengths[:-1]])
        for position, start in enumerate(starts[1:].tolist(), start=1):
            fields[start : start + lengths[position]] += position * _FIELDS
        numbers = torch.from_numpy(fields.view(np.int32))
        counts = torch.bincount(numbers, minlength=len(lengths) * _FIELDS)
        counted = counts.view(-1, _FIELDS).numpy()
        rows = np.zeros((len(lengths), self._layout.num_columns))
        exponents = rows[:, self._layout.exponents]
        first = 1 - _BIAS - MIN_EXPONENT
        exponents[:, first : first + _FIELDS - 2] = counted[:, 1 : _FIELDS - 1]
        zeros = counted[:, 0]
        if np.count_nonzero(codes) + zeros.sum() > len(codes):
            zeros = np.add.reduceat(codes == 0, starts, dtype=np.int64)
            _count_subnormals(exponents, magnitudes, starts)
        numel, sums, squares, largest = zip(*moments, strict=True)
        for name, column in (
            ("numel", numel),
            ("sum", sums),
            ("square_sum", squares),
            ("sampled", lengths),
            ("zeros", zeros),
            ("abs_sum", np.add.reduceat(magnitudes, starts, dtype=np.float64)),
        ):
            rows[:, _COLUMN[name]] = column
        rows *= np.array(repeats)[:, None]
        rows[:, _COLUMN["abs_max"]] = largest
        # Codes are in the order of magnitudes, and one below zero's is the largest.
        codes -= np.uint32(1)
        smallest = (np.minimum.reduceat(codes, starts) + np.uint32(1)).view(np.float32)
        rows[:, _COLUMN["abs_min"]] = np.where(smallest > 0, smallest, math.inf)
        self._rows.append(torch.from_numpy(rows))
        self._used = 0
        self._waiting = []


_COLUMN: Final = {name: index for index, name in enumerate((*MOMENT_COLUMNS, "sampled"))}


def _count_subnormals(exponents: FloatArray, magnitudes: FloatArray, starts: FloatArray) -> None:
    """Count subnormal FP32 elements, whose exponent field is that of zero."""
    (places,) = np.nonzero((magnitudes > 0) & (magnitudes < 2.0**-126))
    tensors = np.searchsorted(starts, places, "right") - 1
    bins = np.frexp(magnitudes[places].astype(np.float64))[1] - 1 - MIN_EXPONENT
    np.add.at(exponents, (tensors, bins), 1)


def _light_moments(flat: Tensor) -> tuple[float, float, float, float] | None:
    """Number, sum, sum of squares and largest magnitude of FP32 or narrower elements.

    Returns:
        ``None`` if some are not finite.
    """
    largest = total = squares = 0.0
    for part in flat.split(_LIGHT_PART) if flat.numel() > _LIGHT_PART else (flat,):
        wide = part.float()
        low, high = torch.aminmax(wide)
        amax = max(-low.item(), high.item())
        if not amax < math.inf:  # NaN is not
            return None
        if amax == 0:
            continue
        exponent = 0
        if not _SMALLEST < amax < _LARGEST:
            exponent = math.frexp(amax)[1]
            # In two steps: the factor itself may be out of range.
            half = exponent // 2
            wide = wide * 2.0**-half * 2.0 ** (half - exponent)
        largest = max(largest, amax)
        total += math.ldexp(wide.sum().item(), exponent)
        squares += math.ldexp(_squares(wide), 2 * exponent)
    return float(flat.numel()), total, squares, largest


def _squares(elements: Tensor) -> float:
    """Sum of squares.

    torch's dot product would be a matmul of the step in a session. NumPy's would leave the memory
    fixed in size, for good, and it is the user's: FSDP resizes what it gathers.
    """
    return float(elements.square().sum().item())


def _exact_row(tensor: Tensor) -> Tensor:
    """The moments of all elements."""
    elements = Elements.of(tensor)
    flat = elements.tensor.reshape(-1)
    if flat.dtype == torch.float64 or flat.numel() == 0:
        return functional_row(tensor, MOMENTS)
    zeros = 0
    sums = [0.0, 0.0, 0.0]
    largest, smallest = 0.0, math.inf
    for part in flat.split(_EXACT_PART):
        wide = part.double()
        magnitude = wide.abs()
        low, high = (one.item() for one in torch.aminmax(magnitude))
        if not high < math.inf:
            return functional_row(tensor, MOMENTS)
        largest = max(largest, high)
        if low == 0:
            num_zeros = len(part) - int(torch.count_nonzero(wide))
            zeros += num_zeros
            if num_zeros < len(part):
                low = torch.where(wide == 0, math.inf, magnitude).amin().item()
        if low:
            smallest = min(smallest, low)
        for index, one in enumerate((wide.sum().item(), magnitude.sum().item(), _squares(wide))):
            sums[index] += one
    added = (float(flat.numel()), float(zeros), 0.0, 0.0, *sums)
    row = [number * elements.repeats for number in added]
    return torch.tensor([*row, largest, smallest], dtype=torch.float64, device="cpu")

"""Compute rows of CPU tensors with reductions of torch and NumPy.

Each reduction reads a tensor once, part by part, so that the next one finds the part in the cache.
For a light row, extremes, sum and sum of squares are computed in FP32 for each part, and added up
in FP64. If the squares of a part would leave the range of FP32, the part is first multiplied by a
power of two. The exact row is computed in FP64. Reading a number never waits on a CPU, so rare
cases (NaN, infinities, FP64) use torch operations.

Exponents of many tensors are counted together: their samples are concatenated in one buffer. Small
tensors are stored there completely, and their moments are computed from it too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_unitscale.scales.layout import (
    MIN_EXPONENT,
    MOMENT_COLUMNS,
    MOMENTS,
    FloatArray,
    RowLayout,
)
from lightning_unitscale.scales.torch_rows import Elements, functional_row

# Elements of a part, which stays in the second level of cache.
_LIGHT_PART: Final = 2**17
_EXACT_PART: Final = 2**16
# Within these, sums of the squares of a part neither overflow nor lose anything in FP32.
_SMALLEST, _LARGEST = 2.0**-40, 2.0**40
# Elements per norm: torch adds up the squares of a part one after the other.
_NORM_LENGTH: Final = 512
_BUFFER: Final = 2**16  # elements of a buffer for samples, which stays in the second level of cache
# The moments of tensors up to this size are computed together, not one by one.
_SMALL: Final = 2**12
_FIELDS: Final = 256  # number of values of FP32's exponent bits
_BIAS: Final = 127
_MANTISSA_BITS: Final = 23
_NORMAL: Final = 2.0**-126  # the smallest normal number of FP32
_MOST: Final = 2.0**120  # sums below it do not leave FP32
_COLUMN: Final = {name: index for index, name in enumerate((*MOMENT_COLUMNS, "sampled"))}
_Moments: TypeAlias = tuple[float, float, float]  # sum, sum of squares and largest magnitude


def host_row(tensor: Tensor, layout: RowLayout) -> Tensor:
    """``statistics_row`` of a CPU tensor: the light row, or exact moments."""
    if not layout.is_sampled:
        return _exact_row(tensor)
    rows = HostRows(layout, buffer_size=min(tensor.numel(), layout.sample_size or 1))
    rows.add(tensor)
    return rows.finish()[0]


class HostRows:
    """A collector of the light rows of CPU tensors."""

    def __init__(self, layout: RowLayout, buffer_size: int = 0) -> None:
        self._layout = layout
        self._sample_size = layout.sample_size or 1
        self._buffer_size = buffer_size or max(_BUFFER, self._sample_size)
        # One buffer for small tensors, one for others.
        self._samples: dict[bool, _Samples] = {}
        self._fields = np.empty(self._buffer_size, np.uint32)
        self._counted: list[tuple[list[int], FloatArray]] = []
        self._rare: list[tuple[int, Tensor]] = []
        self._number = 0
        # Allocating memory for each part would take longer than the computation.
        self._part = torch.empty(_LIGHT_PART, dtype=torch.float32, device="cpu")

    def add(self, tensor: Tensor) -> int:
        """Measure a real floating-point tensor on the CPU, and return the place of its row."""
        number = self._number
        self._number += 1
        elements = Elements.of(tensor)
        stored = elements.tensor
        numel = stored.numel()
        if numel and stored.dtype is not torch.float64:
            stride = 1 if numel <= self._sample_size else elements.stride(self._sample_size)
            length = -(-numel // stride)
            is_small = numel <= min(_SMALL, self._sample_size)
            samples = self._samples.get(is_small)
            if samples is None:
                samples = self._samples[is_small] = _Samples(self._buffer_size)
            elif samples.used + length > self._buffer_size:
                self._count(samples)
            moments = None
            if is_small:
                samples.room(length).copy_(stored.reshape(-1))
            else:
                moments = _light_moments(stored, stride, samples.room(length), self._part)
            if is_small or moments is not None:
                samples.keep(number, numel, elements.repeats, length, moments)
                return number
        self._rare.append((number, functional_row(tensor, self._layout)))
        return number

    def finish(self) -> Tensor:
        """Return the rows, shape ``(num_tensors, layout.num_columns)``, in the order of adding."""
        for samples in self._samples.values():
            self._count(samples)
        rows = np.empty((self._number, self._layout.num_columns))
        for numbers, counted in self._counted:
            rows[numbers] = counted
        for number, row in self._rare:
            rows[number] = row.numpy()
        return torch.from_numpy(rows)

    def _count(self, samples: _Samples) -> None:
        if samples.used:
            self._counted.append(samples.count(self._layout, self._fields))


class _Samples:
    """Samples of tensors, contiguous in one buffer: of small or of larger tensors."""

    def __init__(self, size: int) -> None:
        self._buffer = torch.empty(size, dtype=torch.float32, device="cpu")
        self.used = 0
        # For each tensor: its number, its elements, how often they are repeated, and the length of
        # its sample.
        self._kept: list[tuple[int, int, int, int]] = []
        self._moments: list[_Moments] = []  # for each tensor that is not small

    def room(self, length: int) -> Tensor:
        """Return memory for one more sample."""
        return self._buffer[self.used : self.used + length]

    def keep(
        self, number: int, numel: int, repeats: int, length: int, moments: _Moments | None
    ) -> None:
        """Keep the values in the :meth:`room`: magnitudes if there are moments, else all."""
        self.used += length
        self._kept.append((number, numel, repeats, length))
        if moments is not None:
            self._moments.append(moments)

    def count(
        self, layout: RowLayout, fields: npt.NDArray[np.uint32]
    ) -> tuple[list[int], FloatArray]:
        """Return the numbers of the tensors and their rows, and empty the buffer."""
        numbers, numel, repeats, lengths = map(list, zip(*self._kept, strict=True))
        starts = np.array([0, *itertools.accumulate(lengths[:-1])])
        rows = np.zeros((len(lengths), layout.num_columns))
        column = {name: rows[:, index] for name, index in _COLUMN.items()}
        column["numel"][:], column["sampled"][:] = numel, lengths
        magnitudes, fields = self._buffer.numpy()[: self.used], fields[: self.used]
        rare: dict[int, FloatArray] = {}
        largest: Any
        if self._moments:
            column["sum"][:], column["square_sum"][:], largest = zip(*self._moments, strict=True)
        else:
            rare = self._small_moments(column["sum"], column["square_sum"], starts, layout)
            np.abs(magnitudes, out=magnitudes)
            largest = np.maximum.reduceat(magnitudes, starts)
        codes = magnitudes.view(np.uint32)
        np.right_shift(codes, _MANTISSA_BITS, out=fields)
        for position, start in enumerate(starts[1:].tolist(), start=1):
            fields[start : start + lengths[position]] += position * _FIELDS
        counts = torch.bincount(
            torch.from_numpy(fields.view(np.int32)), minlength=len(lengths) * _FIELDS
        )
        counted = counts.view(-1, _FIELDS).numpy()
        first = layout.exponents.start + 1 - _BIAS - MIN_EXPONENT
        rows[:, first : first + _FIELDS - 2] = counted[:, 1 : _FIELDS - 1]
        is_in_range = max(largest) < _MOST / self.used
        column["abs_sum"][:] = np.add.reduceat(
            magnitudes, starts, dtype=np.float32 if is_in_range else np.float64
        )
        zeros = counted[:, 0]
        if any(zeros.tolist()):
            is_zero = codes == 0
            magnitudes[is_zero] = math.inf
            zeros = np.add.reduceat(is_zero, starts, dtype=np.int64)
        smallest = np.minimum.reduceat(magnitudes, starts)
        if min(smallest.tolist()) < _NORMAL:
            _count_subnormals(rows[:, layout.exponents], magnitudes, starts)
        column["zeros"][:] = zeros
        if max(repeats) > 1:
            rows *= np.array(repeats)[:, None]
        column["abs_max"][:], column["abs_min"][:] = largest, smallest
        for position, row in rare.items():
            rows[position] = row
        self.used = 0
        self._kept, self._moments = [], []
        return numbers, rows

    def _small_moments(
        self,
        sums: FloatArray,
        squares: FloatArray,
        starts: npt.NDArray[np.int64],
        layout: RowLayout,
    ) -> dict[int, FloatArray]:
        """Fill in moments from the buffer, and return the rows that have non-finite elements."""
        elements = self._buffer[: self.used]
        values = elements.numpy()
        # NaN and infinities are not errors.
        with np.errstate(invalid="ignore"):
            sums[:] = np.add.reduceat(values, starts, dtype=np.float64)
            squares[:] = np.add.reduceat(np.square(values, dtype=np.float64), starts)
        rare: dict[int, FloatArray] = {}
        for position in np.nonzero(~np.isfinite(squares))[0].tolist():
            _, _, repeats, length = self._kept[position]
            part = elements[starts[position] :][:length].expand(repeats, -1)
            rare[position] = functional_row(part, layout).numpy()
        return rare


def _count_subnormals(exponents: FloatArray, magnitudes: FloatArray, starts: FloatArray) -> None:
    """Count subnormal FP32 elements, whose exponent field is that of zero."""
    (places,) = np.nonzero((magnitudes > 0) & (magnitudes < _NORMAL))
    tensors = np.searchsorted(starts, places, "right") - 1
    bins = np.frexp(magnitudes[places].astype(np.float64))[1] - 1 - MIN_EXPONENT
    np.add.at(exponents, (tensors, bins), 1)


def _parts(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the elements in order, in parts of a given size."""
    numel = tensor.numel()
    if numel <= size:
        yield tensor
    elif (rows := size * len(tensor) // numel) == 0:
        for one in tensor:
            yield from _parts(one, size)
    else:
        for begin in range(0, len(tensor), rows):
            yield tensor[begin : begin + rows]


def _light_moments(tensor: Tensor, stride: int, sample: Tensor, memory: Tensor) -> _Moments | None:
    """Return moments of FP32 or narrower elements, and sample magnitudes on the way."""
    largest = total = squares = 0.0
    begin = taken = 0
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    for part in _parts(tensor, _LIGHT_PART):
        if part.dtype is torch.float32 and part.is_contiguous():
            wide = part.view(-1)
        else:
            wide = memory[: part.numel()]
            wide.view(part.shape).copy_(part)
        low, high = torch.aminmax(wide)
        amax = max(-low.item(), high.item())
        if not amax < math.inf:  # NaN compares false
            return None
        chosen = wide[-begin % stride :: stride]
        number = chosen.numel()
        torch.abs(chosen, out=sample[taken : taken + number])
        taken += number
        begin += wide.numel()
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
    return total, squares, largest


def _squares(elements: Tensor) -> float:
    """Sum the squares of elements in one dimension, without memory for the squares."""
    # In a session, torch's dot product would count as a matmul of the step. NumPy's would
    # permanently prevent the user's memory from being resized, and FSDP resizes gathered
    # parameters.
    rest = elements.numel() % _NORM_LENGTH
    rows = elements[: elements.numel() - rest].view(-1, _NORM_LENGTH)
    result: float = torch.linalg.vector_norm(rows, dim=1).square_().sum().item()
    return result + elements[elements.numel() - rest :].square().sum().item()


def _exact_row(tensor: Tensor) -> Tensor:
    """Return the moments of all elements."""
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
        for index, one in enumerate((wide, magnitude, wide.square())):
            sums[index] += one.sum().item()
    added = (float(flat.numel()), float(zeros), 0.0, 0.0, *sums)
    row = [number * elements.repeats for number in added]
    return torch.tensor([*row, largest, smallest], dtype=torch.float64, device="cpu")

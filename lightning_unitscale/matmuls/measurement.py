"""Describe the matmuls of a step, their measurements, and where scaling would be inexact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.matmuls.gauge import Gauge, GaugePair
from lightning_unitscale.matmuls.measured_operands import HIGH, LOW, combined_rms
from lightning_unitscale.patching import nothing
from lightning_unitscale.scales.layout import MOMENTS, FloatArray, TensorStatistics
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.scales.transfer import joint_copy

FORWARD = "forward"  # the slot of a forward matmul; backward matmuls have others
# BLAS sums BF16 in FP32, which has the same smallest normal number.
_SMALLEST_LOG2 = {torch.float32: -126, torch.bfloat16: -126, torch.float64: -1022}
# FP16 ends below 2**16. An element may grow between two measurements.
_LARGEST_LOG2_FP16 = 13
_LOG2_TERMS = 20  # exponent of two of the largest number of terms in a matmul's sums


@dataclass(eq=False, slots=True)
class Extent:
    """The size of a tensor's elements."""

    rms: float = math.nan  # NaN if there are no elements or some are not finite
    smallest: float = math.inf  # smallest magnitude other than zero; infinite if there is none
    largest: float = 0.0  # largest finite magnitude
    row: Tensor | None = None  # the statistics on their device, until they are read
    log2_unit: int = 0  # exponent of the unit by which the measured tensor was divided

    @property
    def gives_unit(self) -> bool:
        """Check whether its RMS gives a unit: some element is not zero, and all are finite."""
        return self.rms > 0.0  # false for NaN

    @staticmethod
    def of(tensor: Tensor, log2_unit: int = 0) -> Extent:
        """Measure a tensor, without waiting for its device."""
        return Extent(row=statistics_row(tensor, MOMENTS), log2_unit=log2_unit)

    def read(self, row: FloatArray) -> None:
        """Read the numbers of a row that has arrived."""
        statistics = TensorStatistics(row, MOMENTS, self.log2_unit)
        # A tensor that is empty or not finite does not predict the next one.
        is_finite = 0 < statistics.numel == statistics.num_finite
        self.rms = statistics.rms if is_finite else math.nan
        self.smallest = math.ldexp(row[MOMENTS.index("abs_min")], self.log2_unit)
        self.largest = math.ldexp(row[MOMENTS.index("abs_max")], self.log2_unit)
        self.row = None


# The measurement of each operand in this step; empty without any.
Extents = tuple[Extent | None, ...]


def reading(extents: Iterable[Extent]) -> Callable[[], None]:
    """Start one transfer of measurements, and return a function that waits and fills them in."""
    unread = {id(extent): extent for extent in extents if extent.row is not None}
    rows = [extent.row for extent in unread.values() if extent.row is not None]
    if not rows:
        return nothing
    copy = joint_copy(rows)

    def fill_in() -> None:
        for extent, row in zip(unread.values(), copy.numbers().numpy(), strict=True):
            extent.read(row)

    return fill_in


@dataclass(eq=False, slots=True)
class Site:
    """One matmul of a module's step, with the units of its operands."""

    name: str  # such as ``blocks.0.up.linear``, with ``_1``, ``_2`` for further calls
    module: str  # path of the module that runs it
    roles: tuple[str, ...]  # names of its operands
    word: str = ""  # name of the operation
    index: int = 0  # number of such matmuls before it in a call of the module
    operand_names: tuple[str, ...] = ()  # their names in the gauge
    # Exponent of the unit of each operand; ``None`` without a unit.
    log2_units: tuple[int | None, ...] = ()
    # Exponent of the unit of the output gradient; ``None`` without a unit.
    log2_gamma: int | None = None
    plain: dict[str, str] = field(default_factory=dict)  # why matmuls run unscaled, by slot
    is_settled: bool = False  # whether all of its units were known when the step began
    # By slot, the last matmul whose operands and addends were all measured.
    seen: dict[str, MeasuredMatmul] = field(default_factory=dict)
    # By name in the gauge, the last extent with a nonzero finite element.
    latest: dict[str, Extent] = field(default_factory=dict)
    matmul: Any = None  # the prepared forward matmul with the units in force, if there is one

    def __post_init__(self) -> None:
        self.operand_names = tuple(f"{self.name}:{role}" for role in self.roles)
        self.log2_units = self.log2_units or (None,) * len(self.roles)

    def take_units(self, gauge: Gauge, default: GaugePair | None) -> None:
        """Set the units to those of a gauge, or to ``default`` for missing names."""
        operands = [gauge.pairs.get(name, default) for name in self.operand_names]
        self.log2_units = tuple(None if pair is None else pair.log2_sigma for pair in operands)
        gradient = gauge.pairs.get(self.name, default)
        self.log2_gamma = None if gradient is None else gradient.log2_gamma
        self.matmul = None

    def judge(self, gauge: Gauge) -> None:
        """Leave its matmuls unscaled if scaling by a gauge would not be exact."""
        for slot, matmul in self.seen.items():
            exponents = [gauge.pair(name).exponent for name in matmul.names]
            # Operands with a unit are not measured in each step, so use their latest extents.
            extents = tuple(self.latest.get(name, Extent()) for name in matmul.names)
            before = self.plain.pop(slot, "")
            if reason := replace(matmul, extents=extents).why_inexact(exponents):
                self.plain[slot] = reason
            if reason != before:
                self.matmul = None

    def names_of(self, sources: tuple[int | None, ...]) -> tuple[str, ...]:
        """Return the gauge names of a backward matmul's operands; ``None`` is the gradient."""
        return tuple(self.name if k is None else self.operand_names[k] for k in sources)


@dataclass(frozen=True)
class MeasuredMatmul:
    """One run of a matmul, with the measurements of its operands."""

    site: Site
    slot: str  # ``"forward"``, or the name of a backward matmul
    # Gauge names of the measured operands; for a gradient the name of the matmul.
    names: tuple[str, ...]
    extents: tuple[Extent, ...]  # of these operands
    addends: tuple[Extent, ...]
    dtype: torch.dtype  # of its operands
    # Exponents of its operands' units at the time, ``None`` without a unit.
    log2_units: tuple[int | None, ...]
    # True if all operands and addends were measured, not only those without a unit.
    is_whole: bool = True

    def why_inexact(self, log2_units: Sequence[int]) -> str:
        """Return why scaling by these units would change its bits; empty if it would not."""
        # A product of two elements below the smallest normal number vanishes in the unscaled
        # matmul. In the scaled one it may survive and break a tie of larger terms. A partial sum
        # that overflows is infinite or NaN when unscaled and may be finite when scaled.
        if self.dtype is torch.float16:
            return self._why_overflowing(log2_units)
        limit = _SMALLEST_LOG2[self.dtype]
        smallest = [math.log2(extent.smallest) for extent in self.extents]
        if any(sum(pair) < limit for pair in itertools.combinations(smallest, 2)):
            return f"terms below 2**{limit}, which vanish only if unscaled"
        largest = [math.log2(extent.largest) for extent in self.extents if extent.largest]
        too_large = -limit - _LOG2_TERMS
        if any(sum(pair) > too_large for pair in itertools.combinations(largest, 2)):
            return f"terms above 2**{too_large}, whose sums may overflow only if unscaled"
        stored = [log2 - unit for log2, unit in zip(smallest, log2_units, strict=True)]
        common = sum(log2_units)
        stored += [math.log2(extent.smallest) - common for extent in self.addends]
        if any(log2 < limit for log2 in stored):
            return f"elements that would be below 2**{limit} when scaled"
        largest = [math.log2(extent.largest) for extent in self.addends if extent.largest]
        if any(log2 - common > -limit for log2 in largest):
            return f"an addend that would be above 2**{-limit} when scaled"
        return ""

    def _why_overflowing(self, log2_units: Sequence[int]) -> str:
        """Return why scaled values would exceed FP16's small range; empty if they would not."""
        pairs = [
            *zip(self.extents, log2_units, strict=True),
            *((extent, sum(log2_units)) for extent in self.addends),
        ]
        # Only units below 1 enlarge values.
        enlarged = [(extent.largest, unit) for extent, unit in pairs if extent.largest and unit < 0]
        stored = [math.log2(largest) - unit for largest, unit in enlarged]
        if any(log2 > _LARGEST_LOG2_FP16 for log2 in stored):
            return f"elements that would be above 2**{_LARGEST_LOG2_FP16} when scaled"
        return ""


@dataclass(frozen=True)
class Measurement:
    """The measurements of a step, by name in the gauge."""

    forward: Mapping[str, float] = field(default_factory=dict)  # unscaled RMS of operands
    backward: Mapping[str, float] = field(default_factory=dict)  # unscaled RMS of gradients
    # Scaled RMS of the tensors that have left [1/4, 4].
    outside: Mapping[str, float] = field(default_factory=dict)
    matmuls: tuple[MeasuredMatmul, ...] = ()

    @property
    def has_backward(self) -> bool:
        """Check whether it includes a backward matmul."""
        return any(matmul.slot != FORWARD for matmul in self.matmuls)

    def beyond(self, gauge: Gauge) -> Measurement:
        """Return the part for tensors without a unit in a gauge."""
        forward, backward = (
            {name: rms for name, rms in sizes.items() if name not in gauge}
            for sizes in (self.forward, self.backward)
        )
        return replace(self, forward=forward, backward=backward)

    @staticmethod
    def of_matmuls(matmuls: Sequence[MeasuredMatmul]) -> Measurement:
        """Collect the RMS of the operands that give a unit, from extents that have arrived."""
        gradients = {matmul.site.name for matmul in matmuls}
        rows: dict[tuple[str, int], tuple[float, int | None]] = {}
        for matmul in matmuls:
            for name, extent, unit in zip(
                matmul.names, matmul.extents, matmul.log2_units, strict=True
            ):
                if extent.gives_unit:
                    # Several backward matmuls may read one tensor, which is measured once.
                    rows[name, id(extent)] = extent.rms, unit
        # Several calls may measure one tensor, which has one unit.
        values: dict[str, list[float]] = {}
        units: dict[str, int] = {}
        for (name, _), (rms, unit) in rows.items():
            values.setdefault(name, []).append(rms)
            if unit is not None:
                units[name] = unit
        joint = {name: combined_rms(each) for name, each in values.items()}
        stored = {name: math.ldexp(joint[name], -unit) for name, unit in units.items()}
        return Measurement(
            {name: rms for name, rms in joint.items() if name not in gradients},
            {name: rms for name, rms in joint.items() if name in gradients},
            {name: rms for name, rms in stored.items() if rms > 0.0 and not LOW <= rms <= HIGH},
            tuple(matmuls),
        )

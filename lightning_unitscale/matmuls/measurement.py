"""A matmul of a step, what a step has measured of it, and where units would not be exact."""

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
from lightning_unitscale.scales.layout import MOMENTS
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.scales.tensor_statistics import FloatArray, TensorStatistics
from lightning_unitscale.scales.transfer import joint_copy

# Where a matmul runs beside the slots of its operands' gradients.
FORWARD = "forward"
# BLAS sums BF16 in FP32, which has the same smallest normal number.
_SMALLEST_LOG2 = {torch.float32: -126, torch.bfloat16: -126, torch.float64: -1022}
# FP16 ends below 2**16. Between two looks an element may grow.
_LARGEST_LOG2_FP16 = 13
# As many terms as a matmul may add, as an exponent of two.
_LOG2_TERMS = 20


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


@dataclass(eq=False, slots=True)
class Site:
    """One matmul of a module's step, with the units of what it reads."""

    name: str  # such as ``blocks.0.up.linear``, with ``_1``, ``_2`` for further calls
    module: str  # path of the module that runs it
    roles: tuple[str, ...]  # what its operands are called
    word: str = ""  # what the operation is called
    index: int = 0  # how many like it run before it in a call of the module
    operand_names: tuple[str, ...] = ()  # their names in the gauge
    # Exponent of the unit of each operand; ``None`` for one without a unit.
    log2_units: tuple[int | None, ...] = ()
    # Exponent of the unit of the arriving gradient; ``None`` likewise.
    log2_gamma: int | None = None
    # Which of its matmuls run as they are, and why: ``"forward"``, or a backward one.
    plain: dict[str, str] = field(default_factory=dict)
    is_settled: bool = False  # whether all of its units were known when the step began
    # By slot, the last matmul whose operands and addends were all measured.
    seen: dict[str, MeasuredMatmul] = field(default_factory=dict)
    # By name in the gauge, the last extent that gives a unit.
    latest: dict[str, Extent] = field(default_factory=dict)
    matmul: Any = None  # what a forward matmul runs with in the units in force, if one has

    def __post_init__(self) -> None:
        self.operand_names = tuple(f"{self.name}:{role}" for role in self.roles)
        self.log2_units = self.log2_units or (None,) * len(self.roles)

    def take_units(self, gauge: Gauge, default: GaugePair | None) -> None:
        """Take the units of a gauge, and ``default`` for what it does not have."""
        operands = [gauge.pairs.get(name, default) for name in self.operand_names]
        self.log2_units = tuple(None if pair is None else pair.log2_sigma for pair in operands)
        gradient = gauge.pairs.get(self.name, default)
        self.log2_gamma = None if gradient is None else gradient.log2_gamma
        self.matmul = None

    def judge(self, gauge: Gauge) -> None:
        """Leave those of its matmuls unscaled in which powers of two are not exact in a gauge."""
        for slot, matmul in self.seen.items():
            exponents = [gauge.pair(name).exponent for name in matmul.names]
            # Only operands without a unit are measured in each step; the others as they were.
            extents = tuple(self.latest.get(name, Extent()) for name in matmul.names)
            if reason := replace(matmul, extents=extents).why_inexact(exponents):
                self.plain[slot] = reason
            else:
                self.plain.pop(slot, None)

    def names_of(self, sources: tuple[int | None, ...]) -> tuple[str, ...]:
        """Names in the gauge of what a backward matmul reads; that of the matmul for ``None``."""
        return tuple(self.name if k is None else self.operand_names[k] for k in sources)


@dataclass(frozen=True)
class MeasuredMatmul:
    """One matmul as it was met."""

    site: Site  # which matmul of the step
    slot: str  # ``"forward"``, or which backward matmul of it
    # Names in the gauge of the operands that were measured; that of the matmul for its
    # gradient.
    names: tuple[str, ...]
    extents: tuple[Extent, ...]  # of these operands
    addends: tuple[Extent, ...]  # of what is added to it
    dtype: torch.dtype  # type of its operands
    # Exponents of the units that its operands had, ``None`` where they had none.
    log2_units: tuple[int | None, ...]
    # Whether all operands and addends were measured, not only those without a unit.
    is_whole: bool = True

    def why_inexact(self, log2_units: Sequence[int]) -> str:
        """Why it would have other bits with its operands in these units; empty if it would not."""
        # A product of two elements below the smallest normal number vanishes in the unscaled matmul
        # and survives in units, where it may break a tie of larger terms. A sum that overflows on
        # its way is infinite or NaN there and may be a number in units.
        if self.dtype is torch.float16:
            return self._why_overflowing(log2_units)
        limit = _SMALLEST_LOG2[self.dtype]
        smallest = [math.log2(extent.smallest) for extent in self.extents]
        if any(sum(pair) < limit for pair in itertools.combinations(smallest, 2)):
            return f"terms below 2**{limit}, which vanish there and not in units"
        largest = [math.log2(extent.largest) for extent in self.extents if extent.largest]
        too_large = -limit - _LOG2_TERMS
        if any(sum(pair) > too_large for pair in itertools.combinations(largest, 2)):
            return f"terms above 2**{too_large}, whose sums may overflow there and not in units"
        stored = [log2 - unit for log2, unit in zip(smallest, log2_units, strict=True)]
        common = sum(log2_units)
        stored += [math.log2(extent.smallest) - common for extent in self.addends]
        if any(log2 < limit for log2 in stored):
            return f"elements that would be below 2**{limit} in units"
        largest = [math.log2(extent.largest) for extent in self.addends if extent.largest]
        if any(log2 - common > -limit for log2 in largest):
            return f"an addend that would be above 2**{-limit} in units"
        return ""

    def _why_overflowing(self, log2_units: Sequence[int]) -> str:
        """Why FP16 would not hold what it holds without units: its range is small."""
        pairs = [
            *zip(self.extents, log2_units, strict=True),
            *((extent, sum(log2_units)) for extent in self.addends),
        ]
        # What units make smaller is held as well as without them.
        enlarged = [(extent.largest, unit) for extent, unit in pairs if extent.largest and unit < 0]
        stored = [math.log2(largest) - unit for largest, unit in enlarged]
        if any(log2 > _LARGEST_LOG2_FP16 for log2 in stored):
            return f"elements that would be above 2**{_LARGEST_LOG2_FP16} in units"
        return ""


@dataclass(frozen=True)
class Measurement:
    """What a step has shown of tensors with units of their own, by name in the gauge."""

    forward: Mapping[str, float] = field(default_factory=dict)  # RMS as the model means it
    backward: Mapping[str, float] = field(default_factory=dict)  # the same of gradients
    # Tensors whose RMS in the units in force has left [1/4, 4], with that RMS.
    outside: Mapping[str, float] = field(default_factory=dict)
    matmuls: tuple[MeasuredMatmul, ...] = ()  # matmul by matmul

    @property
    def has_backward(self) -> bool:
        """Whether a backward matmul was among them."""
        return any(matmul.slot != FORWARD for matmul in self.matmuls)

    def beyond(self, gauge: Gauge) -> Measurement:
        """Return the part that is of tensors without a unit in a gauge."""
        forward, backward = (
            {name: rms for name, rms in sizes.items() if name not in gauge}
            for sizes in (self.forward, self.backward)
        )
        return replace(self, forward=forward, backward=backward)

    @staticmethod
    def of_matmuls(matmuls: Sequence[MeasuredMatmul]) -> Measurement:
        """Collect the RMS of operands that give a unit; the matmuls' extents have arrived."""
        gradients = {matmul.site.name for matmul in matmuls}
        rows: dict[tuple[str, int], tuple[float, int | None]] = {}
        for matmul in matmuls:
            for name, extent, unit in zip(
                matmul.names, matmul.extents, matmul.log2_units, strict=True
            ):
                if extent.gives_unit:
                    # One tensor read by several backward matmuls is measured once.
                    rows[name, id(extent)] = extent.rms, unit
        # Several calls measure one tensor, which has one unit.
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

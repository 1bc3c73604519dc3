"""Measure the operands of matmuls, and find where scaling would be inexact or FP8 too narrow.

A tensor near RMS 1 fits into FP8 unless its elements differ too much in size. A few elements may
be many hundred times the RMS, such as the massive activations of some language models. Or most
elements may be nearly zero relative to the others.

References:
    Sun et al., "Massive Activations in Large Language Models" (arXiv 2402.17762); Blake et al.,
    "u-muP" (arXiv 2407.17465), section 4.2, which keeps the layers known for it out of FP8.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.capture.graph_recorder import stored_elements
from lightning_unitscale.formats import E4M3FN, E5M2, NumberFormat
from lightning_unitscale.matmuls.gauge import Gauge, GaugePair
from lightning_unitscale.patching import nothing
from lightning_unitscale.scales.layout import MOMENTS, Direction, FloatArray, TensorStatistics
from lightning_unitscale.scales.reduce import row_dtype
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.scales.transfer import joint_copy

# The range that lossless unit scaling promises for the stored RMS of an operand.
LOW, HIGH = 0.25, 4.0
# An element beyond the range becomes wrong, not rounded, so none is accepted. A flushed element was
# below 2**-10 of the RMS, so only many of them matter.
MAX_FLUSHED = 0.25

# The formats that a tensor may be cast to, from the finest on.
FORMATS: dict[Direction, tuple[NumberFormat, ...]] = {
    "forward": (E4M3FN,),
    "backward": (E4M3FN, E5M2),
}
NUM_SHARES = 4  # number of shares per tensor that describe FP8's losses, in either direction
# Direction, name in the gauge, and the numbers of :func:`stored_row`.
StoredRow = tuple[Direction, str, Sequence[float]]


def root_mean_square(tensor: Tensor) -> Tensor:
    """Return the RMS of a tensor, 0-d, without overflow or underflow for FP32 values."""
    # The square of an ordinary gradient of 1e-25 is 0 in FP32, so we sum squares in FP64.
    dtype = row_dtype(tensor.device)
    tensor = stored_elements(tensor.detach())
    if tensor.numel() == 0:
        return torch.zeros((), dtype=dtype, device=tensor.device)
    norm = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm / math.sqrt(tensor.numel())


def combined_rms(values: list[float]) -> float:
    """Return the RMS of equal-sized parts, scaled by the largest so that squares stay in range."""
    largest = max(values)
    if not math.isfinite(largest) or largest == 0.0:
        return largest
    return largest * math.sqrt(sum((rms / largest) ** 2 for rms in values) / len(values))


def is_late_look(count: int) -> bool:
    """Decide whether missing units justify another run of a step or a synchronization of ranks."""
    return count in (1, 2, 4) or (count > 0 and count % 8 == 0)


@dataclass(frozen=True)
class Unrepresentable:
    """The matmuls that FP8 cannot represent, each with the reason."""

    matmuls: Mapping[str, str] = field(default_factory=dict)  # matmuls that should not run in FP8
    # Matmuls that fit, but whose gradients need E5M2's range.
    gradients: Mapping[str, str] = field(default_factory=dict)

    def joined(self, other: Unrepresentable) -> Unrepresentable:
        """Return the union of both, with the reasons of ``other`` for common matmuls."""
        return Unrepresentable(
            {**self.matmuls, **other.matmuls}, {**self.gradients, **other.gradients}
        )

    def without(self, other: Unrepresentable) -> Unrepresentable:
        """Return the entries that are not in ``other``."""
        return Unrepresentable(
            {name: why for name, why in self.matmuls.items() if name not in other.matmuls},
            {name: why for name, why in self.gradients.items() if name not in other.gradients},
        )


def unrepresentable_among(
    rows: Iterable[StoredRow], *, awaits_units: bool = True
) -> Unrepresentable:
    """Find the matmuls that do not fit. Tensors outside the RMS range may first get new units."""
    matmuls: dict[str, str] = {}
    gradients: dict[str, str] = {}
    for direction, name, (rms, *shares) in rows:
        if awaits_units and not LOW <= rms <= HIGH:
            continue
        matmul = name.partition(":")[0]
        what = name.rpartition(":")[2] if direction == "forward" else "gradient"
        *narrow, widest = zip(shares[::2], shares[1::2], FORMATS[direction], strict=False)
        losses = [(matmuls, widest), *((gradients, each) for each in narrow)]
        for reasons, (beyond, flushed, format) in losses:
            if beyond > 0.0:
                reasons[matmul] = f"{beyond:.2g} of its {what} is beyond {format}'s range"
            elif flushed > MAX_FLUSHED:
                reason = f"{flushed:.0%} of its {what} would be zero in {format}"
                reasons.setdefault(matmul, reason)
    return Unrepresentable(matmuls, gradients)


def stored_row(tensor: Tensor, direction: Direction) -> Tensor:
    """Return the RMS of a scaled tensor, and each format's shares beyond its range and flushed."""
    row = root_mean_square(tensor).reshape(1)
    return torch.cat([row, stored_shares(tensor, direction).to(row.dtype)])


def stored_shares(tensor: Tensor, direction: Direction) -> Tensor:
    """Return the shares of a scaled tensor that each format would overflow and flush."""
    magnitudes = tensor.abs().float()
    is_some = magnitudes > 0
    count = is_some.sum().clamp(min=1)
    shares = []
    for format in FORMATS[direction]:
        beyond = (magnitudes > format.overflow_threshold).sum() / max(tensor.numel(), 1)
        flushed = (is_some & (magnitudes <= format.flush_threshold)).sum() / count
        shares += [beyond, flushed]
    nothing = torch.zeros_like(shares[0])
    return torch.stack([*shares, *[nothing] * (NUM_SHARES - len(shares))])


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

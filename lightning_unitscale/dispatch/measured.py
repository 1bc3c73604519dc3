"""What was measured of the operands of products: scales, and where units are not exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_unitscale.dispatch.sites import Site
from lightning_unitscale.transforms.calibration import combined_rms
from lightning_unitscale.transforms.drift import HIGH, LOW

# BLAS sums BF16 in FP32, which has the same smallest normal number.
_SMALLEST_LOG2 = {torch.float32: -126, torch.bfloat16: -126, torch.float64: -1022}
# As many terms as a product may add, as an exponent of two.
_LOG2_TERMS = 20


@dataclass(frozen=True)
class Extent:
    """How large the elements of a tensor are.

    Attributes:
        rms: Root of their mean square.
        smallest: Smallest magnitude other than zero; infinite if there is none.
        largest: Largest finite magnitude.
    """

    rms: float
    smallest: float
    largest: float


@dataclass(frozen=True)
class MeasuredProduct:
    """One product as it was met.

    Attributes:
        site: Which product of the step.
        slot: ``"forward"``, or which backward product of it.
        names: Names of its operands in the gauge; that of the product for its gradient.
        extents: Of its operands.
        addends: Of what is added to it.
        dtype: Type of its operands.
    """

    site: Site
    slot: str
    names: tuple[str, ...]
    extents: tuple[Extent, ...]
    addends: tuple[Extent, ...]
    dtype: torch.dtype

    def why_plain(self, log2_units: Sequence[int]) -> str:
        """Why powers of two would not be exact here; empty where they are.

        A product of two elements below the smallest normal number vanishes in the plain product and
        survives in units, where it may break a tie of larger terms. A sum that overflows on its way
        is infinite or NaN there and may be a number in units.

        Args:
            log2_units: Exponents of the operands' units.
        """
        limit = _SMALLEST_LOG2.get(self.dtype)
        if limit is None:
            return ""
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


@dataclass(frozen=True)
class Measurement:
    """What one step has shown.

    Attributes:
        forward: RMS of operands, by their names in the gauge.
        backward: RMS of arriving gradients, by the names of their products.
        outside: Those whose RMS has left [1/4, 4] in the units in force, with that RMS.
        products: Product by product.
    """

    forward: Mapping[str, float] = field(default_factory=dict)
    backward: Mapping[str, float] = field(default_factory=dict)
    outside: Mapping[str, float] = field(default_factory=dict)
    products: tuple[MeasuredProduct, ...] = ()


@dataclass(slots=True)
class _Entry:
    site: Site
    slot: str
    names: tuple[str, ...]
    stats: tuple[Tensor, ...]
    addends: tuple[Tensor, ...]
    units: tuple[int | None, ...]
    dtype: torch.dtype


class Measurements:
    """Collects what products measure, on their device."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def add(
        self,
        site: Site,
        slot: str,
        names: tuple[str, ...],
        stats: tuple[Tensor, ...],
        addends: tuple[Tensor, ...],
        units: tuple[int | None, ...],
        dtype: torch.dtype,
    ) -> None:
        """Add a product: see :class:`MeasuredProduct`; units are ``None`` where none is known."""
        self._entries.append(_Entry(site, slot, names, stats, addends, units, dtype))

    def clear(self) -> None:
        """Forget what was measured."""
        self._entries.clear()

    def take(self) -> Measurement | None:
        """What was measured since the last call, with one transfer; ``None`` if nothing was."""
        entries, self._entries = self._entries, []
        if not entries:
            return None
        rows = {id(row): row for entry in entries for row in (*entry.stats, *entry.addends)}
        device = next(iter(rows.values())).device
        numbers = torch.stack([row.to(device) for row in rows.values()]).tolist()
        extents = {key: Extent(*row[:3]) for key, row in zip(rows, numbers, strict=True)}
        true: dict[str, dict[int, Extent]] = {}
        outside: dict[str, float] = {}
        products = []
        for entry in entries:
            measured = tuple(extents[id(row)] for row in entry.stats)
            added = tuple(extents[id(row)] for row in entry.addends)
            products.append(
                MeasuredProduct(entry.site, entry.slot, entry.names, measured, added, entry.dtype)
            )
            for name, row, extent, unit in zip(
                entry.names, entry.stats, measured, entry.units, strict=True
            ):
                if not math.isfinite(extent.rms):
                    continue
                # One tensor read by several backward products is measured once.
                true.setdefault(name, {})[id(row)] = extent
                stored = 0.0 if unit is None else math.ldexp(extent.rms, -unit)
                if stored > 0.0 and not LOW <= stored <= HIGH:
                    outside[name] = stored
        joint = {
            name: combined_rms([extent.rms for extent in found.values()])
            for name, found in true.items()
        }
        gradients = {product.site.name for product in products}
        return Measurement(
            {name: rms for name, rms in joint.items() if name not in gradients},
            {name: rms for name, rms in joint.items() if name in gradients},
            outside,
            tuple(products),
        )

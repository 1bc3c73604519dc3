"""The units of one module's products: measured, taken, and kept from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lightning_unitscale.dispatch.measured import Measurement, Measurements
from lightning_unitscale.dispatch.scaling import smallest_and_rms
from lightning_unitscale.dispatch.sites import Site, Sites
from lightning_unitscale.transforms.gauge import (
    MAX_LOG2_GAMMA,
    MAX_LOG2_SIGMA,
    Gauge,
    GaugePair,
    nearest_exponent,
)


class SessionUnits:
    """The units of the products of a module's steps.

    Args:
        sites: The products.
        uses_units: Whether they run in units at all.
        needs_units_at_once: Whether a product needs its units in the run that measures them.

    Attributes:
        is_looking: Whether the steps measure what has units already, for :meth:`take`.
        measurements: What products measure until :meth:`take`.
    """

    def __init__(self, sites: Sites, *, uses_units: bool, needs_units_at_once: bool) -> None:
        self.uses_units = uses_units
        self.is_looking = False
        self.measurements = Measurements()
        self._needs_units_at_once = needs_units_at_once
        self._sites = sites
        self._gauge = Gauge()
        self._plain: dict[str, dict[str, str]] = {}

    @property
    def module(self) -> nn.Module | None:
        """The module, while somebody has it."""
        return self._sites.module

    @property
    def gauge(self) -> Gauge:
        """The units in force."""
        measured: dict[str, GaugePair] = {}
        for site in self._sites.all.values():
            # What rounds takes units as it measures them; see below.
            if site.log2_units is not None:
                pairs = zip(site.operand_names, site.log2_units, strict=True)
                measured |= {name: GaugePair(log2_sigma=unit) for name, unit in pairs}
            if site.log2_gamma is not None:
                measured[site.name] = GaugePair(log2_gamma=site.log2_gamma)
        return self._gauge.updated(measured)

    def settle(self) -> None:
        """Take the units of what was measured and nobody has taken."""
        measurement = self.take()
        if measurement is not None:
            self.adopt(measurement.forward, measurement.backward, measurement)

    def take(self) -> Measurement | None:
        """What was measured since the last call, with one transfer from the device."""
        return self.measurements.take()

    def set_gauge(self, gauge: Gauge) -> None:
        """Put units into force from the next product on."""
        self._gauge = gauge
        for site in self._sites.all.values():
            self._set_units(site)

    def adopt(
        self, forward: Mapping[str, float], backward: Mapping[str, float], measurement: Measurement
    ) -> None:
        """Take the units of measured tensors, and leave out products in which they are not exact.

        Args:
            forward: RMS of operands, of all ranks.
            backward: RMS of gradients, of all ranks.
            measurement: What this rank has measured.
        """
        new = {
            name: GaugePair(log2_sigma=nearest_exponent(rms, MAX_LOG2_SIGMA))
            for name, rms in forward.items()
        }
        new |= {
            name: GaugePair(log2_gamma=nearest_exponent(rms, MAX_LOG2_GAMMA))
            for name, rms in backward.items()
        }
        self.set_gauge(self._gauge.updated(new))
        self.judge(measurement)

    def judge(self, measurement: Measurement) -> None:
        """Run products plain in which powers of two are not exact in the units in force."""
        for product in measurement.products:
            pairs = [self._gauge.pair(name) for name in product.names]
            # An operand's pair has no gamma, and a gradient's no sigma.
            reason = product.why_plain([pair.log2_sigma + pair.log2_gamma for pair in pairs])
            if reason:
                product.site.plain[product.slot] = reason
            else:
                product.site.plain.pop(product.slot, None)

    def plain_products(self) -> dict[str, dict[str, str]]:
        """By site, which of its products run as they are, and why."""
        plain = {**self._plain, **{name: site.plain for name, site in self._sites.all.items()}}
        return {name: dict(slots) for name, slots in plain.items() if slots}

    def set_plain_products(self, plain: dict[str, dict[str, str]]) -> None:
        """Go on from :meth:`plain_products`."""
        self._plain = {name: dict(slots) for name, slots in plain.items()}
        for site in self._sites.all.values():
            site.plain = dict(self._plain.get(site.name, {}))

    def _measure(
        self,
        site: Site,
        slot: str,
        names: tuple[str, ...],
        operands: Sequence[Tensor],
        units: tuple[int | None, ...],
        stats: tuple[Tensor | None, ...],
        addends: Sequence[Tensor],
    ) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
        """Measure the operands of a product.

        Args:
            site: Which product of the step.
            slot: Which product of the site.
            names: Of the operands in the gauge.
            operands: The operands.
            units: Their units, as far as they are known.
            stats: What was measured of them before in this step.
            addends: What is added to the product.

        Returns:
            Units in which to run the product, and what was measured. What rounds needs units now;
            without them the first step has the same bits, and the device need not be waited for.
        """
        rows = tuple(
            smallest_and_rms(tensor) if row is None else row
            for tensor, row in zip(operands, stats, strict=True)
        )
        added = tuple(smallest_and_rms(tensor) for tensor in addends)
        self.measurements.add(site, slot, names, rows, added, units, operands[0].dtype)
        if self._needs_units_at_once and None in units:
            found = [
                float(row[0]) if unit is None else 0.0
                for row, unit in zip(rows, units, strict=True)
            ]
            units = tuple(
                nearest_exponent(rms, MAX_LOG2_SIGMA) if unit is None else unit
                for rms, unit in zip(found, units, strict=True)
            )
        return tuple(unit or 0 for unit in units), rows

    def _start(self, site: Site) -> None:
        self._set_units(site)
        site.plain = dict(self._plain.get(site.name, {}))

    def _set_units(self, site: Site) -> None:
        if not self.uses_units:
            site.log2_units, site.log2_gamma = (0,) * len(site.roles), 0
            return
        pairs = self._gauge.pairs
        operands = [pairs.get(name) for name in site.operand_names]
        known = [pair.log2_sigma for pair in operands if pair is not None]
        site.log2_units = tuple(known) if len(known) == len(site.roles) else None
        gradient = pairs.get(site.name)
        site.log2_gamma = None if gradient is None else gradient.log2_gamma

"""The units of one module's products: measured, and in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_unitscale.dispatch.measurement import MeasuredProduct, Measurement, Site
from lightning_unitscale.dispatch.tensors import reading
from lightning_unitscale.lossless.gauge import Gauge


class Units:
    """The units in force of a module's products; they outlive the session that runs these.

    Args:
        is_used: Whether products run in units at all; if not, all units are 1.

    Attributes:
        gauge: The units in force, by the names of operands and products.
        plain: By site, which of its products run as they are, and why.
        step: How many training steps have begun.
        is_looking: Whether the steps measure what has units already, for :meth:`take`.
        sites: The products that have run, by name; each knows its own units.
    """

    def __init__(self, *, is_used: bool = True) -> None:
        self.is_used = is_used
        self.gauge = Gauge()
        self.plain: dict[str, dict[str, str]] = {}
        self.step = 0
        self.is_looking = False
        self.sites: dict[str, Site] = {}
        self._measured: list[MeasuredProduct] = []

    def set_gauge(self, gauge: Gauge) -> None:
        """Put units into force from the next product on."""
        self.gauge = gauge
        for site in self.sites.values():
            self._tell(site)

    def restore(self, gauge: Gauge, plain: Mapping[str, Mapping[str, str]]) -> None:
        """Go on from what was in force, and from what ran plain in it."""
        self.plain = {name: dict(slots) for name, slots in plain.items()}
        self.set_gauge(gauge)

    def add_site(self, site: Site) -> None:
        """Tell a product that runs for the first time what is known of it."""
        self.sites[site.name] = site
        self._tell(site)

    def _tell(self, site: Site) -> None:
        site.plain = self.plain.setdefault(site.name, {})
        if not self.is_used:
            site.log2_units, site.log2_gamma = (0,) * len(site.roles), 0
            return
        pairs = self.gauge.pairs
        operands = [pairs.get(name) for name in site.operand_names]
        known = [pair.log2_sigma for pair in operands if pair is not None]
        site.log2_units = tuple(known) if len(known) == len(site.roles) else None
        gradient = pairs.get(site.name)
        site.log2_gamma = None if gradient is None else gradient.log2_gamma

    def begin_step(self, *, is_training: bool) -> None:
        """Put into force what nobody has taken of the steps so far."""
        self.step += is_training
        if not self.is_looking:
            # Who looks takes what accumulated batches have shown together, and for all ranks.
            self.settle()
        for site in self.sites.values():
            site.is_settled = site.log2_units is not None and site.log2_gamma is not None

    def note(self, product: MeasuredProduct, *, takes_units: bool) -> tuple[int, ...]:
        """Note what was measured of a product, for :meth:`take`.

        Args:
            product: The product.
            takes_units: Whether it takes its units at once. What rounds has to; without units the
                first step has the same bits, and the device need not be waited for.

        Returns:
            Exponents of the units in which to run it.
        """
        self._measured.append(product)
        if not takes_units:
            return tuple(unit or 0 for unit in product.log2_units)
        operands = list(zip(product.names, product.extents, product.log2_units, strict=True))
        reading(extent for _, extent, unit in operands if unit is None)()
        new = {name: extent.rms for name, extent, unit in operands if unit is None}
        gradient = {name: new.pop(name) for name in [product.site.name] if name in new}
        taken = Gauge.of_rms(new, gradient)
        self.gauge = self.gauge.updated(taken)
        # An operand's pair has no gamma, and a gradient's no sigma.
        exponents = {name: pair.log2_sigma + pair.log2_gamma for name, pair in taken.items()}
        return tuple(exponents[name] if unit is None else unit for name, _, unit in operands)

    def clear(self) -> None:
        """Forget the products that ran, and what was measured of them."""
        self.sites.clear()
        self._measured.clear()
        self.is_looking = False

    def send(self) -> Callable[[], Measurement]:
        """Send for what was measured since the last call; what is returned waits for it."""
        products, self._measured = self._measured, []
        read = reading(extent for each in products for extent in (*each.extents, *each.addends))

        def arrived() -> Measurement:
            read()
            return Measurement.of_products(products)

        return arrived

    def take(self) -> Measurement:
        """What was measured since the last call."""
        return self.send()()

    def settle(self) -> None:
        """Take the units of what was measured and nobody has taken."""
        if self._measured:
            self.adopt(self.take())

    def adopt(self, measurement: Measurement) -> None:
        """Take the units of measured tensors, and leave out products in which they are not exact.

        Args:
            measurement: The products of this rank, with the RMS that all ranks have measured.
        """
        measured = Gauge.of_rms(measurement.forward, measurement.backward)
        self.set_gauge(self.gauge.updated(measured))
        self.judge(measurement)

    def judge(self, measurement: Measurement) -> None:
        """Run products plain in which powers of two are not exact in the units in force."""
        for product in measurement.products:
            pairs = [self.gauge.pair(name) for name in product.names]
            # An operand's pair has no gamma, and a gradient's no sigma.
            exponents = [pair.log2_sigma + pair.log2_gamma for pair in pairs]
            if reason := product.why_inexact(exponents):
                product.site.plain[product.slot] = reason
            else:
                product.site.plain.pop(product.slot, None)

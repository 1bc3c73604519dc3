"""The units of one module's products: measured, and in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from lightning_unitscale.dispatch.measurement import (
    Extent,
    MeasuredProduct,
    Measurement,
    Site,
    reading,
)
from lightning_unitscale.lossless.gauge import Gauge


class Units:
    """The units in force of a module's products; they outlive the session that runs these."""

    # An operand that is all zero, empty or not finite gives no unit. It is measured again in each
    # step until it gives one. These numbers come by :meth:`receive`, which waits for no device.

    def __init__(self, *, is_used: bool = True) -> None:
        self.is_used = is_used
        self.gauge = Gauge()  # the units in force, by the names of operands and products
        # By site, which of its products run as they are, and why.
        self.plain: dict[str, dict[str, str]] = {}
        # How many training steps have begun, and which microbatch of the step runs.
        self.step = self.part = self._num_more = 0
        self._is_training = False
        # Whether the steps measure what has units already, for :meth:`take`.
        self.is_looking = False
        # The products that have run, by name; each knows its own units.
        self.sites: dict[str, Site] = {}
        # Names of operands and gradients that were measured and have no unit yet, with what
        # to call them.
        self.lacking: dict[str, str] = {}
        self._measured: list[MeasuredProduct] = []
        # What was sent for, and by slot and names what has arrived and gives new units.
        self._sent: Callable[[], Measurement] | None = None
        self._arrived: dict[tuple[str, ...], MeasuredProduct] = {}

    def set_gauge(self, gauge: Gauge) -> None:
        """Put units into force from the next product on."""
        self.gauge = gauge
        self.lacking = {name: text for name, text in self.lacking.items() if name not in gauge}
        for site in self.sites.values():
            before = site.log2_units, site.log2_gamma
            self._tell(site)
            if before != (site.log2_units, site.log2_gamma):
                self._judge(site)

    def restore(
        self,
        gauge: Gauge,
        plain: Mapping[str, Mapping[str, str]],
        lacking: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Go on from what was in force, from what ran plain in it, and what had no unit yet."""
        self.plain = {name: dict(slots) for name, slots in plain.items()}
        self.lacking = dict(lacking)
        self.set_gauge(gauge)

    def add_site(self, site: Site) -> None:
        """Tell a product that runs for the first time what is known of it."""
        self.sites[site.name] = site
        self._tell(site)

    def _tell(self, site: Site) -> None:
        site.plain, site.product = self.plain.setdefault(site.name, {}), None
        if not self.is_used:
            site.log2_units, site.log2_gamma = (0,) * len(site.roles), 0
            return
        pairs = self.gauge.pairs
        operands = [pairs.get(name) for name in site.operand_names]
        site.log2_units = tuple(None if pair is None else pair.log2_sigma for pair in operands)
        gradient = pairs.get(site.name)
        site.log2_gamma = None if gradient is None else gradient.log2_gamma

    def begin_step(self, *, is_training: bool) -> None:
        """Note which sites have all of their units in this step."""
        # Each microbatch of the step before was one of its own.
        self.step += self._num_more + is_training
        self.part = self._num_more = 0
        self._is_training = is_training
        for site in self.sites.values():
            site.is_settled = None not in site.log2_units and site.log2_gamma is not None

    def begin_part(self, index: int) -> None:
        """Begin a microbatch of a step, which rounds as a step of its own does."""
        self.part = index
        if self._is_training:
            self._num_more = max(self._num_more, index)

    @property
    def rounding_step(self) -> int:
        """Number of the step, or of the microbatch, that random numbers are drawn for."""
        return self.step + self.part

    def measure(
        self,
        site: Site,
        slot: str,
        names: Sequence[str],
        known: Sequence[int | None],
        dtype: torch.dtype,
        extent_of: Callable[[int], Extent],
        num_addends: int,
    ) -> MeasuredProduct:
        """Measure operands and the addends after them, for :meth:`take` or :meth:`receive`."""
        # The first time, and in a look, all are measured. At other times operands without a unit
        # are, so that one that stays zero costs a row in each step.
        is_whole = self.is_looking or slot not in site.seen
        chosen = [index for index, unit in enumerate(known) if is_whole or unit is None]
        addends = range(len(known), len(known) + num_addends) if is_whole else ()
        product = MeasuredProduct(
            site,
            slot,
            tuple(names[index] for index in chosen),
            tuple(map(extent_of, chosen)),
            tuple(map(extent_of, addends)),
            dtype,
            tuple(known[index] for index in chosen),
            is_whole,
        )
        self._measured.append(product)
        if is_whole:
            site.seen[slot] = product
        return product

    def take_at_once(self, product: MeasuredProduct) -> tuple[int | None, ...]:
        """Wait for what was measured of a product, and put its units into force."""
        operands = list(zip(product.names, product.extents, product.log2_units, strict=True))
        new_ones = {
            name: extent
            for name, extent, unit in operands
            if unit is None and name not in self.lacking
        }
        reading(new_ones.values())()
        new = {name: extent.rms for name, extent in new_ones.items() if extent.gives_unit}
        gradient = {name: new.pop(name) for name in [product.site.name] if name in new}
        taken = Gauge.of_rms(new, gradient)
        self.gauge = self.gauge.updated(taken)
        self._tell(product.site)
        # An operand's pair has no gamma, and a gradient's no sigma.
        exponents = {name: pair.log2_sigma + pair.log2_gamma for name, pair in taken.items()}
        return tuple(exponents.get(name) if unit is None else unit for name, _, unit in operands)

    def clear(self) -> None:
        """Forget the products that ran, and what was measured of them."""
        self.sites.clear()
        self._measured.clear()
        self._sent = None
        self._arrived.clear()
        self.is_looking = False

    def send(self) -> Callable[[], Measurement]:
        """Send for what was measured since the last call; what is returned waits for it."""
        products, self._measured = self._measured, []
        read = reading(extent for each in products for extent in (*each.extents, *each.addends))

        def arrived() -> Measurement:
            read()
            for product in products:
                self._remember(product)
            return Measurement.of_products(products)

        return arrived

    def _remember(self, product: MeasuredProduct) -> None:
        latest = product.site.latest
        for name, extent in zip(product.names, product.extents, strict=True):
            if extent.largest > 0.0:
                latest[name] = extent
            if not extent.gives_unit and name not in self.gauge:
                self._lack(product.site, name)

    def note_empty(self, site: Site) -> None:
        """Note that a matmul has run on empty matrices: its units come late."""
        for name in (*site.operand_names, site.name):
            if name not in self.gauge:
                self._lack(site, name)

    def _lack(self, site: Site, name: str) -> None:
        self.lacking[name] = f"the gradient at {name}" if name == site.name else name

    def take(self) -> Measurement:
        """What was measured since the last call."""
        return self.send()()

    def receive(self) -> None:
        """Receive what was sent for in the last call, and send for what was measured since."""
        # It waits for no device: from CUDA, numbers arrive one call after they were sent, whether
        # they are there before or not; from elsewhere at once.
        sent, self._sent = self._sent, None
        if sent is not None:
            self._keep(sent())
        if not self._measured:
            return
        rows = [extent.row for product in self._measured for extent in product.extents]
        is_late = any(row is not None and row.device.type == "cuda" for row in rows)
        arrived = self.send()
        if is_late:
            self._sent = arrived
        else:
            self._keep(arrived())

    def _keep(self, measurement: Measurement) -> None:
        for product in measurement.products:
            operands = zip(product.extents, product.log2_units, strict=True)
            if any(extent.gives_unit and unit is None for extent, unit in operands):
                # One for each, however many steps an evaluation has.
                self._arrived[product.slot, *product.names] = product
            elif product.is_whole:
                self._judge(product.site)

    @property
    def has_received(self) -> bool:
        """Whether something has arrived since the last call of :meth:`received`."""
        return bool(self._arrived)

    def received(self) -> Measurement:
        """What has arrived since the last call, of what had no unit when it was measured."""
        products, self._arrived = list(self._arrived.values()), {}
        return Measurement.of_products(products)

    def settle(self) -> None:
        """Wait for all that was measured, and take the units of what has none."""
        self.receive()
        self.receive()
        self.adopt(self.new_in(self.received()))

    def adopt(self, measurement: Measurement) -> list[str]:
        """Take the units of measured tensors; leave out products in which they are inexact."""
        measured = Gauge.of_rms(measurement.forward, measurement.backward)
        late = [name for name in measured if name in self.lacking]
        if measured:
            self.set_gauge(self.gauge.updated(measured))
        self.judge(measurement)
        return late

    def new_in(self, measurement: Measurement) -> Measurement:
        """The part of a measurement that is of tensors without a unit."""
        forward, backward = (
            {name: rms for name, rms in sizes.items() if name not in self.gauge}
            for sizes in (measurement.forward, measurement.backward)
        )
        return replace(measurement, forward=forward, backward=backward)

    def judge(self, measurement: Measurement) -> None:
        """Run products plain in which powers of two are not exact in the units in force."""
        for site in {id(product.site): product.site for product in measurement.products}.values():
            self._judge(site)

    def _judge(self, site: Site) -> None:
        for slot, product in site.seen.items():
            pairs = [self.gauge.pair(name) for name in product.names]
            # An operand's pair has no gamma, and a gradient's no sigma.
            exponents = [pair.log2_sigma + pair.log2_gamma for pair in pairs]
            # Only operands without a unit are measured in each step; the others as they were.
            extents = tuple(site.latest.get(name, Extent()) for name in product.names)
            if reason := replace(product, extents=extents).why_inexact(exponents):
                site.plain[slot] = reason
            else:
                site.plain.pop(slot, None)

"""The units of one module's products: measured, and in force."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lightning_unitscale.dispatch.exactness import why_inexact
from lightning_unitscale.dispatch.tensors import Extent, reading
from lightning_unitscale.lossless.calibrate import combined_rms
from lightning_unitscale.lossless.drift import HIGH, LOW
from lightning_unitscale.lossless.gauge import Gauge

# Where a product runs beside the slots of its operands' gradients.
FORWARD = "forward"


@dataclass(eq=False, slots=True)
class Site:
    """One product of a module's step, with the units of what it reads.

    Attributes:
        name: Such as ``blocks.0.up.linear``, with ``_1``, ``_2`` for further calls.
        module: Path of the module that runs it.
        roles: What its operands are called.
        word: What the operation is called.
        index: How many like it run before it in a call of the module.
        operand_names: Their names in the gauge.
        log2_units: Exponents of the units of its operands; ``None`` while nobody has measured.
        log2_gamma: Exponent of the unit of the arriving gradient.
        plain: Which of its products run as they are, and why: ``"forward"``, or a backward one.
        is_settled: Whether all of its units were known when the step began.
    """

    name: str
    module: str
    roles: tuple[str, ...]
    word: str = ""
    index: int = 0
    operand_names: tuple[str, ...] = ()
    log2_units: tuple[int, ...] | None = None
    log2_gamma: int | None = None
    plain: dict[str, str] = field(default_factory=dict)
    is_settled: bool = False

    def __post_init__(self) -> None:
        self.operand_names = tuple(f"{self.name}:{role}" for role in self.roles)

    def names_of(self, sources: tuple[int | None, ...]) -> tuple[str, ...]:
        """Names in the gauge of what a backward product reads; that of the product for ``None``."""
        return tuple(self.name if k is None else self.operand_names[k] for k in sources)


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
        log2_units: Exponents of the units that its operands had, ``None`` where they had none.
    """

    site: Site
    slot: str
    names: tuple[str, ...]
    extents: tuple[Extent, ...]
    addends: tuple[Extent, ...]
    dtype: torch.dtype
    log2_units: tuple[int | None, ...]


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


class SentMeasurement:
    """What one step has shown, on its way from the device.

    Args:
        products: Product by product.
    """

    def __init__(self, products: Sequence[MeasuredProduct]) -> None:
        self._products = tuple(products)
        self._read = reading(
            extent for product in products for extent in (*product.extents, *product.addends)
        )

    def arrived(self) -> Measurement | None:
        """The numbers, which are waited for; ``None`` if nothing was measured."""
        products = self._products
        if not products:
            return None
        self._read()
        true: dict[str, dict[int, float]] = {}
        outside: dict[str, float] = {}
        for product in products:
            for name, extent, unit in zip(
                product.names, product.extents, product.log2_units, strict=True
            ):
                if not math.isfinite(extent.rms):
                    continue
                # One tensor read by several backward products is measured once.
                true.setdefault(name, {})[id(extent)] = extent.rms
                stored = 0.0 if unit is None else math.ldexp(extent.rms, -unit)
                if stored > 0.0 and not LOW <= stored <= HIGH:
                    outside[name] = stored
        joint = {name: combined_rms([*of_name.values()]) for name, of_name in true.items()}
        gradients = {product.site.name for product in products}
        return Measurement(
            {name: rms for name, rms in joint.items() if name not in gradients},
            {name: rms for name, rms in joint.items() if name in gradients},
            outside,
            products,
        )


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

    def send(self) -> SentMeasurement:
        """What was measured since the last call, on its way from the device as one."""
        products, self._measured = self._measured, []
        return SentMeasurement(products)

    def take(self) -> Measurement | None:
        """What was measured since the last call; ``None`` if nothing was."""
        return self.send().arrived()

    def settle(self) -> None:
        """Take the units of what was measured and nobody has taken."""
        if (measurement := self.take()) is not None:
            self.adopt(measurement)

    def adopt(
        self,
        measurement: Measurement,
        forward: Mapping[str, float] | None = None,
        backward: Mapping[str, float] | None = None,
    ) -> None:
        """Take the units of measured tensors, and leave out products in which they are not exact.

        Args:
            measurement: What this rank has measured.
            forward: RMS of operands of all ranks, where there are others.
            backward: RMS of gradients of all ranks.
        """
        forward = measurement.forward if forward is None else forward
        backward = measurement.backward if backward is None else backward
        self.set_gauge(self.gauge.updated(Gauge.of_rms(forward, backward)))
        self.judge(measurement)

    def judge(self, measurement: Measurement) -> None:
        """Run products plain in which powers of two are not exact in the units in force."""
        for product in measurement.products:
            pairs = [self.gauge.pair(name) for name in product.names]
            # An operand's pair has no gamma, and a gradient's no sigma.
            exponents = [pair.log2_sigma + pair.log2_gamma for pair in pairs]
            reason = why_inexact(product.extents, exponents, product.dtype, product.addends)
            if reason:
                product.site.plain[product.slot] = reason
            else:
                product.site.plain.pop(product.slot, None)

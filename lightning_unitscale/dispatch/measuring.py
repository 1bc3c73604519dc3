"""What is measured of a product's operands as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_unitscale.dispatch.calls import Extents
from lightning_unitscale.dispatch.execute import Product
from lightning_unitscale.dispatch.formats import Numerics
from lightning_unitscale.dispatch.measurement import MeasuredProduct
from lightning_unitscale.dispatch.tensors import Extent
from lightning_unitscale.dispatch.units import Units


@dataclass(frozen=True)
class Measuring:
    """Measures operands for units and for formats.

    Attributes:
        units: The units in force, and those to come.
        numerics: What rounds products, by precedence.
    """

    units: Units
    numerics: Sequence[Numerics]

    def measure(
        self,
        product: Product,
        args: Sequence[Any],
        known: tuple[int | None, ...],
        before: Extents,
    ) -> Extents:
        """Measure operands, and give them units at once where a format waits for them.

        The first time, and in a look, all operands are measured. At other times those without a
        unit are, so that one that stays zero costs a row in each step.
        """
        rule, site, slot = product.rule, product.site, product.slot
        operands, read = rule.operands_in(args), rule.measured_in(args)
        is_new = slot not in site.seen
        is_whole = is_new or self.units.is_looking
        extents: list[Extent | None] = list(before) or [None] * len(operands)
        chosen = [index for index, unit in enumerate(known) if is_whole or unit is None]
        measured = []
        for index in chosen:
            extent = extents[index]
            if extent is None:
                extent = extents[index] = Extent.of(read[index])
            measured.append(extent)
        noted = MeasuredProduct(
            site,
            slot,
            tuple(product.names[index] for index in chosen),
            tuple(measured),
            tuple(Extent.of(args[at]) for at in rule.addends_in(args)) if is_whole else (),
            operands[0].dtype,
            tuple(known[index] for index in chosen),
            is_whole,
        )
        self.units.note(noted)
        if not self.numerics:
            return tuple(extents)
        # No step waits for a unit that is late.
        is_first = is_new and not self.units.lacking.keys() >= _without(noted)
        if is_first:
            product.take(self.units.take_at_once(noted))
        if is_first or self.units.is_looking:
            for numerics in self.numerics:
                numerics.measure(product, operands, is_first=is_first)
        else:
            self.show(product, operands)
        return tuple(extents)

    def show(self, product: Product, operands: Sequence[Tensor]) -> None:
        """Show operands to formats that have not seen them in the units that they have now."""
        for numerics in self.numerics:
            if numerics.awaits(product.names):
                numerics.measure(product, operands, is_first=False)


def _without(product: MeasuredProduct) -> set[str]:
    """Names of the operands without a unit."""
    named = zip(product.names, product.log2_units, strict=True)
    return {name for name, unit in named if unit is None}

"""A product of a compiled graph, and the factors that it runs with in the units of a site."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lightning_unitscale.dispatch.compiled_runs import Place
from lightning_unitscale.dispatch.execute import combined
from lightning_unitscale.dispatch.measurement import Site
from lightning_unitscale.functional.scale import LARGEST_LOG2
from lightning_unitscale.graph.operators import ProductRule, Sources


@dataclass(eq=False)
class CompiledProduct:
    """A product of a compiled graph.

    Attributes:
        rule: Its operator.
        place: Where it, or the forward product that it belongs to, was when it was compiled.
        forward: Which product of the graph that forward product is: its own number for one that has
            a site of its own.
        slot: ``"forward"``, or which gradient it makes.
        sources: For each operand which forward operand it is; ``None``: the arriving gradient.
        flops: Its floating-point operations.
        dtype: Type of its operands.
        number: Which product of the graph it is.
        start: Where its factors begin among those of the graph.
        is_scaled: Whether it runs in units since the graph of both passes was rewritten.
        kin: The products of its graph that are of its site, itself included.
    """

    rule: ProductRule
    place: Place
    forward: int
    slot: str
    sources: Sources
    flops: int
    dtype: torch.dtype
    number: int = 0
    start: int = 0
    is_scaled: bool = False
    kin: list[CompiledProduct] = field(default_factory=list)

    @property
    def num_factors(self) -> int:
        """One for each operand, one for addends, one for each result, and back for a gradient."""
        return len(self.sources) + 1 + len(self.rule.results) + (None in self.sources)

    @property
    def names(self) -> tuple[tuple[int, int | None], ...]:
        """What tells the units of its operands apart within its graph."""
        return tuple((self.forward, source) for source in self.sources)

    def stays(self, operand: int) -> bool:
        """Whether an operand has no unit.

        The temperature of an attention is a Python number in the graph: what it takes stays.
        """
        return self.rule.temperature is not None and self.rule.temperature[operand] != 0

    def known(self, site: Site) -> tuple[int | None, ...]:
        """Exponents of the units of its operands, ``None`` where nobody has measured."""
        return tuple(site.log2_gamma if k is None else site.log2_units[k] for k in self.sources)

    def why_plain(self, site: Site) -> str:
        """Why it runs plain in the units in force; empty where it does not.

        Products of a site read copies in common, so that all of them do or none.
        """
        reasons = list(site.plain.values())
        if any(
            abs(exponent) > LARGEST_LOG2 for kin in self.kin for exponent in kin._exponents(site)
        ):
            reasons.append(f"units that make 2**{LARGEST_LOG2} together, in a compiled graph")
        return reasons[0] if reasons else ""

    def exponents(self, site: Site) -> list[int]:
        """Exponents of its factors."""
        return [0] * self.num_factors if self.why_plain(site) else self._exponents(site)

    def _exponents(self, site: Site) -> list[int]:
        known = enumerate(self.known(site))
        units = tuple(0 if self.stays(index) else unit or 0 for index, unit in known)
        results = [combined(row, units) if row else 0 for row in self.rule.results]
        back = [units[index] for index, source in enumerate(self.sources) if source is None]
        return [*(-unit for unit in units), -sum(units), *results, *back]


@dataclass(frozen=True)
class PlainProduct:
    """A product of a compiled graph without units.

    Attributes:
        operator: Name of its operator.
        module: Path of its module.
        reason: Why it has none.
        flops: Its floating-point operations.
    """

    operator: str
    module: str
    reason: str
    flops: int


@dataclass(frozen=True)
class LookedAt:
    """A product that is looked at together with others.

    Attributes:
        index: Which product of its graph it is.
        reads: For each of its operands, and of what is added to it, which of the tensors that the
            look is given it is, and whether that is in units.
    """

    index: int
    reads: tuple[tuple[int, bool], ...]

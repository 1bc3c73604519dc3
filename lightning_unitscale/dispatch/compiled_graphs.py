"""Graphs that Inductor has compiled with units around their products, while they run.

The units of a graph's products are numbers in one tensor, which an operator without inputs gives to
the graph whenever it runs: Inductor cannot fold it, and new units compile nothing. It is saved for
the backward pass, some of whose operands were divided by the units of the forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.dispatch.compiled_callers import Callers
from lightning_unitscale.dispatch.coverage import CoverageCounter, Kind
from lightning_unitscale.dispatch.execute import combined
from lightning_unitscale.dispatch.measurement import MeasuredProduct, Site
from lightning_unitscale.dispatch.products import ProductRule, Sources
from lightning_unitscale.dispatch.session import LOCAL, ProductSession
from lightning_unitscale.dispatch.tensors import Extent
from lightning_unitscale.dispatch.torch_internals import define_operator
from lightning_unitscale.patching import nothing
from lightning_unitscale.scales.transfer import numbers_on

# Beyond it a factor, or its inverse, is no normal number of FP32, in which it is held.
_LARGEST = 126


@dataclass(eq=False)
class CompiledProduct:
    """A product of a compiled graph.

    Attributes:
        rule: Its operator.
        site: Which product of the step it is, or the backward product of.
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
    site: Site
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

    def stays(self, operand: int) -> bool:
        """Whether an operand has no unit.

        The temperature of an attention is a Python number in the graph: what it takes stays.
        """
        return self.rule.temperature is not None and self.rule.temperature[operand] != 0

    def known(self) -> tuple[int | None, ...]:
        """Exponents of the units of its operands, ``None`` where nobody has measured."""
        site = self.site
        return tuple(site.log2_gamma if k is None else site.log2_units[k] for k in self.sources)

    def units(self) -> tuple[int, ...]:
        """Exponents of what its operands are divided by, unless it runs plain."""
        return tuple(
            0 if self.stays(index) else unit or 0 for index, unit in enumerate(self.known())
        )

    def why_plain(self) -> str:
        """Why it runs plain in the units in force; empty where it does not.

        Products of a site read copies in common, so that all of them do or none.
        """
        reasons = list(self.site.plain.values())
        if any(abs(exponent) > _LARGEST for kin in self.kin for exponent in kin._exponents()):
            reasons.append(f"units that make 2**{_LARGEST} together, in a compiled graph")
        return reasons[0] if reasons else ""

    def exponents(self) -> list[int]:
        """Exponents of its factors."""
        return [0] * self.num_factors if self.why_plain() else self._exponents()

    def _exponents(self) -> list[int]:
        units = self.units()
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


class CompiledGraph:
    """The products of one compiled graph, with the factors that they run with.

    Args:
        session: Whose products they are.

    Attributes:
        products: The products.
        num_factors: Number of all factors.
        looks: The products that are looked at together.
        callers: What calls it.
    """

    def __init__(self, session: ProductSession) -> None:
        self.products: list[CompiledProduct | PlainProduct] = []
        self.num_factors = 0
        self._of_site: dict[str, list[CompiledProduct]] = {}
        self._session: ProductSession | None = session
        module = session.sites.module
        assert module is not None, "it is running"
        self._module: weakref.ref[nn.Module] = weakref.ref(module)
        # By device: the factors, and the exponents that were written there.
        self._factors: dict[torch.device, tuple[Tensor, list[int]]] = {}
        # Those of the last run, and what they were made of.
        self._exponents: list[int] = []
        self._known: list[tuple[Any, ...]] | None = []
        self.looks: list[tuple[LookedAt, ...]] = []
        self.callers = Callers()

    def add(self, product: CompiledProduct | PlainProduct) -> None:
        """Add a product, which comes last."""
        if isinstance(product, CompiledProduct):
            product.number, product.start = len(self.products), self.num_factors
            product.kin = self._of_site.setdefault(product.site.name, [])
            product.kin.append(product)
            self.num_factors += product.num_factors
        self.products.append(product)

    def _in_units(self) -> list[CompiledProduct]:
        return [product for product in self.products if isinstance(product, CompiledProduct)]

    def session(self) -> ProductSession | None:
        """Whose products they are now; ``None`` once the session has closed."""
        current = LOCAL.session
        is_new = current is not None and current is not self._session
        if current is not None and is_new and current.sites.module is self._module():
            # Compiled in an earlier run of the same module's.
            for product in self._in_units():
                old = product.site
                product.site = current.sites.numbered(old.word, old.roles, old.module, old.index)
            self._session = current
        if self._session is not None and not self._session.is_open:
            self._session = None
        return self._session

    def begin(self) -> None:
        """Take the units in force for a forward pass, and for what comes of it."""
        known = None
        if self.session() is not None:
            sites = [products[0].site for products in self._of_site.values()]
            known = [(site.log2_units, site.log2_gamma, *site.plain.values()) for site in sites]
        if known != self._known:
            self._known = known
            self._exponents = [0] * self.num_factors
            if known is not None:
                self._exponents = [e for product in self._in_units() for e in product.exponents()]

    def factors(self, device: torch.device) -> Tensor:
        """All factors of the graph, FP32 of shape ``(factors,)``: 1 where there is no session.

        They stay at one address of each device, and new ones are written there.
        """
        self.begin()
        exponents = self._exponents
        factors, written = self._factors.get(device, (None, None))
        if factors is None or exponents != written:
            # An evaluation may come first, whose tensors no training could write into.
            with torch.inference_mode(False):
                values = numbers_on(device, [2.0**e for e in exponents], torch.float32)
                factors = values if factors is None else factors.copy_(values)
            self._factors[device] = factors, exponents
        return factors

    def parts(self, factors: Tensor, products: Sequence[int]) -> list[Tensor]:
        """The factors of some products, each with memory of their own.

        Where a factor stands is a part of a kernel's code: kernels of equal layers are one so.

        Args:
            factors: All factors of the graph.
            products: The numbers of the products.

        Returns:
            FP32 tensors of shape ``(factors,)``, in the order of the products.
        """
        if not products:
            return []
        between = [
            product
            for product in self.products[min(products) : max(products) + 1]
            if isinstance(product, CompiledProduct)
        ]
        sizes = [product.num_factors for product in between]
        parts = [factors.new_empty(size) for size in sizes]
        torch.split_with_sizes_copy(
            factors.narrow(0, between[0].start, sum(sizes)), sizes, out=parts
        )
        of_number = {product.number: part for product, part in zip(between, parts, strict=True)}
        return [of_number[number] for number in products]

    def add_look(self, products: Sequence[LookedAt]) -> int:
        """Let products be looked at together; returns the number of the look."""
        self.looks.append(tuple(products))
        return len(self.looks) - 1

    def look(self, tensors: Sequence[Tensor], index: int) -> None:
        """Count products, and measure their operands and what is added to them.

        Args:
            tensors: The operands, and what is added.
            index: Which look it is.
        """
        session = self._session
        if session is None or not session.is_open:
            return
        # By which tensor it is, and in which unit.
        extents: dict[tuple[int, int], Extent] = {}
        for looked_at in self.looks[index]:
            product = self.products[looked_at.index]
            if session.counter is not None:
                _count(session.counter, product, is_left=bool(session.numerics))
            if isinstance(product, PlainProduct):
                continue
            known = product.known()
            if None in known or session.units.is_looking:
                self._measure(session, product, known, looked_at, tensors, extents)

    def _measure(
        self,
        session: ProductSession,
        product: CompiledProduct,
        known: tuple[int | None, ...],
        looked_at: LookedAt,
        tensors: Sequence[Tensor],
        extents: dict[tuple[int, int], Extent],
    ) -> None:
        count, site = len(known), product.site
        is_whole = session.units.is_looking or product.slot not in site.seen
        # As they were when the forward pass began, like the factors.
        *units, common = (-exponent for exponent in self._exponents[product.start :][: count + 1])
        units += [common] * (len(looked_at.reads) - count)
        names = site.names_of(product.sources)
        chosen = [k for k in range(len(units)) if is_whole or (k < count and known[k] is None)]
        measured = []
        for index in chosen:
            which, in_units = looked_at.reads[index]
            key = which, units[index] if in_units else 0
            if key not in extents:
                extents[key] = Extent.of(tensors[which], key[1])
            measured.append(extents[key])
        operands = [index for index in chosen if index < count]
        session.units.note(
            MeasuredProduct(
                site,
                product.slot,
                tuple(names[index] for index in operands),
                tuple(measured[: len(operands)]),
                tuple(measured[len(operands) :]),
                product.dtype,
                tuple(known[index] for index in operands),
                is_whole,
            )
        )


def _count(
    counter: CoverageCounter, product: CompiledProduct | PlainProduct, *, is_left: bool
) -> None:
    if isinstance(product, PlainProduct):
        counter.add(product.module, "plain", product.reason, product.flops)
        return
    # What was compiled for units alone is not rounded.
    reason = COMPILED_BEFORE if is_left else product.why_plain()
    kind: Kind = "plain" if reason else "units"
    counter.add(product.site.module, kind, reason, product.flops)


GRAPHS: list[CompiledGraph] = []
COMPILED_BEFORE = "compiled before this callback was attached"


def _factors(index: int, device: torch.device, is_backward: bool) -> Tensor:
    GRAPHS[index].callers.note(is_backward=is_backward)
    # Inductor may write other results into what an operator has made, when it is read no more.
    return GRAPHS[index].factors(device).clone()


def _parts(
    factors: Tensor, gradient: Tensor | None, index: int, products: list[int]
) -> list[Tensor]:
    GRAPHS[index].callers.note(is_backward=gradient is not None)
    return GRAPHS[index].parts(factors, products)


def _order(index: int, device: torch.device, is_backward: bool) -> Tensor:
    graph = GRAPHS[index]
    # Products may be looked at before any of them reads a factor.
    graph.session() if is_backward else graph.begin()
    graph.callers.note(is_backward=is_backward)
    return torch.zeros(1, device=device)


define_operator(
    "compiled_factors(int graph, Device device, bool is_backward) -> Tensor",
    _factors,
    lambda graph, device, is_backward: torch.empty(GRAPHS[graph].num_factors, device=device),
)
define_operator(
    # It reads no gradient: it is told of one so that it belongs to the backward pass.
    "parts_of_factors(Tensor factors, Tensor? gradient, int graph, int[] products) -> Tensor[]",
    _parts,
    lambda factors, gradient, graph, products: GRAPHS[graph].parts(factors, products),
    torch.Tag.flexible_layout,
)
define_operator(
    "compiled_order(int graph, Device device, bool is_backward) -> Tensor",
    _order,
    lambda graph, device, is_backward: torch.empty(1, device=device),
)
define_operator(
    # It writes nothing: what is said to be written keeps Inductor from leaving it out.
    "look(Tensor[] tensors, Tensor(a!) order, int graph, int look) -> ()",
    lambda tensors, order, graph, look: GRAPHS[graph].look(tensors, look),
    nothing,
    torch.Tag.flexible_layout,
)

"""Graphs that Inductor has compiled with units around their products, while they run.

The units of a graph's products are numbers in one tensor, which an operator without inputs gives to
the graph whenever it runs: Inductor cannot fold it, and new units compile nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType

import torch
from torch import Tensor, nn

from lightning_unitscale.dispatch.calls import Sources
from lightning_unitscale.dispatch.coverage import CoverageCounter, Kind
from lightning_unitscale.dispatch.execute import combined
from lightning_unitscale.dispatch.measurement import MeasuredProduct, Site
from lightning_unitscale.dispatch.products import ProductRule
from lightning_unitscale.dispatch.session import LOCAL, ProductSession
from lightning_unitscale.dispatch.sites import frames
from lightning_unitscale.dispatch.tensors import Extent
from lightning_unitscale.dispatch.torch_internals import MODULE_CALL, codes, define_operator
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
        start: Where its factors begin among those of the graph.
        kin: The products of its graph that read copies in common, itself included.
    """

    rule: ProductRule
    site: Site
    slot: str
    sources: Sources
    flops: int
    dtype: torch.dtype
    start: int
    kin: list[CompiledProduct]

    @property
    def num_factors(self) -> int:
        """One for each operand, one for addends, one for each result."""
        return len(self.sources) + 1 + len(self.rule.results)

    def stays(self, operand: int) -> bool:
        """Whether an operand has no unit.

        The temperature of an attention is a Python number in the graph: what it takes stays.
        """
        return self.rule.temperature is not None and self.rule.temperature[operand] != 0

    def known(self) -> tuple[int | None, ...]:
        """Exponents of the units of its operands, ``None`` where nobody has measured."""
        site = self.site
        known = site.log2_units or (None,) * len(site.roles)
        return tuple(site.log2_gamma if k is None else known[k] for k in self.sources)

    def units(self) -> tuple[int, ...]:
        """Exponents of what its operands are divided by, unless it runs plain."""
        return tuple(
            0 if self.stays(index) else unit or 0 for index, unit in enumerate(self.known())
        )

    def why_plain(self) -> str:
        """Why it runs plain in the units in force; empty where it does not."""
        return next(filter(None, (product._why_plain() for product in self.kin)), "")

    def _why_plain(self) -> str:
        if reason := self.site.plain.get(self.slot, ""):
            return reason
        if any(abs(exponent) > _LARGEST for exponent in self._exponents()):
            return f"units that make 2**{_LARGEST} together, in a compiled graph"
        return ""

    def exponents(self) -> list[int]:
        """Exponents of its factors."""
        return [0] * self.num_factors if self.why_plain() else self._exponents()

    def _exponents(self) -> list[int]:
        units = self.units()
        results = [combined(row, units) if row else 0 for row in self.rule.results]
        return [*(-unit for unit in units), -sum(units), *results]


class CompiledGraph:
    """The products of one compiled graph, with the factors that they run with.

    Args:
        session: Whose products they are.

    Attributes:
        products: The products whose operands have factors.
        unreached: Module, reason and floating-point operations of the others.
    """

    def __init__(self, session: ProductSession) -> None:
        self.products: list[CompiledProduct] = []
        self.unreached: list[tuple[str, str, int]] = []
        self._session: ProductSession | None = session
        module = session.sites.module
        assert module is not None, "it is running"
        self._module: weakref.ref[nn.Module] = weakref.ref(module)
        # By device: the factors, and the exponents that were written there.
        self._factors: dict[torch.device, tuple[Tensor, list[int]]] = {}
        self._is_known = False

    @property
    def num_factors(self) -> int:
        """Of all products."""
        return sum(product.num_factors for product in self.products)

    def session(self) -> ProductSession | None:
        """Whose products they are now; ``None`` once the session has closed."""
        current = LOCAL.session
        is_new = current is not None and current is not self._session
        if current is not None and is_new and current.sites.module is self._module():
            # Compiled in an earlier run of the same module's.
            for product in self.products:
                old = product.site
                product.site = current.sites.numbered(old.word, old.roles, old.module, old.index)
            self._session = current
        if self._session is not None and not self._session.is_open:
            self._session = None
        return self._session

    def factors(self, device: torch.device) -> Tensor:
        """All factors of the graph, FP32 of shape ``(factors,)``: 1 where there is no session.

        They stay at one address of each device, and new ones are written there.
        """
        session = self.session()
        if session is None:
            exponents = [0] * self.num_factors
        else:
            exponents = [e for product in self.products for e in product.exponents()]
            if session.counter is not None:
                self._count(session.counter, is_left=bool(session.numerics))
        factors, written = self._factors.get(device, (None, None))
        if factors is None or exponents != written:
            # An evaluation may come first, whose tensors no training could write into.
            with torch.inference_mode(False):
                values = numbers_on(device, [2.0**e for e in exponents], torch.float32)
                factors = values if factors is None else factors.copy_(values)
            self._factors[device] = factors, exponents
        if not self._is_known:
            self._is_known = True
            mark_caller()
        return factors

    def look(self, tensors: Sequence[Tensor], index: int) -> None:
        """Measure the operands of a product, which are in their units, and what is added to it."""
        session, product = self._session, self.products[index]
        if session is None:
            return
        known = product.known()
        if None not in known and not session.units.is_looking:
            return
        units = (0,) * len(known) if product.why_plain() else product.units()
        count, common = len(units), sum(units)
        extents = tuple(
            Extent.of(tensor, unit)
            for tensor, unit in zip(tensors, (*units, *[common] * len(tensors)), strict=False)
        )
        session.units.note(
            MeasuredProduct(
                product.site,
                product.slot,
                product.site.names_of(product.sources),
                extents[:count],
                extents[count:],
                product.dtype,
                known,
            ),
            takes_units=False,
        )

    def _count(self, counter: CoverageCounter, *, is_left: bool) -> None:
        for product in self.products:
            # What was compiled for units alone is not rounded.
            reason = COMPILED_BEFORE if is_left else product.why_plain()
            kind: Kind = "plain" if reason else "units"
            counter.add(product.site.module, kind, reason, product.flops)
        for module, reason, flops in self.unreached:
            counter.add(module, "plain", reason, flops)


GRAPHS: list[CompiledGraph] = []
# Compiled graphs that are ours, by the address of what runs them.
_OURS: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()


# Callers whose products are not to be met again: a graph of ours has its units.
OWN_CALLERS = ("ours", "compiler")
COMPILED_BEFORE = "compiled before this callback was attached"


def caller() -> str | None:
    """Who of Inductor calls a kernel: ``"ours"``, ``"another"`` graph, or ``"compiler"``."""
    found = codes()
    frame = None if found is None else _calling_frame(found)
    if found is None or frame is None:
        return None
    if frame.f_code is found[1]:
        return "compiler"
    return "ours" if id(frame.f_locals["self"]) in _OURS else "another"


def mark_caller() -> None:
    """Let the compiled graph that calls be one of ours."""
    found = codes()
    frame = None if found is None else _calling_frame(found[:1])
    if frame is not None:
        graph = frame.f_locals["self"]
        _OURS[id(graph)] = graph


def _calling_frame(codes: tuple[CodeType, ...]) -> FrameType | None:
    """The innermost frame that runs one of these codes, unless a module is called before it."""
    for frame in frames():
        if frame.f_code in codes or frame.f_code is MODULE_CALL:
            return None if frame.f_code is MODULE_CALL else frame
    return None


define_operator(
    "compiled_factors(int graph, Device device) -> Tensor",
    # Inductor may write other results into what an operator has made, when it is read no more.
    lambda graph, device: GRAPHS[graph].factors(device).clone(),
    lambda graph, device: torch.empty(GRAPHS[graph].num_factors, device=device),
)
define_operator(
    "compiled_order(Device device) -> Tensor",
    lambda device: torch.zeros(1, device=device),
    lambda device: torch.empty(1, device=device),
)
define_operator(
    # It writes nothing: what is said to be written keeps Inductor from leaving it out.
    "look(Tensor[] operands, Tensor(a!) order, int graph, int product) -> ()",
    lambda operands, order, graph, product: GRAPHS[graph].look(operands, product),
    nothing,
    torch.Tag.flexible_layout,
)

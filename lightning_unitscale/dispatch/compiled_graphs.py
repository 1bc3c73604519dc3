"""Graphs that Inductor has compiled with units around their products, while they run.

The units of a graph's products are numbers in one tensor, which an operator without inputs gives to
the graph whenever it runs: Inductor cannot fold it, and new units compile nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_unitscale.dispatch.coverage import Kind
from lightning_unitscale.dispatch.inductor_internals import codes, frame_of
from lightning_unitscale.dispatch.products import Coefficients
from lightning_unitscale.dispatch.scaling import smallest_and_rms
from lightning_unitscale.dispatch.session import ProductSession
from lightning_unitscale.dispatch.sites import Site
from lightning_unitscale.dispatch.threads import LOCAL
from lightning_unitscale.dispatch.torch_internals import ENGINE, MODULE_CALL

# Beyond it a factor, or its inverse, is no normal number of FP32, in which it is held.
_LARGEST = 126
_LIBRARY = torch.library.Library("lightning_unitscale", "FRAGMENT")
_TAGS = (torch.Tag.cudagraph_unsafe,)
_LIBRARY.define("compiled_factors(int graph, Device device) -> Tensor", tags=_TAGS)
_LIBRARY.define("compiled_order(Device device) -> Tensor", tags=_TAGS)
# It writes nothing: what is said to be written keeps Inductor from leaving it out.
_LIBRARY.define(
    "look(Tensor[] operands, Tensor(a!) order, int graph, int product) -> ()",
    tags=(*_TAGS, torch.Tag.flexible_layout),
)


@dataclass(eq=False)
class CompiledProduct:
    """A product of a compiled graph.

    Attributes:
        site: Which product of the step it is, or the backward product of.
        identity: Its word, roles, module and occurrence, by which another session knows it.
        slot: ``"forward"``, or which gradient it makes.
        sources: For each operand which forward operand it is; ``None``: the arriving gradient.
        is_fixed: Which operands have no units: the temperature of attention is a Python number.
        results: Coefficients of each result.
        flops: Its floating-point operations.
        dtype: Type of its operands.
        reason: Why it runs plain whatever its units are; empty where it does not.
    """

    site: Site
    identity: tuple[str, tuple[str, ...], str, int]
    slot: str
    sources: tuple[int | None, ...]
    is_fixed: tuple[bool, ...]
    results: tuple[Coefficients, ...]
    flops: int
    dtype: torch.dtype
    reason: str = ""

    @property
    def num_factors(self) -> int:
        """One for each operand, one for addends, one for each result."""
        return len(self.sources) + 1 + len(self.results)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the operands in the gauge; that of the product for a gradient."""
        site = self.site
        return tuple(site.name if k is None else site.operand_names[k] for k in self.sources)

    def known(self) -> tuple[int | None, ...]:
        """Exponents of the units of its operands, ``None`` where nobody has measured."""
        site = self.site
        known = site.log2_units or (None,) * len(site.roles)
        return tuple(site.log2_gamma if k is None else known[k] for k in self.sources)

    def units(self) -> tuple[int, ...]:
        """Exponents of what its operands are divided by, unless it runs plain."""
        return tuple(
            0 if is_fixed else unit or 0
            for unit, is_fixed in zip(self.known(), self.is_fixed, strict=True)
        )

    def why_plain(self) -> str:
        """Why it runs plain in the units in force; empty where it does not."""
        if self.reason or (reason := self.site.plain.get(self.slot, "")):
            return self.reason or reason
        if any(abs(exponent) > _LARGEST for exponent in self._exponents()):
            return f"units that make 2**{_LARGEST} together, in a compiled graph"
        return ""

    def exponents(self) -> list[int]:
        """Exponents of its factors."""
        return [0] * self.num_factors if self.why_plain() else self._exponents()

    def _exponents(self) -> list[int]:
        units = self.units()
        results = [
            sum(power * unit for power, unit in zip(coefficients, units, strict=True))
            for coefficients in (row or (0,) * len(units) for row in self.results)
        ]
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
        module = session.module
        assert module is not None, "it is running"
        self._module: weakref.ref[nn.Module] = weakref.ref(module)
        self._exponents: list[int] = []
        self._tensors: dict[torch.device, Tensor] = {}
        self._is_known = False

    def session(self) -> ProductSession | None:
        """Whose products they are now; ``None`` once the session has closed."""
        current = LOCAL.session
        is_new = current is not None and current is not self._session
        if current is not None and is_new and current.module is self._module():
            # Compiled in an earlier run of the same module's.
            for product in self.products:
                product.site = current.numbered_site(*product.identity)
            self._session = current
        if self._session is not None and not self._session.is_open:
            self._session = None
        return self._session

    def factors(self, device: torch.device) -> Tensor:
        """All factors of the graph, FP32 of shape ``(factors,)``: 1 where there is no session."""
        session = self.session()
        if session is None:
            exponents = [0] * sum(product.num_factors for product in self.products)
        else:
            exponents = [e for product in self.products for e in product.exponents()]
            self._count(session)
        if exponents != self._exponents:
            self._exponents = exponents
            self._tensors = {}
        if device not in self._tensors:
            values = torch.tensor([2.0**e for e in exponents], dtype=torch.float32)
            self._tensors[device] = values.to(device)
        if not self._is_known:
            self._is_known = True
            _mark_caller()
        return self._tensors[device].clone()

    def look(self, tensors: Sequence[Tensor], index: int) -> None:
        """Measure the operands of a product, which are in their units, and what is added to it."""
        session, product = self._session, self.products[index]
        if session is None:
            return
        known = product.known()
        if None not in known and not session.is_looking:
            return
        units = (0,) * len(known) if product.why_plain() else product.units()
        count, common = len(units), sum(units)
        stats = [
            smallest_and_rms(tensor) * 2.0**unit
            for tensor, unit in zip(tensors[:count], units, strict=True)
        ]
        added = tuple(smallest_and_rms(tensor) * 2.0**common for tensor in tensors[count:])
        session.measurements.add(
            product.site, product.slot, product.names, tuple(stats), added, known, product.dtype
        )

    def _count(self, session: ProductSession) -> None:
        for product in self.products:
            reason = product.why_plain()
            kind: Kind = "plain" if reason else "units"
            session.add_counted(product.site.module, kind, reason, product.flops)
        for module, reason, flops in self.unreached:
            session.add_counted(module, "plain", reason, flops)


GRAPHS: list[CompiledGraph] = []
# Compiled graphs that are ours, by the address of what runs them.
_OURS: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()


def caller() -> str | None:
    """Who of Inductor calls a kernel: ``"ours"``, ``"another"`` graph, or ``"compiler"``."""
    found = codes()
    if found is None:
        return None
    frame = frame_of(3, (*found, MODULE_CALL, ENGINE))
    if frame is None or frame.f_code not in found:
        return None
    if frame.f_code is found[1]:
        return "compiler"
    return "ours" if id(frame.f_locals["self"]) in _OURS else "another"


def _mark_caller() -> None:
    found = codes()
    frame = None if found is None else frame_of(3, (found[0], MODULE_CALL, ENGINE))
    if found is not None and frame is not None and frame.f_code is found[0]:
        graph = frame.f_locals["self"]
        _OURS[id(graph)] = graph


@torch.library.impl(_LIBRARY, "compiled_factors", "CompositeExplicitAutograd")
def _factors(graph: int, device: torch.device) -> Tensor:
    return GRAPHS[graph].factors(device)


@torch.library.impl(_LIBRARY, "compiled_order", "CompositeExplicitAutograd")
def _order(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device)


@torch.library.impl(_LIBRARY, "look", "CompositeExplicitAutograd")
def _look(operands: Sequence[Tensor], order: Tensor, graph: int, product: int) -> None:
    GRAPHS[graph].look(operands, product)


@torch.library.register_fake("lightning_unitscale::compiled_factors", lib=_LIBRARY)
def _fake_factors(graph: int, device: torch.device) -> Tensor:
    count = sum(product.num_factors for product in GRAPHS[graph].products)
    return torch.empty(count, device=device)


@torch.library.register_fake("lightning_unitscale::compiled_order", lib=_LIBRARY)
def _fake_order(device: torch.device) -> Tensor:
    return torch.empty(1, device=device)


@torch.library.register_fake("lightning_unitscale::look", lib=_LIBRARY)
def _fake_look(operands: Sequence[Tensor], order: Tensor, graph: int, product: int) -> None:
    return None

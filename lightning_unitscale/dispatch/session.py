"""Units around every product that a module's steps run, forward and backward.

A session belongs to one module. While one of the module's steps is active on a thread, the
overridden kernels (``kernels.py``) hand their calls over to it; a backward product finds the
session by the number of the autograd node that its forward product has made, whenever and
wherever the backward pass runs. Nothing is captured and nothing runs twice: a product that has no
units yet is measured when it runs for the first time.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.dispatch.calls import (
    Call,
    Sources,
    may_belong_to,
    remember,
    show,
    slot_of,
    sources_of,
)
from lightning_unitscale.dispatch.coverage import CoverageCounter, Kind
from lightning_unitscale.dispatch.execute import Product, are_real, run_in_units
from lightning_unitscale.dispatch.formats import Numerics
from lightning_unitscale.dispatch.makers import making
from lightning_unitscale.dispatch.measurement import FORWARD, MeasuredProduct, Site
from lightning_unitscale.dispatch.nodes import HandedOn, thread_number
from lightning_unitscale.dispatch.products import ProductRule
from lightning_unitscale.dispatch.sites import Sites
from lightning_unitscale.dispatch.tensors import Extent, forget_copy
from lightning_unitscale.dispatch.torch_internals import Kernel, graph_task
from lightning_unitscale.dispatch.units import Units
from lightning_unitscale.dynamo.patches import opened_layers

_Args = tuple[Any, ...]
_SESSION: HandedOn[ProductSession | None] = HandedOn("session", None)


class _Local(threading.local):
    """What goes on in one thread.

    Attributes:
        after_call: Whose step goes on outside of any call of its module, weakly: a loop of the
            user's computes its loss there.
        is_inside: Whether a product is running, whose own kernels are nobody's.
    """

    after_call: weakref.ref[ProductSession] | None = None
    is_inside: bool = False

    @property
    def session(self) -> ProductSession | None:
        """Whose the forward products are; a backward pass that a step calls has it as well."""
        return _SESSION.get()

    @session.setter
    def session(self, session: ProductSession | None) -> None:
        _SESSION.set(session)


LOCAL = _Local()


def run_inside(function: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Call what runs kernels of its own, which are nobody's products."""
    previous, LOCAL.is_inside = LOCAL.is_inside, True
    try:
        return function(*args, **kwargs)
    finally:
        LOCAL.is_inside = previous


class ProductSession:
    """The products of one module's steps, with their units.

    Args:
        module: The module; names of products are paths in it.
        boundary: Code of the function that calls a step.
        units: The units in force, and those to come.
        numerics: What rounds products, by precedence.

    Attributes:
        ref: The session, weakly: the same object each time.
        units: The units in force.
        numerics: What rounds products.
        sites: Which product is which.
        counter: Counts the products that run, if somebody has put it there.
        is_open: Whether its products are run by it; see :meth:`close`.
        is_after_call: Whether a step goes on after a call, until :meth:`end_step`.
        threads: Numbers of the threads that run a call.
    """

    def __init__(
        self,
        module: nn.Module,
        boundary: CodeType,
        units: Units,
        numerics: Sequence[Numerics] = (),
    ) -> None:
        self.ref = weakref.ref(self)
        self.units = units
        self.numerics = tuple(numerics)
        self.sites = Sites(module, boundary, units)
        self.counter: CoverageCounter | None = None
        self.is_open = True
        self.is_after_call = False
        self.threads: list[int] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within this context forward products of this thread are the session's."""
        self.threads.append(thread_number())
        try:
            # A whole encoder layer in one kernel would be left as it is, in evaluation only.
            with _SESSION.being(self), making(self.ref), opened_layers(self.is_rounding):
                yield
        finally:
            self.threads.remove(thread_number())

    @property
    def is_rounding(self) -> bool:
        """Whether products of the steps that run now are rounded."""
        return any(numerics.is_active for numerics in self.numerics)

    def begin_step(self, *, is_training: bool = True) -> None:
        """Products are counted from the first again; what nobody has taken gives units."""
        self.sites.begin()
        forget_copy()
        self.units.begin_step(is_training=is_training)

    def end_step(self) -> None:
        """What is computed from now on, outside of any call, is no part of the step."""
        if self.is_after_call:
            self.is_after_call = False
            self.sites.end()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the module, while somebody has it."""
        module = self.sites.module
        return iter(()) if module is None else module.parameters()

    def close(self) -> None:
        """Let go of what was measured; see ``close_session``, which calls this."""
        self.is_open = False
        self.end_step()
        self.units.clear()
        forget_copy()

    def run(
        self,
        rule: ProductRule,
        original: Kernel,
        args: _Args,
        kwargs: dict[str, Any],
        node: Any = None,
        call: Call | None = None,
    ) -> Any:
        """Run a product of a step of the module, forward or backward.

        Args:
            rule: Its operator.
            original: torch's own kernel.
            args: Arguments.
            kwargs: Keyword arguments.
            node: The autograd node within which it runs, if it runs within one.
            call: The forward product that the node was made for, if it was made for one.
        """
        operands = rule.operands_in(args)
        if node is not None or LOCAL.session is self:
            run = self.sites.run_of(node)
        else:
            run = self.sites.loss_run() if graph_task() < 0 else None
        if not are_real(operands):
            result = run_inside(original, *args, **kwargs)
            is_complex = any(operand.is_complex() for operand in operands)
            if self.counter is not None and is_complex and run is not None:
                self.counter.add_complex(run.path, operands, rule.flops(args, result))
            return result
        if run is None and call is not None and may_belong_to(rule, call):
            call.num_visits += 1
            addends = [args[position] for position in rule.addends_in(args)]
            sources = sources_of(rule, call, operands)
            product = self.backward_product(rule, operands, call, sources, addends)
        else:
            caller = "hook" if node is None else node.name()
            suffix = f"@{caller}" if run is None else ""
            word, roles = rule.name_in(args)
            site = self.sites.find(word + suffix, roles, run or self.sites.no_module())
            product, extents = self.forward_product(rule, site, args, operands)
            if run is not None or torch.is_grad_enabled():
                remember(self.ref, product, operands, extents)
            show(product, operands)
        return self.execute(product, original, args, kwargs)

    def execute(
        self,
        product: Product,
        original: Kernel,
        args: _Args,
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a product in a format, in units or as it is, and count it.

        Args:
            product: The product.
            original: torch's own kernel.
            args: Arguments.
            kwargs: Keyword arguments.
        """
        kind: Kind
        reason = ""
        numerics: Numerics | None = None
        for each in self.numerics:
            if each.applies_to(product, args, kwargs):
                numerics = each
                break
        LOCAL.is_inside = True
        try:
            if numerics is not None:
                kind, result = "format", numerics.run(product, original, list(args), kwargs)
            elif not self.units.is_used:
                kind, result = "left out", original(*args, **kwargs)
            elif reason := product.site.plain.get(product.slot, ""):
                kind, result = "plain", original(*args, **kwargs)
            else:
                kind, result = "units", run_in_units(product, original, list(args), kwargs)
        finally:
            LOCAL.is_inside = False
        if self.counter is not None:
            flops, site = product.rule.flops(args, result), product.site
            self.counter.add(site.module, kind, reason, flops, (site.plain, product.slot))
        return result

    def forward_product(
        self, rule: ProductRule, site: Site, args: _Args, operands: Sequence[Tensor]
    ) -> tuple[Product, tuple[Extent, ...]]:
        """A forward product with what it runs with, and what was measured of its operands.

        Args:
            rule: Its operator.
            site: Which product of the step it is.
            args: Arguments.
            operands: The operands among them.
        """
        units, unknown = site.log2_units, (None,) * len(operands)
        product = Product(
            rule,
            site,
            FORWARD,
            units or (),
            (False,) * len(operands),
            site.operand_names,
            self.units.step,
        )
        extents: tuple[Extent, ...] = ()
        if units is None or self.units.is_looking:
            addends = [args[position] for position in rule.addends_in(args)]
            extents = self._measure(product, operands, units or unknown, unknown, addends)
            for numerics in self.numerics:
                numerics.measure(product, operands, is_first=units is None)
                site.log2_units = product.log2_units
        return product, extents

    def backward_product(
        self,
        rule: ProductRule,
        operands: Sequence[Tensor],
        call: Call,
        sources: Sources,
        addends: Sequence[Tensor] = (),
    ) -> Product:
        """A backward product of a call with what it runs with.

        Args:
            rule: Its operator.
            operands: What it reads.
            call: The forward product.
            sources: For each operand which forward operand it is.
            addends: What it is added to.
        """
        forward, site = call.product, call.product.site
        gamma = site.log2_gamma
        known = tuple(gamma if k is None else forward.log2_units[k] for k in sources)
        product = Product(
            rule,
            site,
            slot_of(sources),
            tuple(unit or 0 for unit in known),
            tuple(k is None or forward.is_gradient[k] for k in sources),
            site.names_of(sources),
            forward.step,
        )
        extents: tuple[Extent, ...] = ()
        if gamma is None or self.units.is_looking:
            before = call.extents or (None,) * len(forward.log2_units)
            measured = tuple(call.gradient_extent if k is None else before[k] for k in sources)
            extents = self._measure(product, operands, known, measured, addends)
            if None in sources:
                at = sources.index(None)
                call.gradient_extent = extents[at]
                for numerics in self.numerics:
                    numerics.measure(product, operands, is_first=gamma is None)
                    site.log2_gamma = product.log2_units[at]
        if torch.is_grad_enabled():
            derived = self.sites.derive(site, product.slot, tuple(map(str, range(len(operands)))))
            remember(self.ref, replace(product, site=derived), operands, extents)
        return product

    def _measure(
        self,
        product: Product,
        operands: Sequence[Tensor],
        known: tuple[int | None, ...],
        before: Sequence[Extent | None],
        addends: Sequence[Tensor] = (),
    ) -> tuple[Extent, ...]:
        """Measure operands, of which ``before`` is known from this step, and give them units."""
        extents = tuple(
            Extent.of(tensor) if extent is None else extent
            for tensor, extent in zip(operands, before, strict=True)
        )
        added = tuple(map(Extent.of, addends))
        measured = MeasuredProduct(
            product.site, product.slot, product.names, extents, added, operands[0].dtype, known
        )
        product.log2_units = self.units.note(measured, takes_units=bool(self.numerics))
        return extents

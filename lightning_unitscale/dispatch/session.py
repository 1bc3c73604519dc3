"""Units around every product that a module's steps run, forward and backward.

A session belongs to one module. While one of the module's steps is active on a thread, the
overridden kernels (``kernels.py``) hand their calls over to it; a backward product finds the
session by the number of the autograd node that its forward product has made, whenever and
wherever the backward pass runs. Nothing is captured and nothing runs twice: a product that has no
units yet is measured when it runs for the first time.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.dispatch.calls import (
    CALLS,
    Call,
    forget,
    may_belong_to,
    remember,
    sources_of,
)
from lightning_unitscale.dispatch.coverage import Coverage, CoverageCounter, Kind
from lightning_unitscale.dispatch.execute import Product, run_in_units
from lightning_unitscale.dispatch.numerics import Numerics
from lightning_unitscale.dispatch.products import ProductRule, UnreachedRule, is_turned
from lightning_unitscale.dispatch.scaling import forget_copy
from lightning_unitscale.dispatch.sites import FORWARD, Run, Site, Sites
from lightning_unitscale.dispatch.threads import LOCAL, RanProduct
from lightning_unitscale.dispatch.torch_internals import (
    Kernel,
    last_sequence_number,
    saves_elsewhere,
)
from lightning_unitscale.dispatch.units import SessionUnits

FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


class ProductSession(SessionUnits):
    """The products of one module's steps, with their units.

    Args:
        module: The module; names of products are paths in it.
        boundary: Code of the function that calls a step.
        numerics: What rounds products, if anything does.
        uses_units: Whether products run in units; if not, only ``numerics`` changes them.

    Attributes:
        ref: The session, weakly: the same object each time.
        numerics: What rounds products.
        step: How many training steps have begun.
        is_open: Whether its products are run by it; see :meth:`close`.
        claims: By the name of a site, the number of the compiled frame that its product is in.
    """

    def __init__(
        self,
        module: nn.Module,
        boundary: CodeType,
        numerics: Numerics | None = None,
        *,
        uses_units: bool = True,
    ) -> None:
        self.ref = weakref.ref(self)
        super().__init__(
            Sites(module, boundary, self.ref),
            uses_units=uses_units,
            needs_units_at_once=numerics is not None,
        )
        self.numerics = numerics
        self.is_open = True
        self.claims: dict[str, int | None] = {}
        self.step = 0
        self._episode = 0
        self._counter: CoverageCounter | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within this context forward products of this thread are the session's."""
        previous, LOCAL.session = LOCAL.session, self
        depth = len(LOCAL.suspended)
        has_fused_layers = torch.backends.mha.get_fastpath_enabled()
        if self.is_rounding:
            # A whole encoder layer in one kernel would be left as it is, in evaluation only.
            torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            LOCAL.session = previous
            torch.backends.mha.set_fastpath_enabled(has_fused_layers)
            # An optimizer that raised has not resumed.
            del LOCAL.suspended[depth:]

    @property
    def is_rounding(self) -> bool:
        """Whether products of the steps that run now are rounded."""
        return self.numerics is not None and self.numerics.is_active

    def begin_step(self, *, is_training: bool = True) -> None:
        """Products are counted from the first again; what nobody has taken gives units."""
        self._episode += 1
        self.step += is_training
        self._sites.begin()
        forget_copy()
        if not self.is_looking:
            # Who looks takes what accumulated batches have shown together, and for all ranks.
            self.settle()
        self._sites.settle()

    def count(self) -> None:
        """Count the products from now on, for :meth:`coverage`."""
        self._counter = CoverageCounter()

    def coverage(self, *, ends: bool = True) -> Coverage | None:
        """What was counted since :meth:`count`, which ends with it unless it is to go on."""
        counter = self._counter
        if ends:
            self._counter = None
        return None if counter is None else counter.result(has_units=self.uses_units)

    def close(self) -> None:
        """Forget the recorded products: backward passes that are still to come run plain."""
        self.is_open = False
        forget(self.ref)
        self.measurements.clear()
        forget_copy()

    def forward(
        self, rule: ProductRule, original: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a product that a step of the module asks for."""
        return self._forward(
            rule, original, args, kwargs, self._sites.forward_run(3, self._episode)
        )

    def within_backward(
        self,
        rule: ProductRule,
        original: Kernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Call | None,
        node: Any,
    ) -> Any:
        """Run a product that runs while autograd runs one of its nodes."""
        run = self._sites.backward_run(3, self._episode, node)
        if run is not None:
            # A checkpoint computes its body again, within the node that asked for it.
            return self._forward(rule, original, args, kwargs, run)
        if call is not None and may_belong_to(rule, call):
            return self._backward(rule, original, args, kwargs, call)
        run = Run("", self._episode)
        return self._forward(rule, original, args, kwargs, run, f"@{node.name()}")

    def owns_caller(self) -> bool:
        """Whether a module of the session's runs what was called, within a backward pass."""
        return self._sites.owns_caller()

    def take_settled(
        self,
        word: str,
        roles: tuple[str, ...],
        node: Any,
        numerics: Numerics,
        product: tuple[ProductRule, tuple[Any, ...]],
    ) -> Site | None:
        """The site of an operation above autograd, if all is known of it and it is to be rounded.

        Args:
            word: What it is called.
            roles: Of its operands.
            node: The autograd node that asks for it, if it is computed again.
            numerics: What would round it.
            product: The rule and the arguments of the product that it would make.
        """
        run: Run | None
        if node is None:
            run = self._sites.forward_run(4, self._episode)
        else:
            run = self._sites.backward_run(4, self._episode, node)
        if run is None:
            return None
        site = self._sites.peek(word, run)
        if site is None or not site.is_settled or not numerics.applies_to(site, *product, {}):
            return None
        return self._sites.find(word, roles, run)[0]

    def count_all(self, site: Site, flops: Callable[..., int], args: tuple[Any, ...]) -> None:
        """Count a layer that is rounded as a whole: its product, and those of its gradients."""
        if self._counter is not None:
            for _ in range(1 + sum(tensor.requires_grad for tensor in args)):
                self._counter.add(site.module, "format", "", flops(args, None))

    def unreached(
        self, rule: UnreachedRule, original: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator whose products no factor can reach."""
        LOCAL.is_inside = True
        try:
            result = original(*args, **kwargs)
        finally:
            LOCAL.is_inside = False
        if self._counter is not None:
            path = self._sites.forward_run(3, self._episode).path
            flops = rule.flops(args, result)
            self._counter.add(path, "plain", rule.reason, flops)
            if rule.has_backward and torch.is_grad_enabled() and _needs_gradient(args):
                # Counted here: a backward pass of its own does not say whose it is.
                self._counter.add(path, "plain", rule.reason, 2 * flops)
        return result

    def numbered_site(self, word: str, roles: tuple[str, ...], path: str, index: int) -> Site:
        """The site of a product that a compiled graph runs; see :meth:`Sites.numbered`."""
        site, is_new = self._sites.numbered(word, roles, path, index)
        if is_new:
            self._start(site)
        return site

    def path_of(self, module: int | None = None) -> str | None:
        """Path of the module with an ``id``, or of the innermost one that runs."""
        if module is not None:
            return self._sites.path_of(module)
        return self._sites.forward_run(2, self._episode).path

    def add_counted(self, module: str, kind: Kind, reason: str, flops: int) -> None:
        """Count a product that a compiled graph runs, if products are counted."""
        if self._counter is not None:
            self._counter.add(module, kind, reason, flops)

    def _forward(
        self,
        rule: ProductRule,
        original: Kernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Run,
        suffix: str = "",
    ) -> Any:
        operands = [args[position] for position in rule.operands]
        if not _is_real(operands):
            return original(*args, **kwargs)
        word, roles = rule.word(args)
        if rule.gradient is not None:
            roles = ("gradient", *roles)
        site, is_new = self._sites.find(word + suffix, roles, run)
        if is_new:
            self._start(site)
        units = site.log2_units
        names = site.operand_names
        is_gradient = (False,) * len(operands)
        stats: tuple[Tensor, ...] = ()
        if units is None or self.is_looking:
            unknown = (None,) * len(operands)
            units, stats = self._measure(
                site, FORWARD, names, operands, units or unknown, unknown, _addends(rule, args)
            )
        product = Product(rule, site, FORWARD, units, is_gradient, names, self.step)
        if stats and self.numerics is not None:
            self.numerics.measure(product, operands, is_first=site.log2_units is None)
            site.log2_units = units
        self._record(rule, site, operands, units, is_gradient, stats)
        if LOCAL.watched is not None:
            storages = tuple(tensor.untyped_storage().data_ptr() for tensor in operands)
            LOCAL.watched.append(RanProduct(site.name, storages, units, site.log2_gamma or 0))
        return self._run(product, original, args, kwargs)

    def _backward(
        self,
        rule: ProductRule,
        original: Kernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Call,
    ) -> Any:
        operands = [args[position] for position in rule.operands]
        if not _is_real(operands):
            return original(*args, **kwargs)
        site = call.site
        call.num_visits += 1
        sources = sources_of(rule, call, operands)
        slot = f"backward_{'_'.join('g' if k is None else str(k) for k in sources)}"
        names = tuple(site.name if k is None else site.operand_names[k] for k in sources)
        is_gradient = tuple(k is None or call.is_gradient[k] for k in sources)
        gamma = site.log2_gamma
        known = tuple(gamma if k is None else call.log2_units[k] for k in sources)
        stats: tuple[Tensor, ...] = ()
        if gamma is None or self.is_looking:
            before = call.stats or (None,) * len(call.log2_units)
            units, stats = self._measure(
                site,
                slot,
                names,
                operands,
                known,
                tuple(call.gradient_stats if k is None else before[k] for k in sources),
                (),
            )
            if None in sources:
                call.gradient_stats = stats[sources.index(None)]
        else:
            units = tuple(unit or 0 for unit in known)
        product = Product(rule, site, slot, units, is_gradient, names, call.step)
        if stats and self.numerics is not None and None in sources:
            self.numerics.measure(product, operands, is_first=gamma is None)
            site.log2_gamma = units[sources.index(None)]
        if torch.is_grad_enabled():
            derived = self._sites.derive(site, slot, tuple(map(str, range(len(operands)))))
            if derived.log2_gamma is None:
                self._set_units(derived)
            self._record(rule, derived, operands, units, is_gradient, stats)
        return self._run(product, original, args, kwargs)

    def _run(
        self, product: Product, original: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        numerics = self.numerics
        rule, site = product.rule, product.site
        LOCAL.is_inside = True
        try:
            if numerics is not None and numerics.applies_to(site, rule, args, kwargs):
                kind: Kind = "format"
                reason = ""
                result = numerics.run(product, original, list(args), kwargs)
            elif not self.uses_units:
                kind, reason = "left out", ""
                result = original(*args, **kwargs)
            elif reason := site.plain.get(product.slot, ""):
                kind = "plain"
                result = original(*args, **kwargs)
            else:
                kind = "units"
                result = run_in_units(product, original, list(args), kwargs)
        finally:
            LOCAL.is_inside = False
        if self._counter is not None:
            self._counter.add(
                site.module, kind, reason, rule.flops(args, result), (site.plain, product.slot)
            )
        return result

    def _record(
        self,
        rule: ProductRule,
        site: Site,
        operands: Sequence[Tensor],
        units: tuple[int, ...],
        is_gradient: tuple[bool, ...],
        stats: tuple[Tensor, ...],
    ) -> None:
        """Remember a product under the number of the autograd node that was made for it."""
        number = last_sequence_number()
        if not torch.is_grad_enabled():
            # Within the forward of an autograd function the node is that of the function.
            if number in CALLS:
                return
        elif not any(tensor.requires_grad for tensor in operands):
            return
        moves = saves_elsewhere()
        call = Call(
            self.ref,
            site,
            {
                tensor.data_ptr(): index
                for index, tensor in enumerate(operands)
                if not moves or (tensor if tensor._base is None else tensor._base).is_leaf
            },
            tuple(tuple(tensor.shape) for tensor in operands),
            units,
            is_gradient,
            self.step,
            tuple(index for index in rule.backward_order if operands[index].requires_grad),
            tuple(is_turned(tensor) for tensor in operands),
            stats,
        )
        remember(number, call)


def _is_real(operands: Sequence[Any]) -> bool:
    """Whether all operands are dense tensors of floating-point numbers."""
    return all(
        tensor is not None and tensor.dtype in FLOATS and tensor.layout is torch.strided
        for tensor in operands
    )


def _addends(rule: ProductRule, args: Sequence[Any]) -> list[Tensor]:
    return [
        args[position]
        for position in rule.addends
        if position < len(args) and args[position] is not None
    ]


def _needs_gradient(args: Sequence[Any]) -> bool:
    tensors = (leaf for arg in args for leaf in (arg if isinstance(arg, (list, tuple)) else [arg]))
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)

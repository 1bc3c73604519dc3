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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_unitscale.dispatch.calls import CALLS, Call, may_belong_to, remember, sources_of
from lightning_unitscale.dispatch.coverage import Coverage, CoverageCounter, Kind
from lightning_unitscale.dispatch.execute import Product, run_in_units
from lightning_unitscale.dispatch.measured import Measurement, Measurements
from lightning_unitscale.dispatch.products import ProductRule, UnreachedRule
from lightning_unitscale.dispatch.scaling import forget_copy, smallest_and_rms
from lightning_unitscale.dispatch.sites import FORWARD, Site, Sites
from lightning_unitscale.dispatch.torch_internals import (
    Kernel,
    KernelOverrides,
    last_sequence_number,
    sequence_number,
)
from lightning_unitscale.transforms.gauge import (
    MAX_LOG2_GAMMA,
    MAX_LOG2_SIGMA,
    Gauge,
    GaugePair,
    nearest_exponent,
)

FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class RanProduct:
    """A product that has just run, for whoever shows tensors in the units that they are stored in.

    Attributes:
        name: Name of the product in the gauge.
        storages: ``untyped_storage().data_ptr()`` of each operand.
        log2_sigmas: What each operand was divided by, as an exponent of two.
        log2_gamma: What the gradient that arrives at the product is divided by.
    """

    name: str
    storages: tuple[int, ...]
    log2_sigmas: tuple[int, ...]
    log2_gamma: int


class Numerics(Protocol):
    """What a format does to products: simulated, or run in it.

    Attributes:
        is_active: Whether the steps that run now are rounded at all.
    """

    @property
    def is_active(self) -> bool: ...  # noqa: D102

    def applies_to(self, site: Site, rule: ProductRule, args: Sequence[Any]) -> bool:
        """Whether a product is rounded."""

    def run(
        self, product: Product, original: Kernel, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a product on operands in units, rounded."""

    def measure(self, product: Product, operands: Sequence[Tensor], *, is_first: bool) -> None:
        """Look at operands in their units, for the first time or again."""

    def overrides(
        self, session: ProductSession, device_types: Collection[str]
    ) -> list[KernelOverrides]:
        """Override what is needed beside products, for kinds of devices."""


class _Local(threading.local):
    """What goes on in one thread.

    Attributes:
        session: Whose the forward products are.
        suspended: What ``session`` was before the optimizers that are stepping.
        is_inside: Whether a product is running, whose own kernels are nobody's.
        watched: Where products are listed, if somebody watches.
    """

    session: ProductSession | None = None
    is_inside: bool = False
    watched: list[RanProduct] | None = None

    def __init__(self) -> None:
        self.suspended: list[ProductSession | None] = []


LOCAL = _Local()


@contextlib.contextmanager
def watching() -> Iterator[list[RanProduct]]:
    """Within this context the forward products of this thread are listed as they run."""
    previous, LOCAL.watched = LOCAL.watched, []
    try:
        yield LOCAL.watched
    finally:
        LOCAL.watched = previous


class ProductSession:
    """The products of one module's steps, with their units.

    Args:
        module: The module; names of products are paths in it.
        boundary: Code of the function that calls a step.
        numerics: What rounds products, if anything does.

    Attributes:
        is_looking: Whether the steps measure what has units already, for :meth:`take`.
        is_counting: Whether the steps count their products.
        step: How many training steps have begun.
    """

    def __init__(
        self, module: nn.Module, boundary: CodeType, numerics: Numerics | None = None
    ) -> None:
        self.numerics = numerics
        self._gauge = Gauge()
        self.is_looking = False
        self.step = 0
        self._episode = 0
        self._plain: dict[str, dict[str, str]] = {}
        self._sites = Sites(module, boundary)
        self._measurements = Measurements()
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
    def gauge(self) -> Gauge:
        """The units in force."""
        measured: dict[str, GaugePair] = {}
        for site in self._sites.all.values():
            # What rounds takes units as it measures them; see below.
            if site.log2_units is not None:
                pairs = zip(site.operand_names, site.log2_units, strict=True)
                measured |= {name: GaugePair(log2_sigma=unit) for name, unit in pairs}
            if site.log2_gamma is not None:
                measured[site.name] = GaugePair(log2_gamma=site.log2_gamma)
        return self._gauge.updated(measured)

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
        measurement = self.take()
        if measurement is not None:
            self.adopt(measurement.forward, measurement.backward, measurement)

    def count(self) -> None:
        """Count the products from now on, for :meth:`coverage`."""
        self._counter = CoverageCounter()

    def coverage(self) -> Coverage | None:
        """What was counted since :meth:`count`, which ends with it."""
        counter, self._counter = self._counter, None
        return None if counter is None else counter.result()

    def take(self) -> Measurement | None:
        """What was measured since the last call, with one transfer from the device."""
        return self._measurements.take()

    def set_gauge(self, gauge: Gauge) -> None:
        """Put units into force from the next product on."""
        self._gauge = gauge
        for site in self._sites.all.values():
            self._set_units(site)

    def adopt(
        self, forward: Mapping[str, float], backward: Mapping[str, float], measurement: Measurement
    ) -> None:
        """Take the units of measured tensors, and leave out products in which they are not exact.

        Args:
            forward: RMS of operands, of all ranks.
            backward: RMS of gradients, of all ranks.
            measurement: What this rank has measured.
        """
        new = {
            name: GaugePair(log2_sigma=nearest_exponent(rms, MAX_LOG2_SIGMA))
            for name, rms in forward.items()
        }
        new |= {
            name: GaugePair(log2_gamma=nearest_exponent(rms, MAX_LOG2_GAMMA))
            for name, rms in backward.items()
        }
        self.set_gauge(self._gauge.updated(new))
        self.judge(measurement)

    def judge(self, measurement: Measurement) -> None:
        """Run products plain in which powers of two are not exact in the units in force."""
        for product in measurement.products:
            pairs = [self._gauge.pair(name) for name in product.names]
            # An operand's pair has no gamma, and a gradient's no sigma.
            reason = product.why_plain([pair.log2_sigma + pair.log2_gamma for pair in pairs])
            if reason:
                product.site.plain[product.slot] = reason
            else:
                product.site.plain.pop(product.slot, None)

    def plain_products(self) -> dict[str, dict[str, str]]:
        """By site, which of its products run as they are, and why."""
        return {
            **self._plain,
            **{name: dict(site.plain) for name, site in self._sites.all.items() if site.plain},
        }

    def set_plain_products(self, plain: dict[str, dict[str, str]]) -> None:
        """Go on from :meth:`plain_products`."""
        self._plain = {name: dict(slots) for name, slots in plain.items()}
        for site in self._sites.all.values():
            site.plain = dict(self._plain.get(site.name, {}))

    def close(self) -> None:
        """Forget the recorded products: backward passes that are still to come run plain."""
        for number in [n for n, call in CALLS.items() if call.session is self]:
            del CALLS[number]
        self._measurements.clear()
        forget_copy()

    def forward(
        self, rule: ProductRule, original: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a product that a step of the module asks for."""
        path, _ = self._sites.path_of_caller(3)
        return self._forward(rule, original, args, kwargs, path or "", self._episode)

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
        path, is_engine = self._sites.path_of_caller(3)
        if path is not None and not is_engine:
            # A checkpoint computes its body again, within the node that asked for it.
            again = (self._episode, sequence_number(node))
            return self._forward(rule, original, args, kwargs, path, again)
        if is_engine and call is not None and may_belong_to(rule, call):
            return self._backward(rule, original, args, kwargs, call)
        module = "" if call is None else call.site.module
        return self._forward(rule, original, args, kwargs, module, self._episode, f"@{node.name()}")

    def owns_caller(self) -> bool:
        """Whether a module of the session's runs what the caller's caller was called for."""
        return self._sites.owns_caller(4)

    def take_settled(
        self,
        word: str,
        roles: tuple[str, ...],
        node_number: int | None,
        product: tuple[ProductRule, tuple[Any, ...]],
    ) -> Site | None:
        """The site of an operation above autograd, if all is known of it and it is to be rounded.

        Args:
            word: What it is called.
            roles: Of its operands.
            node_number: Of the autograd node that asks for it, if it is computed again.
            product: The rule and the arguments of the product that it would make.
        """
        path, is_engine = self._sites.path_of_caller(4)
        if path is None or is_engine or self.numerics is None:
            return None
        episode = self._episode if node_number is None else (self._episode, node_number)
        site = self._sites.peek(word, path, episode)
        if site is None or not site.is_settled or not self.numerics.applies_to(site, *product):
            return None
        return self._sites.find(word, roles, path, episode)[0]

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
            path, _ = self._sites.path_of_caller(3)
            self._counter.add(path or "", "plain", rule.reason, rule.flops(args, result))
        return result

    def _forward(
        self,
        rule: ProductRule,
        original: Kernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        path: str,
        episode: object,
        suffix: str = "",
    ) -> Any:
        operands = [args[position] for position in rule.operands]
        if not _is_real(operands):
            return original(*args, **kwargs)
        word, roles = rule.word(args)
        if rule.gradient is not None:
            roles = ("gradient", *roles)
        site, is_new = self._sites.find(word + suffix, roles, path, episode)
        if is_new:
            self._set_units(site)
            site.plain = dict(self._plain.get(site.name, {}))
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
        is_again = isinstance(episode, tuple)
        self._record(site, operands, units, is_gradient, stats, is_again=is_again)
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
            self._record(derived, operands, units, is_gradient, stats)
        return self._run(product, original, args, kwargs)

    def _run(
        self, product: Product, original: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        numerics = self.numerics
        rule, site = product.rule, product.site
        LOCAL.is_inside = True
        try:
            if numerics is not None and numerics.applies_to(site, rule, args):
                kind: Kind = "format"
                reason = ""
                result = numerics.run(product, original, list(args), kwargs)
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
        site: Site,
        operands: Sequence[Tensor],
        units: tuple[int, ...],
        is_gradient: tuple[bool, ...],
        stats: tuple[Tensor, ...],
        *,
        is_again: bool = False,
    ) -> None:
        """Remember a product under the number of the autograd node that was made for it."""
        number = last_sequence_number()
        if not torch.is_grad_enabled():
            # Within the forward of an autograd function the node is that of the function.
            if number in CALLS:
                return
        elif not any(tensor.requires_grad for tensor in operands):
            return
        call = Call(
            self,
            site,
            {tensor.data_ptr(): index for index, tensor in enumerate(operands)},
            tuple(tuple(tensor.shape) for tensor in operands),
            units,
            is_gradient,
            self.step,
            stats,
        )
        if is_again and site.last_call is not None:
            # The backward pass of the first run reads what this one saves.
            site.last_call.pointers = call.pointers
        else:
            site.last_call = call
        remember(number, call)

    def _measure(
        self,
        site: Site,
        slot: str,
        names: tuple[str, ...],
        operands: Sequence[Tensor],
        units: tuple[int | None, ...],
        stats: tuple[Tensor | None, ...],
        addends: Sequence[Tensor],
    ) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
        """Measure the operands of a product.

        Args:
            site: Which product of the step.
            slot: Which product of the site.
            names: Of the operands in the gauge.
            operands: The operands.
            units: Their units, as far as they are known.
            stats: What was measured of them before in this step.
            addends: What is added to the product.

        Returns:
            Units in which to run the product, and what was measured. What rounds needs units now;
            without them the first step has the same bits, and the device need not be waited for.
        """
        rows = tuple(
            smallest_and_rms(tensor) if row is None else row
            for tensor, row in zip(operands, stats, strict=True)
        )
        added = tuple(smallest_and_rms(tensor) for tensor in addends)
        self._measurements.add(site, slot, names, rows, added, units, operands[0].dtype)
        if self.numerics is not None and None in units:
            found = [
                float(row[0]) if unit is None else 0.0
                for row, unit in zip(rows, units, strict=True)
            ]
            units = tuple(
                nearest_exponent(rms, MAX_LOG2_SIGMA) if unit is None else unit
                for rms, unit in zip(found, units, strict=True)
            )
        return tuple(unit or 0 for unit in units), rows

    def _set_units(self, site: Site) -> None:
        pairs = self._gauge.pairs
        operands = [pairs.get(name) for name in site.operand_names]
        known = [pair.log2_sigma for pair in operands if pair is not None]
        site.log2_units = tuple(known) if len(known) == len(site.roles) else None
        gradient = pairs.get(site.name)
        site.log2_gamma = None if gradient is None else gradient.log2_gamma
        site.is_settled = site.log2_units is not None and site.log2_gamma is not None


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

"""A plain module whose products run in units and formats, for as long as the module lives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_unitscale.dispatch.attach import MISSING, AttachedSession, SessionMethod
from lightning_unitscale.dispatch.coverage import Coverage
from lightning_unitscale.dispatch.example import session_of_example
from lightning_unitscale.dispatch.fp8 import FP8Products
from lightning_unitscale.dispatch.numerics import FirstOf, Numerics
from lightning_unitscale.dispatch.session import ProductSession
from lightning_unitscale.dispatch.simulate import SimulatedProducts
from lightning_unitscale.graph.captured_step import CapturedStep
from lightning_unitscale.graph.passes import GraphPass
from lightning_unitscale.transforms.attach import PRODUCTS, products_of
from lightning_unitscale.transforms.fp8_linears import FP8Linears
from lightning_unitscale.transforms.gauge import Gauge
from lightning_unitscale.transforms.lossless import LosslessUnitScale
from lightning_unitscale.transforms.rehearsal import MeasuredAgain
from lightning_unitscale.transforms.simulate_format import SimulateFormat

# In the metadata of autograd nodes.
_KEPT = "lightning_unitscale.session"


class ModuleProducts(AttachedSession):
    """The ``forward`` of a module in a session that transforms have asked for.

    Args:
        module: The module, which gets it as an attribute.
        passes: What the transforms want of its products.

    Attributes:
        passes: The same.
    """

    def __init__(self, module: nn.Module, passes: Sequence[GraphPass]) -> None:
        self.passes = tuple(passes)
        self._coverage = Coverage()
        self._num_calls = 0
        super().__init__(
            module,
            ["forward"],
            _numerics_of(passes),
            lambda _: module.training,
            uses_units=any(isinstance(wanted, LosslessUnitScale) for wanted in passes),
        )
        vars(module)[PRODUCTS] = self

    @staticmethod
    def add(module: nn.Module, passes: Sequence[GraphPass]) -> ModuleProducts:
        """Let the products of a module run in what ``passes`` want, and was wanted before."""
        before = products_of(module)
        if before is None:
            return ModuleProducts(module, passes)
        before.detach()
        new = ModuleProducts(module, (*before.passes_beside(passes), *passes))
        new._go_on_from(before.session)
        return new

    @property
    def gauge(self) -> Gauge:
        """The units in force."""
        self.session.settle()
        return self.session.gauge

    @property
    def coverage(self) -> Coverage:
        """What became of the products of the first call and of its backward pass."""
        return self.session.coverage(ends=False) or self._coverage

    def measure(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take the units of an example; what it does not show is measured when it first runs."""
        example = session_of_example(self._module, args, kwargs)
        self.session.set_plain_products(example.plain_products())
        self.session.set_gauge(example.gauge)

    def passes_beside(self, others: Sequence[GraphPass]) -> list[GraphPass]:
        """The passes, for others to join; units that those measure take the place of ours."""
        is_replaced = any(isinstance(other, LosslessUnitScale) for other in others)
        kept = []
        for wanted in self.passes:
            if isinstance(wanted, LosslessUnitScale):
                if is_replaced:
                    continue
                wanted.set_gauge(self.gauge)
            kept.append(wanted)
        return kept

    def measure_again(self, step: CapturedStep) -> None:
        """Have the units measured whose tensors have other names in a captured graph."""
        for wanted in step.owner.passes:
            if wanted in self.passes and isinstance(wanted, LosslessUnitScale):
                step.before_call = MeasuredAgain(wanted)

    def explain(self) -> str:
        """What became of the products of the first call, of FP8's layers, and the units."""
        coverage = self.coverage
        if coverage.counts:
            parts = [f"In the first call {coverage.line()}.", coverage.table()]
        else:
            parts = ["No product has run yet: the first call is counted."]
        for wanted in self.passes:
            if isinstance(wanted, LosslessUnitScale):
                parts.append(str(self.gauge))
            elif isinstance(wanted, SimulateFormat):
                parts.append(wanted.summary())
            elif isinstance(wanted, FP8Linears):
                parts += [wanted.summary(), wanted.report()]
        return "\n\n".join(filter(None, parts))

    def detach(self) -> None:
        """Put ``forward`` back; the units stay known here."""
        self.session.settle()
        super().detach()
        if products_of(self._module) is self:
            del vars(self._module)[PRODUCTS]

    def before_call(self) -> None:
        """Count the first call, and end it with the second."""
        self._num_calls += 1
        if self._num_calls == 1:
            self.session.count()
        elif self._num_calls == 2:
            self._coverage = self.session.coverage() or self._coverage

    def after_call(self, result: Any) -> None:
        """Warn of a first call that ran plain, and keep the session for the backward pass."""
        for leaf in tree_leaves(result):
            node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
            if node is not None:
                node.metadata[_KEPT] = self.session
        # An evaluation that rounds nothing has the same numbers in units and without.
        matters = torch.is_grad_enabled() or self.session.is_rounding
        if matters and self._num_calls == 1 and (shortfall := self.coverage.shortfall()):
            warnings.warn(f"{type(self._module).__name__}: {shortfall}", stacklevel=6)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleProducts:
        """The products of the copied module, with the same units."""
        module = copy.deepcopy(self._module, memo)
        if id(self) in memo:
            known: ModuleProducts = memo[id(self)]
            return known
        # Of the module's copy, only an empty shell may be there as yet.
        before = copy.deepcopy(self._before["forward"], memo)
        if before is not MISSING:
            vars(module)["forward"] = before
        new = ModuleProducts(module, copy.deepcopy(self.passes, memo))
        memo[id(self)] = new
        new._go_on_from(self.session)
        return new

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self._module).__name__}: its products run in units or in a format, and such a "
            "module cannot be pickled; expected a module as it is written; save its state_dict() "
            "instead, or pickle the module that it was made of."
        )

    def _go_on_from(self, session: ProductSession) -> None:
        session.settle()
        self.session.step = session.step
        if session.uses_units:
            self.session.set_plain_products(session.plain_products())
            self.session.set_gauge(session.gauge)

    def _method(self, name: str, is_training: Callable[[], bool]) -> SessionMethod:
        return _Forward(self, name, is_training)


class _Forward(SessionMethod):
    """The ``forward`` of a transformed module."""

    def __init__(self, products: ModuleProducts, name: str, is_training: Any) -> None:
        super().__init__(products._module, name, products.session, is_training)
        self._products = products
        self.before_call = products.before_call
        self.after_call = products.after_call

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._products, memo).methods["forward"]

    def __reduce__(self) -> Any:
        return self._products.__reduce__()


def _numerics_of(passes: Sequence[GraphPass]) -> Numerics | None:
    """What runs in FP8 is not rounded again."""
    numerics: list[Numerics] = [
        # An example was not measured for FP8, so what is measured later is not judged either.
        FP8Products(wanted, measures_range=False)
        for wanted in passes
        if isinstance(wanted, FP8Linears)
    ]
    simulated = [wanted for wanted in passes if isinstance(wanted, SimulateFormat)]
    if simulated:
        numerics.append(SimulatedProducts(*simulated))
    return numerics[0] if len(numerics) == 1 else FirstOf(*numerics) if numerics else None

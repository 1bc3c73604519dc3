"""What rounds products: the interface of formats, simulated or real, and several of them as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from lightning_unitscale.dispatch.execute import Product
from lightning_unitscale.dispatch.products import ProductRule
from lightning_unitscale.dispatch.sites import Site
from lightning_unitscale.dispatch.torch_internals import Kernel

if TYPE_CHECKING:
    from lightning_unitscale.dispatch.session import ProductSession


class Numerics(Protocol):
    """What a format does to products: simulated, or run in it.

    Attributes:
        is_active: Whether the steps that run now are rounded at all.
    """

    @property
    def is_active(self) -> bool: ...  # noqa: D102

    def applies_to(
        self, site: Site, rule: ProductRule, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether a product is rounded."""

    def run(
        self, product: Product, original: Kernel, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a product on operands in units, rounded."""

    def measure(self, product: Product, operands: Sequence[Tensor], *, is_first: bool) -> None:
        """Look at operands in their units, for the first time or again."""

    def run_layer(
        self, session: ProductSession, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        """Run a linear layer above autograd; ``None`` leaves it to its products."""


class FirstOf:
    """The first of several numerics that applies to a product.

    Args:
        *numerics: By precedence.
    """

    def __init__(self, *numerics: Numerics) -> None:
        self._numerics = numerics

    def applies_to(
        self, site: Site, rule: ProductRule, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether any of them applies."""
        return any(each.applies_to(site, rule, args, kwargs) for each in self._numerics)

    def run(
        self, product: Product, original: Kernel, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a product in the first that applies."""
        first = next(
            each
            for each in self._numerics
            if each.applies_to(product.site, product.rule, args, kwargs)
        )
        return first.run(product, original, args, kwargs)

    @property
    def is_active(self) -> bool:
        """Whether any of them rounds in the steps that run now."""
        return any(each.is_active for each in self._numerics)

    def run_layer(
        self, session: ProductSession, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        """Run a linear layer above autograd, if one of them does."""
        results = (each.run_layer(session, input, weight, bias) for each in self._numerics)
        return next((result for result in results if result is not None), None)

    def measure(self, product: Product, operands: Sequence[Tensor], *, is_first: bool) -> None:
        """Let each of them look at operands."""
        for each in self._numerics:
            each.measure(product, operands, is_first=is_first)

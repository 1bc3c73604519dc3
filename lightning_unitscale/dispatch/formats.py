"""What rounds products: the interface of formats, and products in a simulated format."""

from __future__ import annotations

import abc
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.dispatch.execute import Product, run_scaled
from lightning_unitscale.dispatch.flushed import FlushedOperands
from lightning_unitscale.dispatch.measurement import Site
from lightning_unitscale.dispatch.torch_internals import Kernel
from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.lossless.fp8_range import Unrepresentable
from lightning_unitscale.precision.dither import MovingGrid
from lightning_unitscale.precision.simulate import SimulateFormat
from lightning_unitscale.quantize import rounded
from lightning_unitscale.scales.transfer import numbers_on

# Why a product runs outside of a format.
NO_UNIT = "no unit yet"


class Numerics(abc.ABC):
    """What a format does to products: simulated, or run in it.

    Attributes:
        name: What users call the format.
        is_training: Whether the steps that run now are those of training.
    """

    name: str
    is_training = True

    @property
    def is_active(self) -> bool:
        """Whether the steps that run now are rounded at all."""
        return True

    @abc.abstractmethod
    def applies_to(self, product: Product, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a product is rounded."""

    @abc.abstractmethod
    def why_not(self, product: Product) -> str:
        """Return why a product is not rounded that :meth:`applies_to` has just refused."""

    @abc.abstractmethod
    def run(
        self, product: Product, original: Kernel, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a product on operands in units, rounded."""

    def measure(  # noqa: B027
        self, product: Product, operands: Sequence[Tensor], *, is_first: bool
    ) -> None:
        """Look at operands in their units, for the first time or again."""

    def await_units(self, names: Iterable[str]) -> None:  # noqa: B027
        """Note operands that have got a unit, and were zero when they were first measured."""

    def awaits(self, names: Sequence[str]) -> bool:
        """Whether one of these is such an operand, and :meth:`measure` has not seen it since."""
        return False

    def receive(self) -> Unrepresentable:
        """Leave out what :meth:`measure` has seen not to fit, without waiting for the device."""
        return Unrepresentable()

    def take_flushed(self) -> str:
        """Return operands of which many elements become zero, each once; empty if there are none.

        It waits for no device: what was measured may be there after the next step.
        """
        return ""

    def fit(self, joint: Callable[[Unrepresentable], Unrepresentable]) -> Unrepresentable:
        """Leave out what does not fit the format, of what was measured."""
        return Unrepresentable()


class SimulatedProducts(Numerics):
    """Rounds what products read: operands to one format, arriving gradients to another.

    A backward product rounds a saved operand as its forward product did: a random or a moving grid
    is drawn by the operand's name and the step, not by the call.
    """

    name = "a simulated format"

    def __init__(self, *configs: SimulateFormat, measures_range: bool = False) -> None:
        self._configs = configs
        self._measures_range = measures_range
        self._flushed = FlushedOperands()

    def applies_to(self, product: Product, *_: Any) -> bool:
        """Whether a product is rounded: all are, but for those that are left out by name."""
        return bool(self._configs_of(product.site))

    def why_not(self, product: Product) -> str:
        """Return which of the names' globs leave a product out."""
        site = product.site
        return self._configs[0].patterns.why_not(site.name, site.module)

    def run(
        self, product: Product, original: Kernel, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a product on rounded operands."""
        configs = self._configs_of(product.site)
        for position, unit, is_gradient, name in product.places():
            for config in configs:
                args[position] = _rounded(
                    config, args[position], unit, is_gradient, name, product.step
                )
                unit = 0  # it is in its units now
        return run_scaled(product, original, args, kwargs)

    def measure(self, product: Product, operands: Sequence[Tensor], *, is_first: bool) -> None:
        """Measure which elements of operands become zero."""
        configs = self._configs_of(product.site) if self._measures_range else []
        for tensor, (_, unit, is_gradient, name) in zip(operands, product.places(), strict=True):
            for config in configs[:1]:
                stored = tensor.detach().float() * 2.0**-unit
                self._flushed.measure(name, stored, _format_of(config, is_gradient))

    def take_flushed(self) -> str:
        """Return operands of which many elements become zero."""
        return self._flushed.take()

    def _configs_of(self, site: Site) -> list[SimulateFormat]:
        return [
            config
            for config in self._configs
            if config.patterns.match_names(site.name, site.module)
        ]


def _rounded(
    config: SimulateFormat, tensor: Tensor, unit: int, is_gradient: bool, name: str, step: int
) -> Tensor:
    format = _format_of(config, is_gradient)
    key = None
    if config.rounding == "stochastic":
        key = rounding_key(config.seed, step, name, tensor.device)
    factor = grid_factor(config.moving_grid, name, step)
    wide = tensor.detach().float() * (factor * 2.0**-unit)
    # Divided in FP32, where a number of FP8 and its quotient differ by one rounding at most.
    result = rounded(wide, format, config.saturate, key)
    return (result if factor == 1.0 else result / factor).to(tensor.dtype)


def _format_of(config: SimulateFormat, is_gradient: bool) -> NumberFormat:
    return config.gradient_format if is_gradient else config.operand_format


def rounding_key(seed: int, step: int, name: str, device: torch.device) -> Tensor:
    """Key of a stochastic rounding, the same wherever an operand is rounded within a step."""
    text = f"{seed}/{step}/{name}".encode()
    return numbers_on(device, [zlib.crc32(text), zlib.adler32(text)], torch.int64)


def grid_factor(grid: MovingGrid | None, name: str, call: int) -> float:
    """By how much the numbers of a format have moved under an operand: 1 where they stay."""
    return 1.0 if grid is None else grid.factor(name, call)

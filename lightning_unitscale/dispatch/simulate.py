"""Products in a number format, simulated: their operands are rounded in units, they run wide."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_unitscale.dispatch.execute import Product, run_scaled
from lightning_unitscale.quantize import rounded

if TYPE_CHECKING:
    from lightning_unitscale.dispatch.products import ProductRule
    from lightning_unitscale.dispatch.session import ProductSession
    from lightning_unitscale.dispatch.sites import Site
    from lightning_unitscale.dispatch.torch_internals import Kernel
    from lightning_unitscale.transforms.moving_grid import MovingGrid
    from lightning_unitscale.transforms.simulate_format import SimulateFormat


class SimulatedProducts:
    """Rounds what products read: operands to one format, arriving gradients to another.

    A backward product rounds a saved operand as its forward product did: a random or a moving grid
    is drawn by the operand's name and the step, not by the call.

    Args:
        *configs: The formats, the way of rounding, and the names that it is for; one after the
            other where several are for the same product.
    """

    is_active = True

    def __init__(self, *configs: SimulateFormat) -> None:
        self._configs = configs

    def applies_to(
        self, site: Site, rule: ProductRule, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether a product is rounded: all are, but for those that are left out by name."""
        return bool(self._configs_of(site))

    def run(
        self, product: Product, original: Kernel, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a product on rounded operands."""
        configs = self._configs_of(product.site)
        places = zip(
            product.rule.operands,
            product.log2_units,
            product.is_gradient,
            product.names,
            strict=True,
        )
        for position, unit, is_gradient, name in places:
            for config in configs:
                args[position] = _rounded(
                    config, args[position], unit, is_gradient, name, product.step
                )
                unit = 0  # it is in its units now
        return run_scaled(product, original, args, kwargs)

    def measure(self, product: Product, operands: Sequence[Tensor], *, is_first: bool) -> None:
        """Nothing: a simulated format takes what it gets."""

    def run_layer(
        self, session: ProductSession, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        """Nothing: products are all that is rounded."""
        return None

    def _configs_of(self, site: Site) -> list[SimulateFormat]:
        return [
            config
            for config in self._configs
            if config.patterns.match_names(site.name, site.module)
        ]


def _rounded(
    config: SimulateFormat, tensor: Tensor, unit: int, is_gradient: bool, name: str, step: int
) -> Tensor:
    format = config.bwd_format if is_gradient else config.fwd_format
    key = None
    if config.rounding == "stochastic":
        key = rounding_key(config.seed, step, name).to(tensor.device)
    factor = grid_factor(config.moving_grid, name, step)
    wide = tensor.detach().float() * (factor * 2.0**-unit)
    # Divided in FP32, where a number of FP8 and its quotient differ by one rounding at most.
    result = rounded(wide, format, config.saturate, key)
    return (result if factor == 1.0 else result / factor).to(tensor.dtype)


def rounding_key(seed: int, step: int, name: str) -> Tensor:
    """Key of a stochastic rounding, the same wherever an operand is rounded within a step.

    Args:
        seed: Of all of them.
        step: The training step.
        name: The operand's.

    Returns:
        INT64 of shape ``(2,)``, as ``quantize`` takes it.
    """
    text = f"{seed}/{step}/{name}".encode()
    return torch.tensor([zlib.crc32(text), zlib.adler32(text)], dtype=torch.int64)


def grid_factor(grid: MovingGrid | None, name: str, call: int) -> float:
    """The factor by which the numbers of a format move under an operand.

    Args:
        grid: What moves them; ``None`` where they stay.
        name: The operand's.
        call: How many calls in training there have been, this one included.

    Returns:
        A number of FP32 in (1/2, 1]; 1 where they stay.
    """
    if grid is None:
        return 1.0
    turn = grid.at(call) * grid.stride % 1.0
    moved = 2.0 ** -(zlib.crc32(name.encode()) / 2**32) * 2.0**-turn
    # Rounded to FP32, in which kernels hold it.
    factor = moved if moved > 0.5 else 2 * moved
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(round(mantissa * 2**24) / 2**24, exponent)

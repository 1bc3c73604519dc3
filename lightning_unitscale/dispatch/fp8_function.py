"""Linear layers that keep FP8 operands for their backward pass, in place of wider ones.

Below autograd a product cannot choose what is saved. So ``linear`` itself is overridden, above
autograd, for layers whose units and formats were known before the step began: a checkpoint's second
run of them has to save what the first one has saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_unitscale.dispatch.products import RULES
from lightning_unitscale.dispatch.simulate import grid_factor
from lightning_unitscale.dispatch.torch_internals import current_node, has_subclass
from lightning_unitscale.functional.fp8_linear import fp8_linear

if TYPE_CHECKING:
    from lightning_unitscale.dispatch.numerics import Numerics
    from lightning_unitscale.dispatch.session import ProductSession
    from lightning_unitscale.transforms.fp8_linears import FP8Linears

_ROLES = ("input", "weight")
_MM = next(rule for rule in RULES if rule.operator == "mm")


def run_layer(
    session: ProductSession,
    numerics: Numerics,
    config: FP8Linears,
    layer: tuple[Tensor, Tensor, Tensor | None],
) -> Tensor | None:
    """Run a linear layer of a session's step so that it keeps FP8 for its backward pass.

    Args:
        session: The session.
        numerics: Says whether the layer is in FP8.
        config: Formats and what moves their numbers.
        layer: Input, weight and bias.

    Returns:
        ``None`` where not everything is known of the layer, or it is not in FP8.
    """
    input, weight, bias = layer
    node = current_node()
    if session.is_looking or not torch.is_grad_enabled() or input.shape[-1:] != weight.shape[1:]:
        return None
    if not (input.requires_grad or weight.requires_grad) or has_subclass((input, weight)):
        return None
    site = session.take_settled("linear", _ROLES, node, numerics, (_MM, (input, weight.t())))
    if site is None:
        return None
    read, kept = site.log2_units or (0, 0)
    arriving = site.log2_gamma or 0
    units = zip((*site.operand_names, site.name), (read, kept, arriving), strict=True)
    grid = config.moving_grid
    factors = [(2.0**unit, grid_factor(grid, name, session.step)) for name, unit in units]
    (x, x_grid), (w, w_grid), (g, g_grid) = factors
    session.count_all(site, _MM.flops, (input, weight.t()))
    return fp8_linear(
        input,
        weight,
        bias,
        "constant",
        input.dtype,
        x_grid / x,
        w_grid / w,
        x * w / (x_grid * w_grid),
        g_grid / g,
        g * w / (g_grid * w_grid),
        g * x / (g_grid * x_grid),
        gradient=config.gradient_of(site.name),
    )

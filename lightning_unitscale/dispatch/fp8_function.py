"""Linear layers that keep FP8 operands for their backward pass, in place of wider ones.

Below autograd a product cannot choose what is saved. So ``linear`` itself is overridden, above
autograd, for layers whose units and formats were known before the step began: a checkpoint's second
run of them has to save what the first one has saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_unitscale.dispatch.products import RULES
from lightning_unitscale.dispatch.session import LOCAL, ProductSession
from lightning_unitscale.dispatch.simulate import grid_factor
from lightning_unitscale.dispatch.torch_internals import (
    Kernel,
    KernelOverrides,
    current_node,
    has_subclass,
    original_kernel,
    sequence_number,
)
from lightning_unitscale.functional.fp8_linear import fp8_linear

if TYPE_CHECKING:
    from lightning_unitscale.dispatch.sites import Site
    from lightning_unitscale.transforms.fp8_linears import FP8Linears

_ROLES = ("input", "weight")
_MM = next(rule for rule in RULES if rule.operator == "mm")


def override_linear(session: ProductSession, config: FP8Linears, key: str) -> KernelOverrides:
    """Let linear layers of a session's steps keep FP8 for their backward pass.

    Args:
        session: The session, whose numerics are those of FP8.
        config: Formats and what moves their numbers.
        key: ``"AutogradCPU"`` or ``"AutogradCUDA"``.

    Returns:
        What takes the kernel away again.
    """
    original = original_kernel("linear", key)
    assert original is not None, "torch has a linear for every device"
    overrides = KernelOverrides()
    overrides.put("linear", key, _kernel(session, config, original))
    return overrides


def _kernel(session: ProductSession, config: FP8Linears, original: Kernel) -> Kernel:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        site = _settled_site(session, input, weight)
        if site is None:
            return original(input, weight, bias)
        read, kept = site.log2_units or (0, 0)
        arriving = site.log2_gamma or 0
        units = zip((*site.operand_names, site.name), (read, kept, arriving), strict=True)
        factors = [(2.0**unit, grid_factor(config.moving_grid, name)) for name, unit in units]
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

    return linear


def _settled_site(session: ProductSession, input: Tensor, weight: Tensor) -> Site | None:
    """The site of a layer that is to run in FP8 as a whole; ``None`` for any other."""
    node = current_node()
    is_ours = LOCAL.session is session or node is not None
    if not is_ours or LOCAL.is_inside or session.is_looking or not torch.is_grad_enabled():
        return None
    if not (input.requires_grad or weight.requires_grad) or has_subclass((input, weight)):
        return None
    episode = None if node is None else sequence_number(node)
    return session.take_settled("linear", _ROLES, episode, (_MM, (input, weight.t())))

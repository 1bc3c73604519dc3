"""A change of units that the rest of a graph takes back, exact for derivatives of every order.

Along every path from a loss to a tensor the factors ``b`` on the gradient have the same product as
the factors ``f`` on the value, so the first derivative is the plain one though ``b != f``. The
second is not: what depends on the scaled value ``x' = f x`` through a derivative sends back a
gradient in true units of ``x'``, and it would get ``b`` as well. With ``b = f`` everywhere all is a
composition of functions and their own derivatives. So from the first backward pass on that is
itself recorded (``create_graph=True``), and in whatever passes follow it, gradients are multiplied
by ``f``: the first derivative has the same bits again, without units of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.functional.scale import (
    is_transforming,
    multiply,
    scale,
    scale_bwd,
    whole_view,
)

_has_recorded_backward = False


def takes_true_derivatives() -> bool:
    """Whether gradients are multiplied by the factors of their values from now on."""
    return _has_recorded_backward


def forget_recorded_backward() -> None:
    """Go back to units of their own for gradients: no graph of an earlier step is left."""
    global _has_recorded_backward
    _has_recorded_backward = False


# One node to Dynamo, like ``scale``.
@torch.compiler.allow_in_graph
def change_units(input: Tensor, forward_factor: Tensor, backward_factor: Tensor) -> Tensor:
    """Return ``input * forward_factor``, whose gradient is multiplied by ``backward_factor``.

    Args:
        input: Floating-point tensor of any shape.
        forward_factor: A power of two, 0-d.
        backward_factor: A power of two, 0-d; it gives way to ``forward_factor`` as said above.

    Returns:
        A tensor of the shape and type of ``input``. It never shares memory with ``input``.
    """
    if is_transforming():
        return scale(input, forward_factor, backward_factor)
    result: Tensor = _ChangeOfUnits.apply(input, forward_factor, backward_factor)
    return result


@torch.compiler.allow_in_graph
def change_gradient_units(input: Tensor, backward_factor: Tensor) -> Tensor:
    """``change_units`` with the forward factor 1; the result is a view of ``input``."""
    if is_transforming():
        return scale_bwd(input, backward_factor)
    result: Tensor = _ChangeOfGradientUnits.apply(input, backward_factor)
    return result


def _is_true_now() -> bool:
    # Autograd turns gradients on within a backward pass if that is to be recorded.
    global _has_recorded_backward
    if torch.is_grad_enabled():
        _has_recorded_backward = True
    return _has_recorded_backward


class _ChangeOfUnits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, forward_factor: Tensor, backward_factor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(forward_factor, backward_factor)
        return multiply(input, forward_factor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad_output is None:
            return None, None, None
        forward_factor, backward_factor = ctx.saved_tensors
        factor = forward_factor if _is_true_now() else backward_factor
        return multiply(grad_output, factor), None, None


class _ChangeOfGradientUnits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, backward_factor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(backward_factor)
        return whole_view(input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_output is None:
            return None, None
        (factor,) = ctx.saved_tensors
        return grad_output if _is_true_now() else multiply(grad_output, factor), None

"""Run activations whose backward pass is one kernel, which torch decomposes under a dispatch mode.

``silu_backward`` and ``mish_backward`` have a composite definition beside their kernels
(``native_functions.yaml``). Dispatch modes see the operators of the composite one, whose
intermediate results no real step allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class _Activation(torch.autograd.Function):
    """An elementwise function of which autograd saves the input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, operator: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(input)
        return operator(input)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (input,) = ctx.saved_tensors
        return torch.empty_like(input), None


class _InPlace(_Activation):
    """An elementwise function in place, for which autograd saves a copy of the input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, operator: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(input.clone())
        ctx.mark_dirty(input)
        return operator(input)


def _activation(
    function: Callable[..., Tensor],
    operator: Callable[[Tensor], Tensor],
    in_place: Callable[[Tensor], Tensor],
) -> Callable[..., Tensor]:
    def run(input: Tensor, inplace: bool = False) -> Tensor:
        if not (torch.is_grad_enabled() and input.requires_grad):
            return function(input, inplace)
        result: Tensor = (
            _InPlace.apply(input, in_place) if inplace else _Activation.apply(input, operator)
        )
        return result

    return run


SINGLE_KERNELS: dict[Any, Callable[..., Tensor]] = {
    F.silu: _activation(F.silu, aten.silu, aten.silu_),
    F.mish: _activation(F.mish, aten.mish, aten.mish_),
}
"""Functions in place of torch's."""

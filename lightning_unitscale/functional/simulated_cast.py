"""Rounding inside of a graph: of what a product reads, and of what its gradients read."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.functional.whole_view import whole_view
from lightning_unitscale.quantize import rounded

# Exponent bits, mantissa bits, finite only: a format as an argument that a graph can hold.
Bits = tuple[int, int, bool]
# The arguments of a rounding after the tensor: bits, saturate, index, keys, grid.
How = tuple[Bits, bool | None, int, Tensor | None, Tensor | None]
_NO_GRADIENTS = (None,) * 5


def bits_of(format: NumberFormat) -> Bits:
    """A format as an argument that a graph can hold."""
    return format.exponent_bits, format.mantissa_bits, format.finite_only


def round_operand(input: Tensor, *how: *How) -> Tensor:
    """``input`` rounded to a format, as :func:`_rounded` says; its gradient passes as it is."""
    result: Tensor = _RoundOperand.apply(input, *how)
    return result


def round_gradient(input: Tensor, *how: *How) -> Tensor:
    """``input`` itself, whose gradient is rounded to a format, as :func:`_rounded` says."""
    result: Tensor = _RoundGradient.apply(input, *how)
    return result


class _RoundOperand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, *how: *How) -> Tensor:
        ctx.set_materialize_grads(False)
        return _rounded(input, *how)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        return grad_output, *_NO_GRADIENTS


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, *how: *How) -> Tensor:
        ctx.set_materialize_grads(False)
        *ctx.how, keys, grid = how
        ctx.save_for_backward(keys, grid)
        return whole_view(input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return None, *_NO_GRADIENTS
        return _rounded(grad_output, *ctx.how, *ctx.saved_tensors), *_NO_GRADIENTS


def _rounded(
    tensor: Tensor,
    bits: Bits,
    saturate: bool | None,
    index: int,
    keys: Tensor | None,
    grid: Tensor | None,
) -> Tensor:
    """A tensor rounded to a format.

    Args:
        tensor: Floating point, of any shape.
        bits: The format.
        saturate: As in :func:`lightning_unitscale.quantize.quantize`.
        index: Which of the roundings of the step this is.
        keys: Their keys, shape ``(roundings, 2)``; nearest without them.
        grid: Factors of what is rounded, shape ``(roundings,)``; 1 without them.
    """
    key = None if keys is None else keys[index]
    if grid is None:
        return rounded(tensor, _format(bits), saturate, key)
    # In FP32, where a number of FP8 and its product with the factor differ by one rounding at most.
    factor = grid[index]
    wide = rounded(tensor.detach().float() * factor, _format(bits), saturate, key)
    return (wide / factor).to(tensor.dtype)


@cache
def _format(bits: Bits) -> NumberFormat:
    return NumberFormat("format", *bits)

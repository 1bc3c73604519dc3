"""Rounding inside of a graph: of what a product reads, and of what its gradients read."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.quantize import rounded

# Exponent bits, mantissa bits, finite only: a format as an argument that a graph can hold.
Bits = tuple[int, int, bool]


def bits_of(format: NumberFormat) -> Bits:
    """A format as an argument that a graph can hold."""
    return format.exponent_bits, format.mantissa_bits, format.finite_only


def round_operand(
    input: Tensor,
    bits: Bits,
    saturate: bool | None,
    index: int = 0,
    keys: Tensor | None = None,
    grid: Tensor | None = None,
) -> Tensor:
    """``input`` rounded to a format; its gradient passes as it is.

    Args:
        input: Floating-point tensor of any shape.
        bits: The format.
        saturate: As in :func:`lightning_unitscale.quantize.quantize`.
        index: Which of the roundings of the step this is.
        keys: Their keys, shape ``(roundings, 2)``; nearest without them.
        grid: Factors of what is rounded, shape ``(roundings,)``; 1 without them.
    """
    result: Tensor = _RoundOperand.apply(input, bits, saturate, index, keys, grid)
    return result


def round_gradient(
    input: Tensor,
    bits: Bits,
    saturate: bool | None,
    index: int = 0,
    keys: Tensor | None = None,
    grid: Tensor | None = None,
) -> Tensor:
    """``input`` itself, whose gradient is rounded; for the arguments see :func:`round_operand`."""
    result: Tensor = _RoundGradient.apply(input, bits, saturate, index, keys, grid)
    return result


class _RoundOperand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        bits: Bits,
        saturate: bool | None,
        index: int,
        keys: Tensor | None,
        grid: Tensor | None,
    ) -> Tensor:
        return _rounded(input, bits, saturate, index, keys, grid)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output, None, None, None, None, None


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        bits: Bits,
        saturate: bool | None,
        index: int,
        keys: Tensor | None,
        grid: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(keys, grid)
        ctx.how = bits, saturate, index
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradient = _rounded(grad_output, *ctx.how, *ctx.saved_tensors)
        return gradient, None, None, None, None, None


def _rounded(
    tensor: Tensor,
    bits: Bits,
    saturate: bool | None,
    index: int,
    keys: Tensor | None,
    grid: Tensor | None,
) -> Tensor:
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

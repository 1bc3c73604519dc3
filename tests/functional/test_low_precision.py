"""The FP8 linear layer against FP64 matmuls of rounded operands, and its saved tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.low_precision import (
    GRADIENTS,
    GradientFormat,
    fp8_linear,
    to_fp8,
)
from lightning_unitscale.quantize import quantize
from tests.helpers import assert_same_bits

ONES = (1.0,) * 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPERAND, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def _operand(tensor: Tensor, factor: float = 1.0) -> Tensor:
    return quantize(tensor.detach().float() * factor, "E4M3FN").double()


def _gradient(tensor: Tensor, factor: float, name: str) -> Tensor:
    return quantize(tensor.detach().float() * factor, name, saturate=True).double()


def _assert_near(found: Tensor, expected: Tensor, num_terms: int) -> None:
    """Assert the accuracy of a sum of this many terms in FP32, rounded once."""
    scale = expected.abs().max().item()
    tolerance = torch.finfo(found.dtype).eps + num_terms * torch.finfo(torch.float32).eps
    error = (found.double() - expected).abs().max().item()
    assert error <= tolerance * scale, (error, scale)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 48), (3, 7, 48), (48,), (1, 48), (5, 43)], ids=str)
@pytest.mark.parametrize("size_out", [32, 37])
def test_fp8_linear_matches_rounded_matmuls(
    dtype: torch.dtype, shape: tuple[int, ...], size_out: int, gradient: GradientFormat
) -> None:
    x, w = _random(*shape, dtype=dtype), _random(size_out, shape[-1], dtype=dtype, seed=1)
    factors = (2.0, 0.5, 4.0)
    y = fp8_linear(x, w, None, dtype, *factors, gradient_format=gradient)
    g = _random(*y.shape, dtype=dtype, seed=2).detach()
    y.backward(g)
    assert y.dtype == dtype and y.shape == (*shape[:-1], size_out)
    x8, w8, g8 = _operand(x, 2.0), _operand(w, 0.5), _gradient(g, 4.0, gradient)
    _assert_near(y.detach(), x8 @ w8.T, shape[-1])
    assert x.grad is not None and w.grad is not None
    assert x.grad.dtype == w.grad.dtype == dtype
    _assert_near(x.grad, g8 @ w8 / 2.0, size_out)
    rows = g8.reshape(-1, size_out)
    _assert_near(w.grad, rows.T @ x8.reshape(-1, shape[-1]) / 8.0, len(rows))


def test_bias_and_its_gradient_are_not_rounded() -> None:
    x, w, b = _random(5, 16), _random(16, 16, seed=1), _random(16, seed=2)
    y = fp8_linear(x, w, b, torch.float32, *ONES)
    g = _random(5, 16, seed=3).detach()
    y.backward(g)
    without = fp8_linear(x, w, None, torch.float32, *ONES)
    assert_same_bits(y.detach(), (without + b).detach())
    assert_same_bits(b.grad, g.sum(0))


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dynamic_scales_use_full_range_of_format(
    dtype: torch.dtype, gradient: GradientFormat
) -> None:
    """Operands far outside FP8's range give the result that they give near 1."""
    x, w = _random(24, 32, dtype=dtype), _random(16, 32, dtype=dtype, seed=1)
    made = fp8_linear(x, w, None, dtype, gradient_format=gradient)
    g = _random(24, 16, dtype=dtype, seed=2).detach()
    made.backward(g)
    of_x, of_w = (448.0 / value.detach().abs().max().double() for value in (x, w))
    of_g = torch.finfo(GRADIENTS[gradient]).max / g.abs().max().double()
    x8, w8, g8 = (
        _operand(x, float(of_x)),
        _operand(w, float(of_w)),
        _gradient(g, float(of_g), gradient),
    )
    assert x.grad is not None and w.grad is not None
    _assert_near(made.detach(), x8 @ w8.T / (of_x * of_w), 64)
    _assert_near(x.grad, g8 @ w8 / (of_g * of_w), 64)
    _assert_near(w.grad, g8.T @ x8 / (of_g * of_x), 64)


def test_dynamic_scales_of_zero_and_empty_tensors() -> None:
    x = torch.zeros(8, 16, requires_grad=True)
    w = _random(16, 16)
    made = fp8_linear(x, w, None, torch.float32)
    made.backward(torch.zeros_like(made))
    assert_same_bits(made.detach(), torch.zeros(8, 16))
    assert_same_bits(x.grad, torch.zeros(8, 16))
    empty = fp8_linear(torch.ones(0, 16), w, None, torch.float32)
    assert empty.shape == (0, 16)


def test_input_without_rows() -> None:
    x, w = torch.ones(0, 16, requires_grad=True), _random(32, 16)
    made = fp8_linear(x, w, None, torch.bfloat16, *ONES)
    made.sum().backward()
    assert made.shape == (0, 32) and made.dtype == torch.bfloat16
    assert x.grad is not None and x.grad.shape == (0, 16)
    assert_same_bits(w.grad, torch.zeros(32, 16))


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_frozen_operand_needs_fewer_saved_tensors(frozen: str) -> None:
    x = _random(8, 16).requires_grad_(frozen != "input")
    w = _random(16, 16, seed=1).requires_grad_(frozen != "weight")
    saved = _saved_bytes(lambda: fp8_linear(x, w, None, torch.float32, *ONES))
    assert saved[0] == (8 * 16 if frozen == "input" else 16 * 16)
    saved[1].sum().backward()
    assert (x.grad is None) == (frozen == "input") and (w.grad is None) == (frozen == "weight")


@pytest.mark.parametrize("dtype", [OPERAND, GRADIENT])
def test_casts_match_simulation(dtype: torch.dtype) -> None:
    """Every code, every midpoint, both ends, and values beyond."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    random = torch.randn(10_000) * torch.exp2(torch.randint(-24, 24, (10_000,)))
    values = torch.cat([codes, middles, random, torch.tensor([1e30, -1e30, -0.0, 449.0, 6e4])])
    name = "E4M3FN" if dtype == OPERAND else "E5M2"
    found = to_fp8(values, torch.ones(()), dtype).float()
    assert_same_bits(found, quantize(values, name, saturate=True))


@pytest.mark.parametrize("dtype", [OPERAND, GRADIENT])
def test_infinities_and_nan_become_nan(dtype: torch.dtype) -> None:
    bad = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert to_fp8(bad, torch.ones(()), dtype).float().isnan().all()
    x = torch.ones(2, 16)
    x[0, 0] = float("inf")
    made = fp8_linear(x, torch.ones(16, 16), None, torch.float32, *ONES)
    assert made[0].isnan().all() and made[1].isfinite().all()


def _saved_bytes(function: Any) -> tuple[int, Tensor]:
    """Bytes of distinct tensors, other than 0-d ones, that autograd keeps; and the result."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.dim():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        result = function()
    return sum(kept.values()), result


def test_fp8_saves_half_of_bf16_bytes() -> None:
    x, w = _random(64, 128, dtype=torch.bfloat16), _random(256, 128, dtype=torch.bfloat16, seed=1)
    plain, _ = _saved_bytes(lambda: F.linear(x, w))
    fp8, _ = _saved_bytes(lambda: fp8_linear(x, w, None, torch.bfloat16, *ONES))
    assert plain == 2 * (64 * 128 + 256 * 128)
    assert 0 < fp8 <= 0.55 * plain


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_missing_gradient_stays_none() -> None:
    x, weight, bias = _random(4, 16), _random(16, 16, seed=1), _random(16, seed=2)
    made = fp8_linear(x, weight, bias, torch.float32, *ONES)
    (_NoGradient.apply(made).sum() + 0 * _random(1, seed=3).sum()).backward()
    assert x.grad is None and weight.grad is None and bias.grad is None

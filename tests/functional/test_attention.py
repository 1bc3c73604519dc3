"""Attention: scales of its four tensors, and decoding with a fixed factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_unitscale.functional as U
from lightning_unitscale.functional.rules import rule_of_function


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().square().mean().sqrt())


def unit(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mult", [0.25, 1.0, 4.0])
@pytest.mark.parametrize(
    ("num_keys", "width"),
    [(8, 64), (128, 16), pytest.param(256, 128, marks=pytest.mark.slow)],
)
def test_output_and_gradients_are_at_unit_scale(
    is_causal: bool, mult: float, num_keys: int, width: int
) -> None:
    query, key, value = (unit(16, 2, num_keys, width) for _ in range(3))
    output = U.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, mult=mult, constraint=None
    )
    assert rms(output) == pytest.approx(1, abs=0.1)
    gradients = torch.autograd.grad(output, (query, key, value), torch.randn_like(output))
    for gradient, tolerance in zip(gradients, (0.25, 0.25, 0.1), strict=True):
        assert rms(gradient) == pytest.approx(1, abs=tolerance)


@pytest.mark.parametrize("scale", ["1/d", "1/sqrt d"])
def test_factor_is_more_accurate_than_published_fit(scale: str) -> None:
    def fit(mult: float, num_keys: int, width: int) -> float:
        alpha = 1 / (1 + 4 * width / mult**2)
        return float(num_keys ** ((1 - alpha) / 2))

    rule = rule_of_function(F.scaled_dot_product_attention)
    assert rule is not None
    errors: list[list[float]] = [[], []]
    for num_keys in (16, 256):
        for width in (16, 128):
            query, key, value = (unit(4096 // num_keys, num_keys, width) for _ in range(3))
            logits = 1 / width if scale == "1/d" else width**-0.5
            output = F.scaled_dot_product_attention(query, key, value, scale=logits)
            arguments = {"query": query, "key": key, "value": value, "scale": logits}
            ours = rule.factors(arguments).output
            for found, factor in zip(
                errors, (ours, fit(logits * width, num_keys, width)), strict=True
            ):
                found.append(abs(rms(output) * factor - 1))
    assert max(errors[0]) < 0.06
    assert sum(errors[0]) < sum(errors[1]) + 0.02


def test_default_constraint_is_the_true_gradient() -> None:
    query, key, value = (unit(2, 3, 10, 16) for _ in range(3))
    output = U.scaled_dot_product_attention(query, key, value, is_causal=True)
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1 / 16)
    factor = (output / plain).mean().item()
    torch.testing.assert_close(output, plain * factor)
    grad_output = torch.randn_like(output)
    for got, want in zip(
        torch.autograd.grad(output, (query, key, value), grad_output),
        torch.autograd.grad(plain, (query, key, value), grad_output),
        strict=True,
    ):
        torch.testing.assert_close(got, want * factor)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3},
        {"scale": 0.1, "mult": 3.0},
        {"enable_gqa": True},
        {"attn_mask": torch.ones(10, 10, dtype=torch.bool).tril()},
        {"attn_mask": torch.zeros(10, 10)},
    ],
)
def test_arguments_that_reference_cannot_handle(options: dict[str, Any]) -> None:
    heads = 2 if "enable_gqa" in options else 4
    query, key, value = unit(2, 4, 10, 16), unit(2, heads, 10, 16), unit(2, heads, 10, 16)
    output = U.scaled_dot_product_attention(query, key, value, **options)
    mult = options.pop("mult", 1.0)
    scale = mult * options.pop("scale", 1 / 16)
    plain = F.scaled_dot_product_attention(query, key, value, scale=scale, **options)
    torch.testing.assert_close(output, plain * (output / plain).mean())


def test_fixed_factor_matches_in_decoding() -> None:
    query, key, value = (torch.randn(1, 2, 12, 16) for _ in range(3))
    steps = [(query[:, :, i : i + 1], key[:, :, : i + 1], value[:, :, : i + 1]) for i in range(12)]
    attention = U.scaled_dot_product_attention
    whole = attention(query, key, value, is_causal=True, output_scale=2.5)
    decoded = torch.cat([attention(*step, output_scale=2.5) for step in steps], dim=2)
    torch.testing.assert_close(decoded, whole)
    # The derived factor is another one at every length.
    whole = attention(query, key, value, is_causal=True)
    decoded = torch.cat([attention(*step) for step in steps], dim=2)
    assert not torch.allclose(decoded, whole, rtol=0.1)


def test_fixed_factor_applies_to_every_gradient() -> None:
    query, key, value = (unit(1, 2, 12, 16) for _ in range(3))
    output = U.scaled_dot_product_attention(query, key, value, output_scale=2.5)
    plain = F.scaled_dot_product_attention(query, key, value, scale=1 / 16)
    for got, want in zip(
        torch.autograd.grad(output.sum(), (query, key, value)),
        torch.autograd.grad(plain.sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(got, want * 2.5)


@pytest.mark.parametrize("name", ["mult", "output_scale"])
@pytest.mark.parametrize("number", [0.0, -1.0, float("inf"), float("nan")])
def test_factors_must_be_positive(name: str, number: float) -> None:
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=f"scaled_dot_product_attention: {name}={number}"):
        U.scaled_dot_product_attention(x, x, x, **{name: number})  # type: ignore[arg-type]

"""Losses: unscaled values, and gradients at RMS 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_unitscale.functional as U
from lightning_unitscale.functional.loss import reduction_of


def rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def loss_and_gradient(
    loss: Any, logits: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, *args, **kwargs)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


SHAPES = [((50, 40), (50,)), ((5, 40, 10), (5, 10)), ((2, 40, 5, 5), (2, 5, 5)), ((40,), ())]


@pytest.mark.parametrize(("shape", "target_shape"), SHAPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_of_any_rank(
    shape: tuple[int, ...], target_shape: tuple[int, ...], reduction: str, label_smoothing: float
) -> None:
    logits, target = 0.1 * torch.randn(shape), torch.randint(40, target_shape)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    value, gradient = loss_and_gradient(U.cross_entropy, logits, target, **options)
    expected, _ = loss_and_gradient(F.cross_entropy, logits, target, **options)
    assert value.equal(expected)
    assert rms(gradient) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_ignored", [1, 30, 49])
def test_ignored_tokens_get_no_gradient(reduction: str, num_ignored: int) -> None:
    logits, target = 0.1 * torch.randn(50, 40), torch.randint(1, 40, (50,))
    target[:num_ignored] = 0
    options: dict[str, Any] = {"reduction": reduction, "ignore_index": 0}
    value, gradient = loss_and_gradient(U.cross_entropy, logits, target, **options)
    expected, _ = loss_and_gradient(F.cross_entropy, logits, target, **options)
    assert value.equal(expected)
    assert not gradient[:num_ignored].any()
    assert rms(gradient[num_ignored:]) == pytest.approx(1, abs=0.03)


def test_only_ignored_tokens_give_zero_loss() -> None:
    logits, target = torch.randn(5, 4), torch.full((5,), -100)
    value, gradient = loss_and_gradient(U.cross_entropy, logits, target, reduction="sum")
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_class_weights(reduction: str) -> None:
    logits, target = 0.1 * torch.randn(500, 40), torch.randint(40, (500,))
    target[:100] = -100
    options = {"weight": torch.rand(40) * 1e-3, "reduction": reduction}
    value, gradient = loss_and_gradient(U.cross_entropy, logits, target, **options)
    expected, plain = loss_and_gradient(F.cross_entropy, logits, target, **options)
    assert value.equal(expected)
    assert rms(gradient[100:]) == pytest.approx(1, abs=0.03)
    ratio = gradient[100:] / plain[100:]
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio))


def test_probability_targets() -> None:
    logits, target = 0.1 * torch.randn(50, 40), F.one_hot(torch.randint(40, (50,)), 40).float()
    value, gradient = loss_and_gradient(U.cross_entropy, logits, target)
    assert value.equal(F.cross_entropy(logits, target))
    assert rms(gradient) == pytest.approx(1, abs=0.03)


def test_mult_scales_logits() -> None:
    logits, target = 0.1 * torch.randn(50, 40), torch.randint(40, (50,))
    value, gradient = loss_and_gradient(U.cross_entropy, logits, target, mult=3.0)
    torch.testing.assert_close(value, F.cross_entropy(3 * logits, target))
    assert rms(gradient) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_many_tokens_in_16_bits(dtype: torch.dtype) -> None:
    # A mean over 20,000 tokens: the plain gradient of a class that is not the target is 1e-6.
    logits, target = (0.1 * torch.randn(20_000, 50)).to(dtype), torch.randint(50, (20_000,))
    value, gradient = loss_and_gradient(U.cross_entropy, logits, target)
    assert value.dtype == gradient.dtype == dtype
    assert rms(gradient) == pytest.approx(1, abs=0.03)
    assert value.item() == pytest.approx(F.cross_entropy(logits.float(), target).item(), rel=1e-2)
    wide, _ = loss_and_gradient(U.cross_entropy, logits, target, reduction="sum")
    assert wide.dtype == dtype


def test_autocast_dtype_matches_plain_loss() -> None:
    logits, target = torch.randn(5, 4).bfloat16(), torch.randint(4, (5,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert U.cross_entropy(logits, target).dtype == F.cross_entropy(logits, target).dtype


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_mse_loss_keeps_value_with_unit_gradients(reduction: str) -> None:
    x, y = torch.randn(2, 300, 40).unbind()
    leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    value = U.mse_loss(*leaves, reduction=reduction)
    torch.testing.assert_close(value, F.mse_loss(x, y, reduction=reduction))
    for gradient in torch.autograd.grad(value.sum(), leaves):
        assert rms(gradient) == pytest.approx(1, abs=0.03)


def test_binary_cross_entropy_with_element_weights() -> None:
    logits, target = torch.randn(300, 40), torch.randint(2, (300, 40)).float()
    value, gradient = loss_and_gradient(
        U.binary_cross_entropy_with_logits, logits, target, reduction="mean"
    )
    assert value.equal(F.binary_cross_entropy_with_logits(logits, target))
    assert rms(gradient) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "mean"),
        ({"reduction": "batchmean"}, "batchmean"),
        ({"reduce": False}, "none"),
        ({"size_average": False}, "sum"),
        ({"size_average": True, "reduction": "sum"}, "mean"),
    ],
)
def test_reduction_of_legacy_arguments(arguments: dict[str, Any], expected: str) -> None:
    assert reduction_of(arguments) == expected

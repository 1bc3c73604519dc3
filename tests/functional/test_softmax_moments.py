"""Moments of a softmax against Monte Carlo and in the limits."""

import math

import pytest
import torch

from lightning_unitscale.functional.moments import causal_softmax_moments, softmax_moments


def measured(n: int, std: float, num_samples: int) -> tuple[float, float]:
    logits = (torch.randn(num_samples, n, dtype=torch.float64) * std).requires_grad_()
    p = torch.softmax(logits, -1)
    (gradient,) = torch.autograd.grad(p, logits, torch.randn_like(p))
    return p.square().sum(-1).mean().item(), gradient.square().sum(-1).mean().item()


@pytest.mark.parametrize("n", [2, 8, 64, 1024])
@pytest.mark.parametrize("std", [0.25, 1.0, 2.0, 4.0])
def test_agrees_with_monte_carlo(n: int, std: float) -> None:
    moments = softmax_moments(n, std)
    output, gradient = measured(n, std, max(1500, 400_000 // n))
    # RMS is what a factor is made of.
    assert math.sqrt(moments.output / output) == pytest.approx(1, abs=0.02)
    assert math.sqrt(moments.gradient / gradient) == pytest.approx(1, abs=0.03)


def test_softmax_moments_in_limits() -> None:
    for n in (4, 100, 100_000):
        assert softmax_moments(n, 0.0).output == pytest.approx(1 / n)
        assert softmax_moments(n, 0.1).output == pytest.approx(math.exp(0.01) / n, rel=0.01)
    # p (dp - mean dp), of n entries
    assert softmax_moments(50, 0.0).gradient == pytest.approx((1 - 1 / 50) / 50)
    assert softmax_moments(50, 30.0).output > 0.9
    assert softmax_moments(50, 1e6) == softmax_moments(50, 30.0)
    assert softmax_moments(50, -2.0) == softmax_moments(50, 2.0)
    assert (softmax_moments(1, 2.0).output, softmax_moments(1, 2.0).gradient) == (1, 0)


@pytest.mark.parametrize("std", [0.0, 0.5, 2.0])
def test_output_moment_is_monotone_in_std_and_size(std: float) -> None:
    assert softmax_moments(64, std).output < softmax_moments(64, std + 0.5).output
    assert softmax_moments(65, std).output < softmax_moments(64, std).output


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(1, 1), (30, 30), (200, 200), (40, 10), (9, 40)]
)
def test_causal_moments_are_mean_over_rows(num_queries: int, num_keys: int) -> None:
    rows = [softmax_moments(min(i + 1, num_keys), 0.7) for i in range(num_queries)]
    moments = causal_softmax_moments(num_queries, num_keys, 0.7)
    assert moments.output == pytest.approx(sum(row.output for row in rows) / num_queries, rel=2e-3)
    expected = sum(row.gradient for row in rows) / num_queries
    assert moments.gradient == pytest.approx(expected, rel=0.01, abs=1e-12)


def test_causal_moment_is_near_harmonic_number() -> None:
    n, std = 512, 0.1
    harmonic = sum(1 / i for i in range(1, n + 1))
    expected = math.exp(std**2) * harmonic / n
    assert causal_softmax_moments(n, n, std).output == pytest.approx(expected, rel=0.01)

"""Quadrature against closed forms and against Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lightning_unitscale.functional.moments import (
    elementwise_moments,
    expectation,
    largest_of_normals,
)
from lightning_unitscale.functional.rules import elementwise_factors
from tests.functional.rule_cases import ELEMENTWISE


def density(x: float) -> float:
    return math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def above(x: float) -> float:
    """P(y > x) for a normal y."""
    return math.erfc(x / math.sqrt(2)) / 2


def test_moments_of_normal_numbers() -> None:
    for power, moment in {0: 1, 1: 0, 2: 1, 4: 3, 6: 15, 8: 105}.items():
        assert expectation(lambda x, power=power: x**power) == pytest.approx(moment, abs=1e-10)


@pytest.mark.parametrize(
    ("function", "mult", "square", "slope"),
    [
        (torch.relu, 1.0, 1 / 2, 1 / 2),
        (torch.relu, 3.0, 9 / 2, 1 / 2),
        (lambda x: x**3, 1.0, 15.0, 27.0),
        (torch.exp, 0.5, math.exp(0.5), math.exp(0.5)),
        (torch.abs, 2.0, 4.0, 1.0),
        # E sin(x)^2 = (1 - e^-2) / 2
        (torch.sin, 1.0, (1 - math.exp(-2)) / 2, (1 + math.exp(-2)) / 2),
        # P(|x| < 1) within the limits
        (F.hardtanh, 1.0, 0.516052, math.erf(0.5**0.5)),
        # A kink that no border of a panel meets, and a step.
        (
            lambda x: torch.relu(x - math.pi / 3),
            1.0,
            (1 + (math.pi / 3) ** 2) * above(math.pi / 3) - math.pi / 3 * density(math.pi / 3),
            above(math.pi / 3),
        ),
        (
            lambda x: F.hardshrink(x, 0.7071),
            1.0,
            2 * (0.7071 * density(0.7071) + above(0.7071)),
            2 * above(0.7071),
        ),
    ],
)
def test_moments_match_closed_forms(
    function: Callable[[Tensor], Tensor], mult: float, square: float, slope: float
) -> None:
    assert elementwise_moments(function, mult) == pytest.approx((square, slope), rel=1e-3)


@pytest.mark.parametrize("mult", [0.25, 1.0, 4.0])
def test_agrees_with_monte_carlo(mult: float) -> None:
    x = torch.randn(400_000, dtype=torch.float64, requires_grad=True)
    for name, function, options in ELEMENTWISE:
        y = function(mult * x, **options)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        factors = elementwise_factors(function, mult, **options)
        for product in (
            y.square().mean().sqrt().item() * factors.output,
            gradient.square().mean().sqrt().item() * factors.gradients["input"],
        ):
            # Rare events (a threshold at 1/mult = 4 standard deviations) have few samples.
            tolerance = 0.01 if mult > 0.5 or "shrink" not in name else 0.05
            assert product == pytest.approx(1, abs=tolerance), (name, options)


@pytest.mark.parametrize(
    ("function", "fit_output", "fit_gradient"),
    [
        (F.gelu, [0.979, 0.868, 0.826], [1.003, 0.978, 0.984]),
        (F.silu, [1.009, 0.949, 0.836], [0.992, 0.966, 0.976]),
    ],
)
def test_error_of_published_fits(
    function: Callable[[Tensor], Tensor], fit_output: list[float], fit_gradient: list[float]
) -> None:
    """The table in the documentation of the activations: factor derived over factor fitted."""

    def fit(alpha: float, high: float) -> float:
        return math.exp(alpha * math.log(high) + (1 - alpha) * math.log(2))

    for mult, of_output, of_gradient in zip((0.25, 1, 4), fit_output, fit_gradient, strict=True):
        derived = elementwise_factors(function, mult)
        alpha = 1 / (1 + 0.25 / mult**2)
        alpha_gradient = alpha if function is F.gelu else 1 / (1 + 1 / mult**2)
        # Their function is f(mult x) / mult.
        output = mult * derived.output / fit(alpha, (2 / (1 - 1 / math.pi)) ** 0.5)
        gradient = mult * derived.gradients["input"] / fit(alpha_gradient, 2**0.5)
        assert output == pytest.approx(of_output, abs=1e-3)
        assert gradient == pytest.approx(of_gradient, abs=1e-3)


def test_moment_of_largest_of_n_normals() -> None:
    assert largest_of_normals(1) == pytest.approx(1)
    assert largest_of_normals(2) == pytest.approx(1)
    x = torch.randn(40_000, 9).amax(1)
    assert largest_of_normals(9) == pytest.approx(x.square().mean().item(), rel=0.02)


def test_factors_do_not_depend_on_torch_modes() -> None:
    """Nothing of the caller's thread reaches the quadrature, not even fake tensors."""
    expected = elementwise_factors(lambda x: torch.tanh(x))
    surroundings: list[AbstractContextManager[object]] = [
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        FakeTensorMode(),
        torch.device("meta"),
        nullcontext(),
    ]
    for surrounding in surroundings:
        with surrounding:
            # A new function each time: nothing comes out of the cache.
            assert elementwise_factors(lambda x: torch.tanh(x)) == expected


def test_functions_are_evaluated_once() -> None:
    calls = []

    def function(x: Tensor, power: float) -> Tensor:
        calls.append(power)
        return x.abs().pow(power)

    for _ in range(3):
        elementwise_factors(function, power=1.5)
    assert calls == [1.5]
    elementwise_factors(function, power=2.5)
    assert calls == [1.5, 2.5]


def test_unhashable_options() -> None:
    def function(x: Tensor, powers: list[float]) -> Tensor:
        return sum((x**power for power in powers), torch.zeros(()))

    assert elementwise_factors(function, powers=[1.0]).output == pytest.approx(1)


def test_zero_derivative_has_no_factor() -> None:
    assert elementwise_factors(torch.sign).gradients == {}
    constant = elementwise_factors(lambda x: torch.ones_like(x))
    assert (constant.output, constant.gradients) == (pytest.approx(1), {})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (torch.log, "mean square of its value on normal numbers is nan"),
        (lambda x: x.sum(), r"it made \(\) of a tensor of shape"),
        (lambda x: 3, "it made int of a tensor"),
    ],
)
def test_functions_without_factors_are_an_error(
    function: Callable[[Tensor], Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        elementwise_factors(function)


def test_error_in_function_is_propagated() -> None:
    def function(x: Tensor) -> Tensor:
        raise ZeroDivisionError("of the user's own")

    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        elementwise_factors(function)

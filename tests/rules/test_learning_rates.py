"""Factors of learning rates, derived and checked on the optimizers themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_unitscale.rules.learning_rates import (
    Family,
    ParameterInfo,
    RateFactors,
    Role,
    check_group,
    family_of,
    is_decay_decoupled,
    rate_factors,
    u_mup_rate,
)
from lightning_unitscale.rules.scaled_step import rate_notes, scale_learning_rates
from tests.rules.stored import TINY, Lion


class MyAdamW(torch.optim.AdamW):
    """A user's own subclass."""


INVARIANT: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=TINY),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, eps=TINY, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=TINY, weight_decay=0.1),
    "subclass": lambda p: MyAdamW(p, lr=0.01, eps=TINY, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=TINY),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=TINY),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=TINY, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=TINY, lr_decay=0.1),
    "Lion": lambda p: Lion(p, lr=0.01, weight_decay=0.1),
}


def trajectory(
    make: Callable[[Any], Optimizer], gradient: float, parameter: float = 1.0, steps: int = 20
) -> Tensor:
    """Return the path of a matrix from ``parameter``, for random gradients times ``gradient``."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    weight = nn.Parameter(start * parameter)
    optimizer = make([weight])
    for _ in range(steps):
        drawn = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        weight.grad = drawn * gradient
        optimizer.step()
    return weight.detach()


def relative_difference(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max() / second.abs().max())


@pytest.mark.parametrize("name", INVARIANT)
def test_scale_invariant_family_ignores_gradient_scale(name: str) -> None:
    assert family_of(INVARIANT[name]([nn.Parameter(torch.ones(2))])) is Family.SCALE_INVARIANT
    plain, scaled = (trajectory(INVARIANT[name], gradient) for gradient in (1.0, 3e3))
    assert relative_difference(scaled, plain) < 1e-13


def test_effect_of_eps_depends_on_gradient_scale() -> None:
    plain = trajectory(lambda p: torch.optim.Adam(p, lr=0.01, eps=TINY), 1.0)
    differences = [
        relative_difference(trajectory(lambda p: torch.optim.Adam(p, lr=0.01), gradient), plain)
        for gradient in (1e-4, 1.0, 1e4)
    ]
    assert differences[0] > 1e3 * differences[1] > 1e6 * differences[2]


def test_radam_is_scale_invariant_after_warmup() -> None:
    def from_step(lr_of: Callable[[int], float]) -> Callable[[Any], Optimizer]:
        def make(parameters: Any) -> Optimizer:
            optimizer = torch.optim.RAdam(parameters, lr=0.01, eps=TINY)
            steps = iter(range(100))

            def set_rate(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                optimizer.param_groups[0]["lr"] = lr_of(next(steps))

            optimizer.register_step_pre_hook(set_rate)
            return optimizer

        return make

    warm = from_step(lambda step: 0.01 if step >= 5 else 0.0)
    assert relative_difference(trajectory(warm, 3e3), trajectory(warm, 1.0)) < 1e-13
    cold = from_step(lambda step: 0.01)
    assert relative_difference(trajectory(cold, 3e3), trajectory(cold, 1.0)) > 1.0


def test_muon_is_scale_invariant_up_to_bf16_rounding() -> None:
    def make(parameters: Any) -> Optimizer:
        return torch.optim.Muon(parameters, lr=0.01)

    assert family_of(make([nn.Parameter(torch.ones(2, 2))])) is Family.ORTHOGONAL
    plain = trajectory(make, 1.0)
    assert torch.equal(trajectory(make, 2.0**12), plain)
    assert 0 < relative_difference(trajectory(make, 3e3), plain) < 2e-2


def test_adafactor_steps_are_relative_to_parameter() -> None:
    def make(parameters: Any) -> Optimizer:
        return torch.optim.Adafactor(parameters, lr=0.01, eps=(TINY, 1e-3))

    assert family_of(make([nn.Parameter(torch.ones(2))])) is Family.RELATIVE
    plain = trajectory(make, 1.0)
    scaled = trajectory(make, 3e3, parameter=7.0)
    assert relative_difference(scaled / 7.0, plain) < 1e-13


def test_sgd_is_linear() -> None:
    def make(parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, nesterov=True)

    assert family_of(make([nn.Parameter(torch.ones(2))])) is Family.LINEAR
    start = trajectory(make, 0.0)
    assert relative_difference(
        trajectory(make, 5.0) - start, 5 * (trajectory(make, 1.0) - start)
    ) < (1e-12)


@pytest.mark.parametrize("name", ["LBFGS", "ASGD", "Adadelta", "Rprop"])
def test_unknown_optimizer_is_an_error(name: str) -> None:
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=rf"optimizer={name}\(\.\.\.\).*Expected.*lr_scaling=None"):
        family_of(optimizer)


def test_unknown_method_is_an_error() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)])
    with pytest.raises(ValueError, match=r"lr_scaling='mup': .*'match' or 'u-mup'"):
        scale_learning_rates(optimizer, {}, "mup")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "method", "message"),
    [
        (lambda p: torch.optim.Adam(p, weight_decay=0.01), "match", r"Adam\(weight_decay=0.01\)"),
        (lambda p: torch.optim.RMSprop(p, weight_decay=0.1), "match", "Use AdamW"),
        (lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1), "match", "Expected 0"),
    ],
)
def test_incompatible_settings_are_an_error(make: Any, method: Any, message: str) -> None:
    optimizer = make([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match=message):
        check_group(optimizer, optimizer.param_groups[0], method)
    other = "u-mup" if method == "match" else "match"
    check_group(optimizer, optimizer.param_groups[0], other)


@pytest.mark.parametrize(
    ("make", "is_decoupled"),
    [
        (lambda p: torch.optim.Adam(p), False),
        (lambda p: torch.optim.Adam(p, decoupled_weight_decay=True), True),
        (lambda p: torch.optim.AdamW(p), True),
        (lambda p: torch.optim.NAdam(p), False),
        (lambda p: torch.optim.RAdam(p, decoupled_weight_decay=True), True),
        (lambda p: torch.optim.Adamax(p), False),
        (lambda p: torch.optim.SGD(p, lr=0.1), False),
        (lambda p: torch.optim.Adafactor(p), True),
        (lambda p: torch.optim.Muon(p), True),
        (lambda p: Lion(p), True),
    ],
)
def test_decoupled_decay_is_detected(make: Any, is_decoupled: bool) -> None:
    weight = nn.Parameter(torch.full((2, 2), 3.0))
    optimizer = make([weight])
    group = optimizer.param_groups[0]
    assert is_decay_decoupled(optimizer, group) is is_decoupled
    group.update(lr=0.1, weight_decay=0.5)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    shrunk = torch.full((2, 2), 3.0 * (1 - 0.1 * 0.5))
    if is_decoupled or isinstance(optimizer, torch.optim.SGD):  # without momentum the same
        torch.testing.assert_close(weight.detach(), shrunk)
    else:
        assert (weight - shrunk).abs().max() > 0.04


def info(role: Role = Role.HIDDEN, **values: Any) -> ParameterInfo:
    sizes = {"fan_in": 16, "fan_out": 64, "model_width": 256}
    return ParameterInfo("layer.weight", role, **{**sizes, **values})


@pytest.mark.parametrize("family", [Family.SCALE_INVARIANT, Family.ORTHOGONAL])
def test_match_divides_rate_and_keeps_decay_per_step(family: Family) -> None:
    weight = rate_factors(info(sigma=0.25, output_scale=0.5), "match", family)
    assert weight == RateFactors(lr=4.0, weight_decay=0.25)
    bias = rate_factors(info(Role.BIAS, output_scale=0.5), "match", family)
    assert bias == RateFactors(lr=2.0, weight_decay=0.5)
    for role in (Role.NORM, Role.OTHER):
        assert rate_factors(info(role, num_residuals=4), "match", family) == RateFactors()


def test_match_scales_only_floor_of_relative_optimizers() -> None:
    assert rate_factors(info(sigma=0.25), "match", Family.RELATIVE) == RateFactors(floor=4.0)


def test_match_for_sgd_uses_u_mup_rates_and_keeps_decay() -> None:
    got = rate_factors(info(sigma=0.25), "match", Family.LINEAR, is_decoupled=False)
    assert got == RateFactors(lr=0.25, weight_decay=4.0)


@pytest.mark.parametrize(
    ("role", "rate"),
    [
        (Role.EMBEDDING, 1 / 16),
        (Role.INPUT, 1 / 8),
        (Role.HIDDEN, 1 / 4),
        (Role.READOUT, 1.0),
        (Role.NORM, 1 / 8),
        (Role.BIAS, 1 / 8),
        (Role.OTHER, 1.0),
    ],
)
def test_u_mup_rates_match_published_table(role: Role, rate: float) -> None:
    assert u_mup_rate(info(role)) == rate
    assert u_mup_rate(info(role, num_residuals=4)) == rate / 2
    factors = rate_factors(info(role, sigma=0.1), "u-mup", Family.SCALE_INVARIANT)
    assert factors == RateFactors(rate, 1 / rate, is_decay_independent=True)


def test_coupled_decay_is_unchanged_under_u_mup() -> None:
    got = rate_factors(info(), "u-mup", Family.SCALE_INVARIANT, is_decoupled=False)
    assert got == RateFactors(lr=0.25)
    sgd = rate_factors(info(), "u-mup", Family.LINEAR, is_decoupled=False)
    assert sgd == RateFactors(0.25, 4.0, is_decay_independent=True)


@pytest.mark.parametrize("depth", [0, 6])
def test_rates_match_reference_except_for_vectors(depth: int) -> None:
    """Its gains and biases have the rate 1. Ours have the rate of an embedding."""
    optim = pytest.importorskip("unit_scaling.optim")
    data = pytest.importorskip("unit_scaling.parameter")
    cases = [
        (Role.HIDDEN, "weight", (64, 16)),
        (Role.READOUT, "output", (64, 16)),
        (Role.NORM, "norm", (64,)),
        (Role.BIAS, "bias", (64,)),
        (Role.EMBEDDING, "weight", (1000, 256)),
    ]
    for role, kind, shape in cases:
        parameter = data.Parameter(torch.ones(shape), kind, mup_scaling_depth=depth or None)
        ours = info(role, num_residuals=depth)
        less = 64**-0.5 if role in (Role.NORM, Role.BIAS) else 1.0
        assert math.isclose(u_mup_rate(ours), less * optim.lr_scale_func_adam(parameter))
        # Ours leaves the readout's gradient factor free, so it is the column without a constraint.
        theirs = optim.lr_scale_func_sgd(None)(parameter)
        assert math.isclose(u_mup_rate(ours), less * theirs)


@pytest.mark.parametrize(
    ("known", "method", "message"),
    [
        (info(sigma=0.0), "match", r"sigma=0.0: not a value for parameter 'layer.weight'"),
        (info(sigma=math.nan), "match", "sigma=nan"),
        (info(Role.BIAS, output_scale=-1.0), "match", "output_scale=-1.0"),
        (info(fan_in=0), "u-mup", "fan_in=0"),
        (info(Role.EMBEDDING, model_width=0), "u-mup", "model_width=0"),
    ],
)
def test_scales_must_be_positive(known: ParameterInfo, method: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rate_factors(known, method, Family.SCALE_INVARIANT)


def test_rate_notes_for_user() -> None:
    weight, unknown = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    known = {weight: info()}
    tied = {weight: info(Role.EMBEDDING, is_tied=True)}
    assert rate_notes(torch.optim.AdamW([weight]), known, "match") == []
    assert rate_notes(torch.optim.SGD([weight], lr=0.1), known, "u-mup") == []
    (text,) = rate_notes(torch.optim.SGD([weight], lr=0.1), known, "match")
    assert "SGD" in text
    assert "rates of u-muP" in text
    (text,) = rate_notes(torch.optim.RAdam([weight]), known, "match")
    assert "warm-up" in text
    (text,) = rate_notes(torch.optim.AdamW([weight], 0.5, weight_decay=0.1), known, "u-mup")
    assert "weight_decay=0.1" in text and "10.0%" in text
    (text,) = rate_notes(torch.optim.AdamW([weight], 0.5, weight_decay=2**-13), tied, "u-mup")
    assert text.startswith("layer.weight: tied")
    (text,) = rate_notes(torch.optim.Adam([weight, unknown], 0.5), known, "u-mup")
    assert "1 of its 2 parameters" in text
    assert rate_notes(torch.optim.SGD([unknown]), known, "match") == []


def test_learning_rate_of_plain_model_is_reported() -> None:
    weight = nn.Parameter(torch.ones(2))
    known = {weight: info()}
    optimizer = torch.optim.AdamW([weight], 1e-3, weight_decay=0.0)
    (text,) = rate_notes(optimizer, known, "u-mup")
    assert "lr=0.001" in text and "'match'" in text
    assert rate_notes(optimizer, known, "match") == []
    # A warm-up starts low, and is told by where it goes.
    for rate in (0.5, torch.tensor(0.5)):
        optimizer = torch.optim.AdamW([weight], rate, weight_decay=0.0)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-4)
        assert optimizer.param_groups[0]["lr"] < 1e-3
        assert rate_notes(optimizer, known, "u-mup") == []

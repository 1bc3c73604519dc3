"""The RMS of tensors between matmuls: predicted by rule, or measured."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.rules.transform import unit_scale
from tests.rules.models import Of
from tests.rules.oracle import decided, operands_of, rules_alone
from tests.zoo import Step

W = 32
X = torch.randn(256, W, generator=torch.Generator().manual_seed(2))

Between = Callable[[Tensor], Tensor]


def _between(function: Between, x: Tensor = X, **options: Any) -> tuple[nn.Module, float]:
    """The module ``linear(function(linear(x)))`` and the factor on its second operand."""
    width = function(x).shape[-1]
    module = Of(
        lambda m, a: m[1](function(m[0](a))).square().mean(), nn.Linear(W, W), nn.Linear(width, 4)
    )
    scaled = unit_scale(module, **options)
    scaled(x)
    arguments = decided(scaled, "linear")[1].arguments
    return scaled, dict((argument.path, argument.factor) for argument in arguments).get((0,), 1.0)


def _moment(function: Between) -> float:
    """RMS of a function of a standard normal variable, by plain averaging."""
    samples = torch.randn(4_000_000, generator=torch.Generator().manual_seed(7))
    return float(function(samples).double().square().mean().sqrt())


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("on_unknown", ["calibrate", "keep"])
@pytest.mark.parametrize(
    "function",
    [
        F.relu,
        F.gelu,
        torch.tanh,
        lambda x: F.leaky_relu(x, 0.3),
        lambda x: x.sigmoid(),
        lambda x: F.softplus(x, beta=2.0),
        lambda x: F.gelu(x * 3.0),
        lambda x: torch.relu(x / 100) * 7,
    ],
)
def test_predicted_rms_of_activations_matches_moments(function: Between, on_unknown: str) -> None:
    _, factor = _between(function, on_unknown=on_unknown)
    assert 1 / factor == pytest.approx(_moment(function), rel=0.01)


@pytest.mark.parametrize("number", [0.1, 1.0, 10.0])
def test_inhomogeneous_functions_use_scale_of_input(number: float) -> None:
    def function(x: Tensor) -> Tensor:
        return F.local_response_norm((x * number).unsqueeze(-1), 5, alpha=1.0).squeeze(-1)

    _, factor = _between(function, on_unknown="keep")
    channels = torch.randn(100_000, W, generator=torch.Generator().manual_seed(3))
    # The rule takes the mean square of the neighbors for 1, and not for a random number.
    assert 1 / factor == pytest.approx(float(function(channels).square().mean().sqrt()), rel=0.2)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("function", [_gelu, lambda x: x * torch.sigmoid(1.702 * x)])
def test_hand_written_activations_are_recognized(function: Between) -> None:
    module, factor = _between(function)
    assert 1 / factor == pytest.approx(_moment(function), rel=0.06)
    for op in ("pow", "tanh", "sigmoid", "add"):
        assert not any(decision.changes for decision in decided(module, op))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.layer_norm(100 * x + 3, (W,)),
        lambda x: F.rms_norm(x * 1e-3, (W,), eps=1e-12),
        lambda x: F.normalize(x, dim=-1) * math.sqrt(W),
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: x.view(-1, 2, W // 2).transpose(0, 1).flatten(0, 1),
        lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True)),
    ],
)
def test_unit_scale_tensors_get_no_factor(function: Between) -> None:
    assert _between(function)[1] == 1.0


@pytest.mark.parametrize(
    ("function", "rms"),
    [
        (lambda x: F.dropout(x, 0.75), 2.0),
        (lambda x: x * 5, 5.0),
        (lambda x: x / 8, 0.125),
        (lambda x: x.mul(other=3.0), 3.0),
    ],
)
def test_exact_rms_of_known_functions(function: Between, rms: float) -> None:
    _, factor = _between(function, on_unknown="keep")
    assert 1 / factor == pytest.approx(rms, rel=1e-4)


UNKNOWN: dict[str, Between] = {
    "spectrum": lambda x: torch.fft.rfft(x).abs(),
    "cumulative": lambda x: x.cumsum(-1),
    "sorted_half": lambda x: x.sort(-1).values[..., : W // 4] * 10,
    "no_rule_and_a_number": lambda x: torch.fft.fft(x).real * 50,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_functions_are_measured(name: str) -> None:
    module, factor = _between(UNKNOWN[name])
    assert factor != 1.0
    alone = rules_alone(module)
    assert all(0.8 < rms < 1.25 for _, rms in operands_of(alone, X).readings)


def test_unknown_functions_have_factor_one_with_keep() -> None:
    module, factor = _between(UNKNOWN["spectrum"], on_unknown="keep")
    assert factor == 1.0
    assert max(rms for _, rms in operands_of(rules_alone(module), X).readings) > 3


@pytest.mark.parametrize("size", [1e-20, 0.01, 300.0, 1e15])
def test_inputs_of_any_size_are_measured(size: float) -> None:
    scaled = unit_scale(Of(lambda m, a: m[0](a).square().mean(), nn.Linear(W, 4)))
    scaled(X * size)
    (decision,) = decided(scaled, "linear")
    assert decision.arguments[0].factor * size == pytest.approx(1.0, rel=0.05)


def test_accurate_prediction_is_kept() -> None:
    # A mean over a few numbers differs slightly from the rule for normal variables.
    _, factor = _between(lambda x: F.relu(x).view(-1, W // 2, 2).mean(-1))
    rule = _between(lambda x: F.relu(x).view(-1, W // 2, 2).mean(-1), on_unknown="keep")[1]
    assert factor == rule
    # One that is far off is not: this relu's argument is always positive.
    _, factor = _between(lambda x: F.relu(x * 0 + 4.0))
    assert factor == pytest.approx(1 / 4, rel=0.01)


@pytest.mark.parametrize("gain", [1e-6, 1.0, 40.0])
def test_channel_scale_is_not_undone(gain: float) -> None:
    module = Step(
        lambda g, a, b, x: b(g * F.gelu(a(x))),
        torch.full((W,), gain),
        nn.Linear(W, W),
        nn.Linear(W, 4),
    )
    scaled = unit_scale(module)
    scaled(X)
    assert torch.equal(scaled.w0, torch.full((W,), gain))
    readings = [rms for name, rms in operands_of(rules_alone(scaled), X).readings]
    assert readings[2] == pytest.approx(gain, rel=0.1)


def test_channel_scale_after_measured_tensor_is_not_undone() -> None:
    module = Step(
        lambda g, a, b, x: b(g * UNKNOWN["spectrum"](a(x))),
        torch.full((W // 2 + 1,), 0.01),
        nn.Linear(W, W),
        nn.Linear(W // 2 + 1, 4),
    )
    scaled = unit_scale(module)
    scaled(X)
    readings = [rms for name, rms in operands_of(rules_alone(scaled), X).readings]
    assert readings[2] == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("gain", [1e-6, 1.0])
def test_layer_scale_keeps_its_branch_small(gain: float) -> None:
    def function(g: Tensor, a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
        h = a(x)
        return h + g * b(h)

    module = Step(function, torch.full((W,), gain), nn.Linear(W, W), nn.Linear(W, W))
    scaled = unit_scale(module, residual=(1.0, 1.0))
    loss = scaled(X)
    h = X @ scaled.w1.weight.T * W**-0.5
    branch = h @ scaled.w2.weight.T * W**-0.5
    expected = ((h + gain * branch) / math.sqrt(2)).square().mean()
    torch.testing.assert_close(loss, expected, rtol=0.1, atol=0.0)


def test_zero_tensor_gets_finite_factor() -> None:
    module = Of(
        lambda m, a: m[1](m[0](a).detach() * 0.0 + torch.zeros(4)).sum(),
        nn.Linear(W, 4),
        nn.Linear(4, 4),
    )
    scaled = unit_scale(module)
    scaled(X)
    assert all(
        math.isfinite(argument.factor)
        for decision in decided(scaled, "linear")
        for argument in decision.arguments
    )
    assert scaled(X).item() == 0.0


def test_infinite_mask_does_not_affect_scale() -> None:
    mask = torch.zeros(W).masked_fill(torch.arange(W) > 3, -torch.inf)
    function = lambda x: torch.softmax(x + mask, -1)  # noqa: E731
    module, factor = _between(function)
    assert 1.5 < factor < W
    assert torch.isfinite(module(X))


def test_computed_weight_is_measured() -> None:
    module = Of(
        lambda m, a: F.linear(a, m[0].weight @ m[1].weight * 30).square().mean(),
        nn.Linear(W, W),
        nn.Linear(W, W),
    )
    scaled = unit_scale(module)
    scaled(X)
    readings = operands_of(rules_alone(scaled), X).readings
    assert all(0.8 < rms < 1.25 for _, rms in readings)


@pytest.mark.slow
def test_sum_of_many_branches_is_at_unit_scale() -> None:
    parts = [nn.Linear(W, W) for _ in range(5)]
    module = Of(lambda m, a: m[5](sum(value(a) for value in m[:5]) * 2.0).square().mean(), *parts,
                nn.Linear(W, 4))  # fmt: skip
    scaled = unit_scale(module)
    scaled(X)
    assert all(0.8 < rms < 1.25 for _, rms in operands_of(rules_alone(scaled), X).readings)

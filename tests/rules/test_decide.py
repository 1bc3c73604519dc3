"""The places of factors, compared with functions written by hand."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.rules.plan import Argument, Decision
from lightning_unitscale.rules.transform import unit_scale
from tests.rules.models import GPT, LSTM, Of, labels, tokens
from tests.rules.oracle import decided, decisions_of, plan_of, rms

W = 24
X = torch.randn(64, W, generator=torch.Generator().manual_seed(2))
# E gelu(x)^2 for a normal x.
_GELU = 0.42521


def _mlp() -> Of:
    return Of(
        lambda m, a: F.cross_entropy(m[1](F.gelu(m[0](a))), labels(64)),
        nn.Linear(W, 2 * W),
        nn.Linear(2 * W, 5),
    )


def test_perceptron_matches_hand_written_scaling() -> None:
    torch.manual_seed(4)
    scaled = unit_scale(_mlp())
    torch.manual_seed(5)
    scaled(X)
    torch.manual_seed(5)
    loss = scaled(X)
    torch.manual_seed(5)
    first, second = (part.weight for part in scaled.parts)
    h = F.gelu(X @ first.T * W**-0.5) * _GELU**-0.5
    expected = F.cross_entropy(h @ second.T / (2 * W), labels(64))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    assert all(0.5 < rms(param.grad) < 2 for param in scaled.parameters())


def test_activation_and_loss_mults_match_hand_written_scaling() -> None:
    scaled = unit_scale(_mlp(), activation_mult=0.5, loss_mult=3.0)
    torch.manual_seed(5)
    loss = scaled(X)
    torch.manual_seed(5)
    first, second = (part.weight for part in scaled.parts)
    h = F.gelu(0.5 * (X @ first.T * W**-0.5))
    moment = F.gelu(0.5 * torch.randn(1_000_000)).square().mean().sqrt()
    expected = F.cross_entropy(3.0 * (h / moment) @ second.T / (2 * W), labels(64))
    torch.testing.assert_close(loss, expected, rtol=5e-3, atol=0.0)


def _single(module: nn.Module, op: str, *inputs: Any, **options: Any) -> Decision:
    scaled = unit_scale(module, **options)
    scaled(*inputs)
    (decision,) = decided(scaled, op)
    return decision


def test_factors_of_matmuls() -> None:
    hidden = Of(lambda m, a: m[1](m[0](a)).square().mean(), nn.Linear(W, 8), nn.Linear(8, 3))
    scaled = unit_scale(hidden)
    scaled(X)
    first, second = decided(scaled, "linear")
    assert (first.output, first.arguments) == (pytest.approx(W**-0.5), ())
    assert second.output == pytest.approx(1 / 8)
    assert second.reason.startswith("readout: 1/fan_in")
    convolution = Of(lambda m, a: m[0](a), nn.Conv2d(4, 6, 3, groups=2))
    decision = _single(convolution, "conv2d", torch.randn(2, 4, 8, 8))
    assert decision.output == pytest.approx((2 * 9) ** -0.5)


@pytest.mark.slow
def test_sum_of_two_embeddings_has_factor() -> None:
    scaled = unit_scale(GPT(W, 1))
    scaled(tokens())
    decision = decisions_of(scaled)["add"]
    assert decision.output == pytest.approx(2**-0.5)
    assert decision.arguments == ()


@pytest.mark.parametrize(
    "function",
    [
        lambda m, a: m[0](a) + 3.0,
        lambda m, a: m[0](a) + torch.ones(8),
        lambda m, a: m[0](a) + m[1].bias,
        lambda m, a: m[0](a) + torch.tanh(m[0](a)),
        lambda m, a: m[0](a) - 1,
    ],
)
def test_adds_without_factors(function: Any) -> None:
    scaled = unit_scale(Of(function, nn.Linear(W, 8), nn.Linear(8, 8)))
    scaled(X)
    assert not any(
        decision.changes for decision in (*decided(scaled, "add"), *decided(scaled, "sub"))
    )


def test_elementwise_products_get_no_factor() -> None:
    scaled = unit_scale(
        Of(lambda m, a: m[2](F.silu(m[0](a)) * m[1](a)), *(nn.Linear(W, W) for _ in range(3)))
    )
    scaled(X)
    (decision,) = decided(scaled, "mul")
    assert not decision.changes
    factor = decided(scaled, "linear")[2].arguments[0].factor
    silu = float(F.silu(torch.randn(1_000_000)).square().mean().sqrt())
    assert factor == pytest.approx(1 / silu, rel=0.01)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_keeps_its_value_and_ignore_index(reduction: str) -> None:
    target = torch.tensor([1, -100, 2, -100, -100, 0, 3, -100])

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.transpose(1, 2), target.view(2, 4), label_smoothing=0.1, reduction=reduction
        )

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(W, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(x)
            return loss(logits), logits

    scaled = unit_scale(Two())
    value, logits = scaled(X[:8].view(2, 4, W))
    assert torch.equal(value, loss(logits))
    assert torch.equal(logits.detach(), scaled(X[:8].view(2, 4, W))[1])
    value.backward()
    assert 0.5 < rms(scaled.head.weight.grad) < 2
    logits = logits.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logits), logits)
    assert torch.equal(gradient[target.view(2, 4) == -100], torch.zeros(4, 5))


def test_bias_from_data_is_not_scaled() -> None:
    # Two matrices of the batch: nothing is learned, so the result is what is brought to RMS 1.
    a, b, addend = torch.randn(6, W), torch.randn(W, 9), 100 * torch.randn(6, 9)
    scaled = unit_scale(Of(lambda _, *given: torch.addmm(*given, alpha=0.5)))
    y = scaled(addend, a, b)
    (decision,) = decided(scaled, "addmm")
    assert decision.output == 1.0
    alpha = dict(decision.kwargs)["alpha"]
    torch.testing.assert_close(y, torch.addmm(addend, a, b, alpha=alpha))


def test_matmul_of_dependent_operands_is_measured() -> None:
    scaled = unit_scale(Of(lambda _, a: a @ a.mT))
    y = scaled(X[:6].expand(4, 6, W))
    assert rms(y) == pytest.approx(1.0, rel=0.4)
    (single,) = decided(scaled, "matmul")
    assert single.origin == "calibrated" and "where the rule says" in single.reason


def test_unknown_matmul_has_reason() -> None:
    scaled = unit_scale(Of(lambda _, a, b: torch.conv_tbc(a, b, torch.zeros(5)) * 1.0))
    scaled(torch.randn(7, 2, 4), torch.randn(3, 4, 5))
    (decision,) = decided(scaled, "conv_tbc")
    assert decision.origin in {"calibrated", "rule"}
    assert decision.reason


def test_on_unknown_error_raises() -> None:
    module = Of(
        lambda m, a: m[1](torch.fft.rfft(m[0](a)).abs()), nn.Linear(W, W), nn.Linear(W // 2 + 1, 4)
    )
    scaled = unit_scale(module, on_unknown="error")
    before = {name: param.clone() for name, param in scaled.named_parameters()}
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match=r"on_unknown='error': abs in the step \(abs\): no rule. Expected .*"
            r"register_rule.*replace=.*on_unknown='calibrate'",
        ):
            scaled(X)
    assert all(torch.equal(param, before[name]) for name, param in scaled.named_parameters())
    assert plan_of(scaled).parameters == {}


@pytest.mark.slow
def test_transformer_needs_no_measurement() -> None:
    plans = []
    for on_unknown in ("calibrate", "keep", "error"):
        torch.manual_seed(3)
        scaled = unit_scale(GPT(W, 1), on_unknown=on_unknown)
        scaled(tokens())
        plans.append(plan_of(scaled))
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize(
    "start",
    [
        lambda x: x.new_zeros(len(x), W),
        lambda x: torch.full((len(x), W), 0.0),
        lambda x: torch.randn_like(x[:, 0]),
        *(
            pytest.param(start, marks=pytest.mark.slow)
            for start in (
                lambda x: torch.zeros(len(x), W),
                lambda x: x.new_full((len(x), W), fill_value=0.0),
                lambda x: torch.zeros_like(x[:, 0]),
                lambda x: torch.ones(len(x), W),
            )
        ),
    ],
)
def test_initial_state_needs_no_measurement(start: Any) -> None:
    def lstm(m: nn.ModuleList, x: Tensor) -> Tensor:
        h = c = start(x)
        for t in range(3):
            i, f, g, o = (m[0](x[:, t]) + m[1](h)).chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return m[2](h).square().mean()

    x = torch.randn(32, 3, W)
    parts = (nn.Linear(W, 4 * W), nn.Linear(W, 4 * W), nn.Linear(W, 2))
    found = []
    for on_unknown in ("error", "keep"):
        torch.manual_seed(5)
        scaled = unit_scale(Of(lstm, *parts), on_unknown=on_unknown)
        scaled(x)
        # A state has no scale of its own: each map of it has the factor of its weight.
        assert {decision.output for decision in decided(scaled, "linear")[:-1]} == {W**-0.5}
        found.append(plan_of(scaled))
    assert found[0] == found[1]


def _filled(x: Tensor) -> Tensor:
    y = torch.zeros(8, W)
    y[:, 1:] = 3 * torch.ones(8, W - 1)
    y[:, 0] = x.abs().amax()
    return y


@pytest.mark.parametrize(
    "fill", [_filled, lambda x: torch.zeros(64, W).add_(torch.fft.fft(x).abs())]
)
def test_mutated_tensor_is_not_a_constant(fill: Any) -> None:
    module = Of(lambda m, x: m[0](fill(x)), nn.Linear(W, W))
    scaled = unit_scale(module)
    scaled(X)
    ((argument,),) = (decision.arguments for decision in decided(scaled, "linear"))
    assert argument.factor == pytest.approx(1 / rms(fill(X)), rel=1e-3)
    with pytest.raises(RuntimeError, match="on_unknown='error'"):
        unit_scale(module, on_unknown="error")(X)


@pytest.mark.parametrize(
    ("make", "rms"),
    [(lambda x: torch.full_like(x, -3.0), 3.0), (lambda x: torch.rand_like(x), 3**-0.5)],
)
def test_matmul_of_tensors_created_in_step(make: Any, rms: float) -> None:
    scaled = unit_scale(Of(lambda m, x: m[0](make(x)), nn.Linear(W, W)), on_unknown="error")
    scaled(X)
    ((argument,),) = (decision.arguments for decision in decided(scaled, "linear"))
    assert argument.factor == pytest.approx(1 / rms)


@pytest.mark.slow
def test_repeated_operations_have_separate_decisions() -> None:
    scaled = unit_scale(LSTM(16))
    scaled(tokens(6))
    names = [name for name in decisions_of(scaled) if name.startswith("input.linear")]
    assert len(names) == 5
    assert {decisions_of(scaled)[name].output for name in names} == {0.25}


def test_reads_has_sources_of_arguments() -> None:
    def function(m: nn.ModuleList, x: Tensor) -> Tensor:
        h = m[0](x.view(8, -1, W)).tanh()
        return torch.cat([F.dropout(h, 0.5).mT.mT, h + 1], -1) @ m[1].weight.T

    scaled = unit_scale(Of(function, nn.Linear(W, 8), nn.Linear(16, 4)))
    scaled(X)
    reads = {decision.op: decision.reads for decision in decisions_of(scaled).values()}
    assert reads["linear"] == ("", "parts.0.weight", "parts.0.bias")
    assert reads["cat"] == ("tanh", "add")
    assert reads["matmul"] == ("cat", "parts.1.weight")


def test_operand_factor_is_applied_at_matmul() -> None:
    scaled = unit_scale(Of(lambda m, a: m[0](input=a * 8), nn.Linear(W, 4)))
    scaled(X / rms(X))
    (decision,) = decided(scaled, "linear")
    (argument,) = decision.arguments
    assert isinstance(argument, Argument)
    assert argument.factor == pytest.approx(1 / 8, rel=0.02)
    assert math.isclose(decision.output, W**-0.5, rel_tol=1e-6)

"""The role of each parameter, found from its uses, and whether it is rescaled."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.capture.graph_matmuls import matmul_of
from lightning_unitscale.capture.graph_nodes import op_name, tensor_name
from lightning_unitscale.rules.flow import output_factor
from lightning_unitscale.rules.learning_rates import ParameterInfo, Role, u_mup_rate
from lightning_unitscale.rules.plan import ParameterPlan
from lightning_unitscale.rules.roles import plan_parameters
from lightning_unitscale.rules.transform import unit_scale
from tests.rules.models import GPT, Of, PostNorm, labels, tokens
from tests.rules.oracle import structure_of
from tests.zoo import Step, w

W = 16


def plans_of(
    module: nn.Module, *inputs: Any, init_weights: bool = True
) -> dict[str, ParameterPlan]:
    return plan_parameters(structure_of(module, *inputs), init_weights=init_weights)


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (8, 6, W)))


@pytest.mark.slow
def test_transformer_parameters_have_roles() -> None:
    plans = plans_of(GPT(32, 3), tokens())
    roles = {fqn: plan.info.role for fqn, plan in plans.items()}
    assert roles["tokens.weight"] is roles["positions.weight"] is Role.EMBEDDING
    assert roles["head.weight"] is Role.READOUT
    for name in ("attention.qkv", "attention.out", "mlp.0", "mlp.2"):
        assert roles[f"blocks.1.{name}.weight"] is Role.HIDDEN
        assert roles[f"blocks.1.{name}.bias"] is Role.BIAS
        assert plans[f"blocks.1.{name}.weight"].info.num_residuals == 6
    assert roles["blocks.2.norm1.weight"] is roles["norm.bias"] is Role.NORM
    assert plans["blocks.0.norm1.weight"].info.num_residuals == 6
    assert plans["head.weight"].info.num_residuals == 0
    assert {plan.action for plan in plans.values()} == {"scaled", "zeroed", "left"}
    for fqn, item in plans.items():
        is_matrix = item.info.role in {Role.EMBEDDING, Role.READOUT, Role.HIDDEN}
        expected = "left" if "norm" in fqn else "scaled" if is_matrix else "zeroed"
        assert item.action == expected, fqn
    up = plans["blocks.0.mlp.0.weight"].info
    assert up == ParameterInfo("blocks.0.mlp.0.weight", Role.HIDDEN, 32, 128, 32, num_residuals=6)
    assert plans["head.weight"].info.fan_out == 64
    assert not any(plan.info.is_tied for plan in plans.values())


def test_tied_readout_is_scaled_once() -> None:
    plans = plans_of(GPT(32, 1, is_tied=True), tokens())
    assert "head.weight" not in plans
    tied = plans["tokens.weight"]
    assert tied.info.role is Role.READOUT and tied.info.is_tied
    # A rate that an embedding tolerates and that a readout of any width needs.
    assert u_mup_rate(tied.info) == 1.0
    assert tied.action == "scaled"
    assert not plans["positions.weight"].info.is_tied


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "logits",
    [
        lambda m, h: nn.utils.parametrizations.weight_norm(m[1])(h),
        lambda m, h: F.linear(h, m[1].weight - m[1].weight.mean(0)),
        lambda m, h: F.normalize(h, dim=-1) @ F.normalize(m[1].weight, dim=-1).T,
        lambda m, h: h @ m[2](m[1].weight).T,
    ],
)
def test_readout_with_computed_weight(logits: Callable[..., Tensor]) -> None:
    parts = (nn.Linear(5, W), nn.Linear(W, 8), nn.Linear(W, W))
    if "parametrizations" in logits.__code__.co_names:
        nn.utils.parametrizations.weight_norm(parts[1])
        logits = lambda m, h: m[1](h)  # noqa: E731

    def loss(m: nn.ModuleList, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits(m, m[0](x).tanh()), y)

    structure = structure_of(Of(loss, *parts), x(6, 5), torch.randint(8, (6,)))
    (node,) = structure.readouts
    matmul = matmul_of(node)
    assert matmul is not None
    assert sorted(structure.flow.is_weight(operand.node) for operand in matmul.operands) == [
        False,
        True,
    ]
    # Its logits have RMS fan_in^-1/2, though both operands have RMS 1.
    scaled = unit_scale(Of(lambda m, x: loss(m, x, y), *parts))
    y = torch.randint(8, (600,))
    assert float(scaled(x(600, 5)).detach()) == pytest.approx(math.log(8), abs=0.1)


def test_matmul_without_weight_is_not_a_readout() -> None:
    def both_of_data(m: nn.ModuleList, x: Tensor) -> Tensor:
        scores = m[0](x) @ m[1](x).T
        return F.cross_entropy(scores, torch.arange(len(x)))

    assert not structure_of(Of(both_of_data, nn.Linear(5, W), nn.Linear(5, W)), x(6, 5)).readouts

    def both_of_weights(m: nn.ModuleList, x: Tensor) -> Tensor:
        one, other = (m[i].weight.T.tanh() for i in range(2))
        return m[1](m[0](x)).square().mean() + (one @ other).square().mean()

    parts = (nn.Linear(5, W), nn.Linear(W, 3))
    (readout,) = structure_of(Of(both_of_weights, *parts), x(6, 5)).readouts
    assert op_name(readout) == "linear"


def test_tied_hidden_layer_has_smaller_rate() -> None:
    def hidden_and_readout(m: nn.ModuleList, x: Tensor) -> Tensor:
        h = m[0](x)
        return F.linear(F.linear(h, m[1].weight).tanh(), m[1].weight).square().mean()

    plans = plans_of(Of(hidden_and_readout, nn.Linear(5, W), nn.Linear(W, W)), x(8, 5))
    tied = plans["parts.1.weight"].info
    assert (tied.role, tied.is_tied, u_mup_rate(tied)) == (Role.HIDDEN, True, W**-0.5)

    def forth_and_back(m: nn.ModuleList, x: Tensor) -> Tensor:
        return F.mse_loss(F.linear(F.linear(x, m[0].weight).relu(), m[0].weight.T), x)

    plans = plans_of(Of(forth_and_back, nn.Linear(40, 10)), x(8, 40))
    tied = plans["parts.0.weight"].info
    assert (tied.role, tied.is_tied, tied.fan_in, tied.fan_out) == (Role.READOUT, True, 10, 40)

    def twice_hidden(m: nn.ModuleList, x: Tensor) -> Tensor:
        h = F.linear(m[0](x).relu(), m[1].weight)
        return m[2](F.linear(h.relu(), m[1].weight.T)).square().mean()

    parts = (nn.Linear(5, 40), nn.Linear(40, 10), nn.Linear(40, 3))
    tied = plans_of(Of(twice_hidden, *parts), x(8, 5))["parts.1.weight"].info
    assert (tied.role, tied.is_tied, tied.fan_in) == (Role.HIDDEN, False, 40)


@pytest.mark.slow
def test_post_norm_encoder_parameters_have_roles() -> None:
    plans = plans_of(PostNorm(), tokens(), labels())
    assert plans["positions"].info.role is Role.EMBEDDING
    assert plans["positions"].action == "scaled"
    assert plans["layers.layers.0.self_attn.in_proj_weight"].action == "scaled"
    assert plans["layers.layers.1.linear1.weight"].info.num_residuals == 4
    assert plans["pooler.weight"].info.role is Role.HIDDEN
    assert plans["head.weight"].info.role is Role.READOUT


READOUTS: dict[str, tuple[Callable[..., Any], set[int]]] = {
    "cross_entropy": (lambda m, a: F.cross_entropy(m[1](m[0](a))[:, 0], labels(8)), {1}),
    "hand_written": (lambda m, a: ((m[1](m[0](a)) - a[..., :5]) ** 2).mean(), {1}),
    "sum": (lambda m, a: m[1](m[0](a)).tanh().sum(), {1}),
    "log_softmax": (lambda m, a: -m[1](m[0](a)).log_softmax(-1)[..., 0].mean(), {1}),
    "two_heads": (
        lambda m, a: F.mse_loss(m[1](h := m[0](a)), a[..., :5]) + m[2](h).square().mean(),
        {1, 2},
    ),
    "deep_supervision": (lambda m, a: (h := m[0](a)).mean() + m[1](h).square().mean(), {1}),
    "in_a_mapping": (lambda m, a: {"loss": m[1](m[0](a)).square().mean(), "other": a}, {1}),
    "no_loss": (lambda m, a: m[1](m[0](a)), set()),
    "loss_of_a_part": (lambda m, a: (m[1](m[0](a)), m[0](a).square().mean()), {0}),
}


@pytest.mark.parametrize("name", READOUTS)
def test_readouts_are_found_from_the_loss(name: str) -> None:
    function, expected = READOUTS[name]
    module = Of(function, nn.Linear(W, W), nn.Linear(W, 5), nn.Linear(W, 5))
    plans = plans_of(module, x())
    found = {fqn for fqn, plan in plans.items() if plan.info.role is Role.READOUT}
    assert found == {f"parts.{index}.weight" for index in expected}


def test_residual_projection_is_not_a_readout() -> None:
    module = Of(
        lambda m, a: (a + m[1](m[0](a).relu())).square().mean(), *map(nn.Linear, (W, W), (W, W))
    )
    assert structure_of(module, x()).readouts == frozenset()


def _one(module: nn.Module, fqn: str, *inputs: Any) -> ParameterPlan:
    return plans_of(module, *inputs)[fqn]


def _mean(result: Tensor) -> Tensor:
    return result.square().mean()


USES: dict[str, tuple[Callable[[], nn.Module], Role, str]] = {
    "linear_without_bias": (
        lambda: Step(lambda a, b: F.linear(b, a), w(8, W)),
        Role.READOUT, "scaled",
    ),
    "linear_keywords": (
        lambda: Step(lambda a, b: F.linear(input=b, weight=a), w(8, W)),
        Role.READOUT, "scaled",
    ),
    "matmul_operator": (lambda: Step(lambda a, b: b @ a, w(W, 8)), Role.READOUT, "scaled"),
    "transposed": (lambda: Step(lambda a, b: b @ a.t(), w(8, W)), Role.READOUT, "scaled"),
    "einsum": (
        lambda: Step(lambda a, b: torch.einsum("oc,btc->bto", a, b), w(8, W)),
        Role.READOUT, "scaled",
    ),
    "a_part": (lambda: Step(lambda a, b: b @ a[:, :8], w(W, 12)), Role.READOUT, "scaled"),
    "joined": (
        lambda: Step(lambda a, c, b: b @ torch.cat([a, c]).t(), w(8, W), w(4, W)),
        Role.READOUT, "scaled",
    ),
    "joined_biases": (
        lambda: Step(
            lambda a, c, m, b: m(F.linear(b, m.weight, torch.cat([a, c]))),
            w(8), w(8), nn.Linear(W, W),
        ),
        Role.BIAS, "zeroed",
    ),
    "joined_for_an_unknown_use": (
        lambda: Step(
            lambda a, c, b: b @ torch.linalg.matrix_exp(torch.stack([a, c])).sum(0),
            w(W, W), w(W, W),
        ),
        Role.OTHER, "left",
    ),
    "learned_token": (
        lambda: Step(
            lambda a, m, b: m(torch.cat([a.expand(8, 1, W), b], 1)), w(1, 1, W), nn.Linear(W, W)
        ),
        Role.EMBEDDING, "scaled",
    ),
    "added_positions": (
        lambda: Step(lambda a, m, b: m(m(b) + a), w(6, W), nn.Linear(W, W)),
        Role.EMBEDDING, "scaled",
    ),
    "looked_up": (
        lambda: Step(lambda a, m, b: m(a[torch.zeros(3).long()]), w(9, W), nn.Linear(W, W)),
        Role.EMBEDDING, "scaled",
    ),
    "added_by_hand": (
        lambda: Step(lambda a, m, b: m(m(b) + a), w(W), nn.Linear(W, W)), Role.BIAS, "zeroed",
    ),
    "gain": (lambda: Step(lambda a, m, b: m(b) * a, w(W), nn.Linear(W, W)), Role.NORM, "left"),
    "norm": (
        lambda: Step(lambda a, m, b: F.layer_norm(m(b), (W,), a), w(W), nn.Linear(W, W)),
        Role.NORM, "left",
    ),
    "penalty": (lambda: Step(lambda a, b: b @ a + a.norm(), w(W, W)), Role.OTHER, "left"),
    "spectrum": (
        lambda: Step(lambda a, b: b @ torch.linalg.matrix_exp(a), w(W, W)), Role.OTHER, "left",
    ),
    "renormed_embedding": (
        lambda: Step(
            lambda a, b: F.embedding(torch.zeros(3).long(), a, max_norm=1.0), w(9, W)
        ),
        Role.OTHER, "left",
    ),
}  # fmt: skip


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("name", USES)
def test_role_and_action_by_use(name: str) -> None:
    make, role, action = USES[name]
    plan = _one(make(), "w0", x())
    assert (plan.info.role, plan.action) == (role, action), plan.reason


def test_unknown_use_keeps_parameter_unscaled_with_reason() -> None:
    module = Of(
        lambda m, a: m[1](m[0](a)).square().mean() + torch.linalg.svdvals(m[0].weight).sum(),
        nn.Linear(W, W),
        nn.Linear(W, 5),
    )
    plans = plans_of(module, x())
    assert plans["parts.0.weight"].action == "left"
    assert "linalg_svdvals, which no rule rewrites" in plans["parts.0.weight"].reason
    assert plans["parts.0.weight"].info.role is Role.OTHER
    assert plans["parts.1.weight"].action == "scaled"


def test_parametrized_weights_are_not_scaled() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(W, W))
    plans = plans_of(Of(lambda m, a: m[1](m[0](a)).square().mean(), layer, nn.Linear(W, 5)), x())
    originals = [fqn for fqn in plans if "original" in fqn]
    assert len(originals) == 2
    assert all(
        plans[fqn].action == "left" and "weight_norm" in plans[fqn].reason for fqn in originals
    )


def test_attention_module_weights_are_scaled() -> None:
    attention = nn.MultiheadAttention(W, 4, kdim=8, vdim=12, add_bias_kv=True, batch_first=True)
    module = Of(lambda m, a: m[0](a, a[..., :8], a[..., :12])[0].square().mean(), attention)
    structure = structure_of(module, x())
    plans = plan_parameters(structure, init_weights=True)
    for name, fan_in in (("q", W), ("k", 8), ("v", 12)):
        plan = plans[f"parts.0.{name}_proj_weight"]
        assert plan.action == "scaled" and plan.info.fan_in == fan_in
    assert plans["parts.0.out_proj.weight"].info.role is Role.READOUT
    assert all(
        use.kind in {"weight", "bias", "sum"} for uses in structure.uses.values() for use in uses
    )


def test_fans_of_convolutions() -> None:
    module = Of(
        lambda m, a: m[2](m[1](m[0](a))).square().mean(),
        nn.Conv1d(W, 12, (3,), padding=(1,), groups=4),
        nn.ConvTranspose1d(12, 6, 4, stride=2),
        nn.Conv1d(6, 5, 1),
    )
    infos = {fqn: value.info for fqn, value in plans_of(module, x(8, W, 9)).items()}
    assert infos["parts.0.weight"].fan_in == W // 4 * 3
    assert infos["parts.0.weight"].role is Role.INPUT
    assert infos["parts.0.bias"].fan_out == 12
    assert infos["parts.1.weight"].role is Role.HIDDEN
    assert infos["parts.2.weight"].role is Role.READOUT
    assert infos["parts.2.weight"].fan_in == 6


def test_init_weights_false_keeps_roles() -> None:
    plans = plans_of(GPT(32, 1), tokens(), init_weights=False)
    assert {plan.action for plan in plans.values()} == {"left"}
    assert plans["head.weight"].info.role is Role.READOUT
    assert plans["head.weight"].reason == "init_weights=False"


def test_unused_parameter_has_no_plan() -> None:
    module = Of(lambda m, a: m[0](a).square().mean(), nn.Linear(W, W), nn.Linear(W, W))
    assert set(plans_of(module, x())) == {"parts.0.weight", "parts.0.bias"}


def test_shared_block_counts_its_branches() -> None:
    def function(m: nn.ModuleList, a: Tensor) -> Tensor:
        h = m[0](a)
        for _ in range(3):
            h = h + m[1](h)
        return h.square().mean()

    structure = structure_of(Of(function, nn.Linear(W, W), nn.Linear(W, W)), x())
    plans = plan_parameters(structure, init_weights=True)
    assert plans["parts.1.weight"].info.num_residuals == 3
    assert len(structure.uses["parts.1.weight"]) == 3


@pytest.mark.slow
def test_output_factor_does_not_depend_on_call_form() -> None:
    forms: list[Callable[..., Tensor]] = [
        lambda m, a: F.linear(a, m[0].weight),
        lambda m, a: F.linear(input=a, weight=m[0].weight),
        lambda m, a: a @ m[0].weight.mT,
        lambda m, a: torch.matmul(a, other=m[0].weight.T),
        lambda m, a: a.matmul(m[0].weight.t()),
        lambda m, a: torch.mm(a.flatten(0, 1), m[0].weight.T),
        lambda m, a: torch.einsum("btc,oc->bto", [a, m[0].weight]),
        lambda m, a: torch.addmm(torch.zeros(8), a.flatten(0, 1), m[0].weight.T),
        lambda m, a: torch.tensordot(a, m[0].weight.T, 1),
    ]
    for form in forms:
        flow = structure_of(Of(form, nn.Linear(W, 8)), x()).flow
        factors = {
            tensor_name(node): output_factor(node)
            for node in flow.nodes
            if node in flow.readers(flow.outputs[0]) or node is flow.outputs[0]
        }
        assert list(factors.values()) == [pytest.approx(W**-0.5)], factors

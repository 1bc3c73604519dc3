"""The rewritten function does not depend on the form of the code."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.rules.plan import RulePlan
from lightning_unitscale.rules.rewrite import RuleRewrite
from lightning_unitscale.rules.transform import unit_scale
from lightning_unitscale.rules.unit_weights import ParameterGradients
from tests.helpers import assert_same_bits, run
from tests.rules.models import Of
from tests.rules.oracle import (
    decisions_of,
    parameters_of,
    pass_of,
    plan_of,
    rules_alone,
)

W = 16
X = torch.randn(6, 5, W, generator=torch.Generator().manual_seed(2))
IMAGES = torch.randn(4, W, 6, 6, generator=torch.Generator().manual_seed(2))
Form = Callable[[nn.ModuleList, Tensor], Tensor]


def _in_place(name: str, *args: object) -> Form:
    def form(m: nn.ModuleList, x: Tensor) -> Tensor:
        h = m[0](x)
        getattr(h, name)(*args)
        return m[1](h)

    return form


def _in_place_operators(m: nn.ModuleList, x: Tensor) -> Tensor:
    h = m[0](x)
    h += 1
    h *= 2
    h /= 4
    return m[1](h)


def _residual_in_place(m: nn.ModuleList, x: Tensor) -> Tensor:
    h = m[0](x)
    branch = F.gelu(m[1](h))
    h += branch
    return h


def _residual_under_another_name(m: nn.ModuleList, x: Tensor) -> Tensor:
    h = skip = m[0](x)
    h = F.gelu(m[1](h))
    skip.add_(h)
    return skip


# Forms of one function, the first of which is the plainest.
GROUPS: dict[str, list[Form]] = {
    "linear": [
        lambda m, x: m[1](m[0](x).relu()),
        lambda m, x: F.linear(m[0](x).relu(), m[1].weight, m[1].bias),
        lambda m, x: F.linear(bias=m[1].bias, weight=m[1].weight, input=m[0](x).relu()),
        lambda m, x: m[0](x).relu() @ m[1].weight.mT + m[1].bias,
        lambda m, x: torch.matmul(m[0](x).relu(), other=m[1].weight.t()) + m[1].bias,
        lambda m, x: m[0](x).relu().matmul(m[1].weight.T).add(m[1].bias),
        lambda m, x: torch.addmm(m[1].bias, m[0](x).relu().flatten(0, 1), m[1].weight.T).view(
            6, 5, W
        ),
        lambda m, x: torch.einsum("btc,oc->bto", m[0](x).relu(), m[1].weight) + m[1].bias,
        lambda m, x: torch.add(input=m[1].bias, other=m[0](x).relu() @ m[1].weight.mT),
    ],
    "activation": [
        lambda m, x: m[1](F.relu(m[0](x))),
        lambda m, x: m[1](torch.relu(m[0](x))),
        lambda m, x: m[1](m[0](x).relu()),
        lambda m, x: m[1](F.relu(input=m[0](x), inplace=True)),
        lambda m, x: m[1](nn.ReLU(inplace=True)(m[0](x))),
        _in_place("relu_"),
    ],
    "softmax": [
        lambda m, x: m[1](F.softmax(m[0](x), dim=-1)),
        lambda m, x: m[1](torch.softmax(input=m[0](x), dim=-1)),
        lambda m, x: m[1](m[0](x).softmax(-1)),
        lambda m, x: m[1](nn.Softmax(dim=-1)(m[0](x))),
    ],
    "arithmetic": [
        lambda m, x: m[1]((m[0](x) + 1) * 2 / 4),
        lambda m, x: m[1](torch.div(torch.mul(torch.add(m[0](x), 1), 2), 4)),
        lambda m, x: m[1](m[0](x).add(1).mul(2).div(4)),
        lambda m, x: m[1](torch.mul(input=torch.add(input=m[0](x), other=1), other=2) / 4),
        lambda m, x: m[1](m[0](x).add_(1).mul_(2).div_(4)),
        _in_place_operators,
    ],
    "residual": [
        lambda m, x: (h := m[0](x)) + F.gelu(m[1](h)),
        lambda m, x: F.gelu(m[1](h := m[0](x))) + h,
        lambda m, x: torch.add(h := m[0](x), F.gelu(m[1](h))),
        lambda m, x: (h := m[0](x)).add(other=F.gelu(m[1](h))),
        _residual_in_place,
        _residual_under_another_name,
    ],
    "norm": [
        lambda m, x: m[1](F.layer_norm(m[0](x), (W,))),
        lambda m, x: m[1](F.layer_norm(input=m[0](x), normalized_shape=(W,))),
        lambda m, x: m[1](torch.layer_norm(m[0](x), (W,))),
        lambda m, x: m[1](nn.LayerNorm(W)(m[0](x))),
    ],
    "checkpoint": [
        lambda m, x: m[0](x).tanh() + m[1](m[0](x).tanh()),
        lambda m, x: (
            checkpoint(lambda a: m[0](a).tanh(), x, use_reentrant=False)
            + checkpoint(lambda a: m[1](m[0](a).tanh()), x, use_reentrant=False)
        ),
    ],
}


def _model(form: Form) -> nn.Module:
    torch.manual_seed(0)
    return Of(form, nn.Linear(W, W), nn.Linear(W, W))


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("name", GROUPS)
def test_all_call_forms_give_same_function(name: str) -> None:
    results = []
    for form in GROUPS[name]:
        scaled = unit_scale(_model(form))
        scaled(X)
        result = run(scaled, X)
        # A bias may be added before or after the factor, which its learning rate depends on.
        scales = {fqn: value.info.output_scale for fqn, value in parameters_of(scaled).items()}
        pass_of(scaled, ParameterGradients).settle()
        exponents = pass_of(scaled, ParameterGradients).log2_factors
        gradients = {
            fqn: param * 2.0 ** -exponents[fqn] / scales[fqn]
            for fqn, param in result["parameters"].items()
        }
        results.append((result["output"], gradients))
    for item in results[1:]:
        torch.testing.assert_close(item, results[0], rtol=1e-3, atol=1e-3)
    assert len(results) == len(GROUPS[name])


CONVOLUTIONS: list[Form] = [
    lambda m, x: m[0](x),
    lambda m, x: F.conv2d(x, m[0].weight, m[0].bias, (2, 1), (1, 0), 1, 2),
    lambda m, x: torch.conv2d(
        input=x, weight=m[0].weight, bias=m[0].bias, stride=(2, 1), padding=(1, 0), groups=2
    ),
    lambda m, x: (
        F.conv2d(x, m[0].weight, stride=(2, 1), padding=(1, 0), groups=2) + m[0].bias[:, None, None]
    ),
]


def test_all_convolution_call_forms_give_same_function() -> None:
    results = []
    for form in CONVOLUTIONS:
        torch.manual_seed(0)
        scaled = unit_scale(Of(form, nn.Conv2d(W, 8, 3, stride=(2, 1), padding=(1, 0), groups=2)))
        results.append(scaled(IMAGES))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
    weight = scaled.parts[0].weight
    expected = F.conv2d(IMAGES, weight, None, (2, 1), (1, 0), 1, 2) * (W // 2 * 9) ** -0.5
    torch.testing.assert_close(results[0], expected)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))


def _rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2)


def _softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def _rotary(x: Tensor) -> Tensor:
    angle = torch.arange(5)[:, None] * 0.3 ** torch.arange(W // 2).repeat(2)
    return x * angle.cos() + torch.cat([-x[..., W // 2 :], x[..., : W // 2]], -1) * angle.sin()


def _layer_norm(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()


@pytest.mark.slow_cases(4)
@pytest.mark.parametrize(
    "island",
    [
        _gelu,
        _rms_norm,
        _softmax,
        _rotary,
        _layer_norm,
        lambda x: x * torch.sigmoid(x + 1) - x.clamp(min=-1) / 3,
        lambda x: torch.where(x > 0, x, x * 0.1) + x.abs().sqrt(),
        lambda x: (x.square() + 1).log(),
    ],
)
def test_operations_between_matmuls_are_not_changed(island: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(W, W), nn.Linear(W, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = self.one(x)
            y = island(h)
            return self.two(y).square().mean(), h, y

    scaled = unit_scale(Model())
    scaled(X)
    _, h, y = scaled(X)
    torch.testing.assert_close(h, X @ scaled.one.weight.T * W**-0.5)
    torch.testing.assert_close(y, island(h), rtol=0, atol=0)
    names = {name for name, decision in decisions_of(scaled).items() if decision.changes}
    assert names <= {"one.linear", "two.linear"}


def test_scaled_result_keeps_tensor_name() -> None:
    scaled = unit_scale(_model(GROUPS["linear"][0]))
    scaled(X)
    graph = steps_of(scaled).steps["forward"].graphs[0]
    names: list[str] = []

    def read(made: torch.fx.GraphModule) -> torch.fx.GraphModule:
        names.extend(n.meta["tensor_name"] for n in made.graph.nodes if n.op != "output")
        return made

    graph.interpret(read, _inputs(scaled, graph))
    assert "parts.0.linear" in names and "parts.0.linear:unscaled" in names
    assert len(names) == len(set(names))


def _inputs(module: nn.Module, graph: object) -> list[Tensor]:
    parameters = dict(module.named_parameters())
    return [parameters[tensor.fqn] if tensor.fqn else X for tensor in graph.inputs]  # type: ignore[attr-defined]


def test_new_plan_applies_from_next_call() -> None:
    scaled = unit_scale(_model(GROUPS["linear"][0]))
    scaled(X)
    alone = rules_alone(scaled)
    with_factors = alone(X)
    pass_of(alone, RuleRewrite).plan = RulePlan()
    steps_of(alone).steps["forward"].invalidate()
    plain = alone(X)
    assert not torch.equal(plain, with_factors)
    expected = Of.forward(alone, X)
    torch.testing.assert_close(plain, expected, rtol=0, atol=0)
    assert "nothing to scale" in alone.explain()


def test_decision_for_other_operation_is_ignored() -> None:
    scaled = unit_scale(_model(lambda m, x: m[1](m[0](x)).tanh()))
    scaled(X)
    plan = plan_of(scaled)
    wrong = {**plan, "forward:tanh": plan["forward:parts.0.linear"]}
    assert wrong["forward:tanh"].output == 0.25
    alone = rules_alone(scaled)
    pass_of(alone, RuleRewrite).plan = RulePlan(wrong, plan.parameters)
    steps_of(alone).steps["forward"].invalidate()
    torch.testing.assert_close(alone(X), rules_alone(scaled)(X), rtol=0, atol=0)


def test_undecided_read_of_scaled_parameter_is_an_error() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(W, W), nn.Linear(W, 3)

        def forward(self, x: Tensor, *, decay: bool) -> Tensor:
            loss = self.two(self.one(x).relu()).square().mean()
            return loss + self.one.weight.square().sum() if decay else loss

    scaled = unit_scale(Branching())
    scaled(X, decay=False)
    with pytest.raises(
        RuntimeError,
        match=r"square reads one\.weight at .* An earlier step has set it to unit scale",
    ):
        scaled(X, decay=True)
    other = unit_scale(Branching())
    other(X, decay=True)
    assert plan_of(other).parameters["one.weight"].action == "left"
    assert plan_of(other).parameters["two.weight"].action == "scaled"
    other(X, decay=False)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "other", [lambda h: h + 1, lambda h: h + torch.tanh(h), lambda h: torch.tanh(h) + 0.5 * h]
)
def test_add_in_later_branch_has_its_own_factors(
    other: Callable[[Tensor], Tensor], first: bool
) -> None:
    def function(m: nn.ModuleList, x: Tensor, is_residual: bool) -> Tensor:
        h = m[0](x)
        return h + m[1](h) if is_residual else other(h)

    torch.manual_seed(0)
    scaled = unit_scale(Of(function, nn.Linear(W, W), nn.Linear(W, W)), residual=(1.0, 1.0))
    scaled(X, first)
    h = X @ scaled.parts[0].weight.T * W**-0.5
    torch.testing.assert_close(scaled(X, False), other(h))
    if first:
        branch = h @ scaled.parts[1].weight.T * W**-0.5
        torch.testing.assert_close(scaled(X, True), (h + branch) * 0.5**0.5)


def test_every_later_branch_has_its_own_residual_weight() -> None:
    """The adds of all branches have the name ``add``, and each is a separate residual add."""

    def function(m: nn.ModuleList, x: Tensor, branch: int) -> Tensor:
        h = m[0](x)
        return h + m[branch](h) if branch else h.tanh()

    torch.manual_seed(0)
    parts = (nn.Linear(W, W, bias=False) for _ in range(5))
    scaled = unit_scale(Of(function, *parts), residual=(1.0, 1.0))
    scaled(X, 0)
    for _ in range(2):
        for branch in range(1, 5):
            h = X @ scaled.parts[0].weight.T * W**-0.5
            weight = scaled.parts[branch].weight
            torch.testing.assert_close(scaled(X, branch), (h + h @ weight.T * W**-0.5) * 0.5**0.5)
    report = scaled.explain()
    assert "forward:add " in report and "forward:add~4 " in report and "add~5" not in report


def test_later_branch_that_differs_by_one_add() -> None:
    def function(m: nn.ModuleList, x: Tensor, is_residual: bool) -> Tensor:
        h = m[0](x)
        branch = m[1](h)
        return h + branch if is_residual else branch

    torch.manual_seed(0)
    scaled = unit_scale(Of(function, nn.Linear(W, W), nn.Linear(W, W)), residual=(1.0, 1.0))
    torch.testing.assert_close(
        scaled(X, True),
        (X @ scaled.parts[0].weight.T * W**-0.5) * 0.5**0.5 + scaled(X, False) * 0.5**0.5,
    )


def test_copied_pass_has_separate_plan() -> None:
    rewrite = RuleRewrite()
    copied = copy.deepcopy(rewrite)
    copied.plan = RulePlan({"forward:a": None})  # type: ignore[dict-item]
    assert len(rewrite.plan) == 0


@pytest.mark.parametrize("shape", [(6, 5, W), (1, 5, W), (3, 9, W)])
def test_other_shapes_have_the_same_factors(shape: tuple[int, ...]) -> None:
    scaled = unit_scale(_model(GROUPS["linear"][0]))
    scaled(X)
    first, second = (part.weight for part in scaled.parts)
    x = torch.randn(*shape)
    h = F.relu(x @ first.T * W**-0.5) * 2**0.5
    torch.testing.assert_close(scaled(x), h @ second.T * W**-0.5, rtol=1e-4, atol=1e-5)
    assert_same_bits(scaled(x), scaled(x))


class Target(nn.Module):
    """Reads one activation with and without gradients, as an encoder and its teacher do."""

    def __init__(self, first: Callable[[], Any], is_shared: bool) -> None:
        super().__init__()
        self.first, self.is_shared = first, is_shared
        self.a, self.b, self.c = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu() * 3.0
        with self.first():
            # Apart, the operand of the second matmul has a factor of its own.
            target = self.b(h if self.is_shared else h.clone()).clone()
        return (self.c(h) - target.clone()).square().mean()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_operand_shared_with_no_grad_read_keeps_gradient(
    context: Callable[[], Any],
) -> None:
    runs = []
    for is_shared in (True, False):
        torch.manual_seed(0)
        scaled = unit_scale(Target(context, is_shared))
        loss = scaled(X)
        loss.backward()
        gradients = {fqn: param.grad for fqn, param in scaled.named_parameters()}
        assert gradients["a.weight"] is not None and gradients["b.weight"] is None
        runs.append([loss.detach(), gradients["a.weight"], gradients["c.weight"]])
    assert_same_bits(*runs)

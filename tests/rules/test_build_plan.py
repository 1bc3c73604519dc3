"""Plans of steps: rehearsals have no side effects, and the work grows with the model."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import lightning_unitscale.rules as rules
from lightning_unitscale.capture.graph_nodes import is_same_graph
from lightning_unitscale.capture.module_steps import captured_forward
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.rules import build_plan
from lightning_unitscale.rules.build_plan import plan_step
from lightning_unitscale.rules.decide import Decider
from lightning_unitscale.rules.plan import RuleOptions, RulePlan
from lightning_unitscale.rules.residuals import branch_weights, find_residuals
from lightning_unitscale.rules.roles import find_structure, plan_parameters
from lightning_unitscale.rules.unit_weights import set_to_unit_scale
from tests.helpers import IS_TORCH_2_11, assert_same_bits
from tests.rules.models import GPT, MODELS, Of, tokens
from tests.rules.oracle import flow_of

W = 16


def plan(
    module: nn.Module, *inputs: Any, known: RulePlan | None = None, **options: Any
) -> RulePlan:
    """A plan for a copy of a module."""
    _, step = captured_forward(module, "test")
    return plan_step(step, inputs, {}, RuleOptions(**options), known or RulePlan())


class Noisy(nn.Module):
    """Draws random numbers, keeps statistics, and writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(W, W), nn.BatchNorm1d(W), nn.Linear(W, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = F.dropout(self.norm(self.linear(x)), 0.5) + torch.randn(W)
        x.mul_(2)
        return self.head(h).square().mean()


def test_rehearsals_have_no_side_effects() -> None:
    module, x = Noisy(), torch.randn(8, W)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    given, random_state = x.clone(), torch.get_rng_state()
    new, step = captured_forward(module, "test")
    found = plan_step(step, (x,), {}, RuleOptions(), RulePlan())
    assert len(found) > 5
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(x, given)
    for value in (module, new):
        assert_same_bits(dict(value.state_dict()), state)
        assert all(parameter.grad is None for parameter in value.parameters())
        assert value.training


@pytest.mark.parametrize("breaks", [False, True])
def test_weight_writes_of_rehearsal_are_undone(breaks: bool) -> None:
    def clipped(module: Of, x: Tensor) -> Tensor:  # as the critic of a WGAN is
        with torch.no_grad():
            module[0].weight.clamp_(-0.01, 0.01)
        h = module[0](x)
        if breaks:
            torch._dynamo.graph_break()
        return h.square().mean()

    module, step = captured_forward(Of(clipped, nn.Linear(W, W)), "test")
    before = {fqn: param.detach().clone() for fqn, param in module.named_parameters()}
    plan_step(step, (torch.randn(8, W),), {}, RuleOptions(), RulePlan())
    for fqn, param in module.named_parameters():
        assert_same_bits(param.detach(), before[fqn])


@pytest.mark.slow
def test_plan_does_not_depend_on_batch() -> None:
    module = GPT(32, 1)
    assert plan(module, tokens()).parameters == plan(module, tokens(8, 2)).parameters


def test_caches_filled_in_first_run_are_planned_after() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.size = nn.Linear(W, W), None

        def forward(self, x: Tensor) -> Tensor:
            if self.size is None:
                self.size = x.shape[-1] ** 0.5
                return self.linear(x.tanh()).square().mean()
            return self.linear(x * self.size).square().mean()

    module = Caching()
    new, step = captured_forward(module, "test")
    found = plan_step(step, (torch.randn(4, W),), {}, RuleOptions(), RulePlan())
    names = [name for name in found if "linear" in name]
    assert names
    assert new.size is None  # undone like everything else


@pytest.mark.skipif(
    IS_TORCH_2_11,
    reason="until torch 2.11 Dynamo does not see that an attribute of a class has changed",
)
def test_step_with_other_graphs_in_each_run_is_an_error() -> None:
    calls: list[int] = []

    class Restless(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            torch._dynamo.graph_break()  # otherwise nothing but the graph runs
            for _ in range(len(calls)):
                x = x.sin()
            return x

    with pytest.raises(
        RuntimeError,
        match=r"Restless\.forward cannot.*: it ran other graphs in each of 3 runs.*need",
    ):
        plan(Restless(), torch.randn(4, W))


def test_scaled_step_with_too_many_graph_calls_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A solver takes any number of steps for weights at RMS 1; here a single one is too many."""
    module = nn.Sequential(nn.Linear(W, W), nn.Tanh())
    assert plan(module, torch.randn(4, W))
    monkeypatch.setattr(build_plan, "_MANY_TIMES", 0)
    with pytest.raises(CaptureError, match=r"Sequential\.forward .*: scaled, it runs its graphs"):
        plan(module, torch.randn(4, W))


def test_branch_on_activation_size_is_an_error() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(W, W), nn.Linear(W, W)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if x.abs().max().item() > 0.5:
                x = x.tanh()
            return self.last(x).square().mean()

    with pytest.raises(RuntimeError, match="branches on the size of activations"):
        plan(Branching(), torch.randn(4, W) * 0.001)


class FreshClass(nn.Module):
    """Hands its result over in a class that it defines anew in every call, over a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        class Output:
            def __init__(self, value: Tensor) -> None:
                self.value = value

        out = Output(self.first(x).relu())
        torch._dynamo.graph_break()
        scale = out.value.new_ones(())
        return self.last(out.value * scale).square().mean()


def test_graph_recaptured_in_every_call_counts_once() -> None:
    module, x = FreshClass(), torch.randn(8, W)
    new, step = captured_forward(module, "test")
    found = plan_step(step, (x,), {}, RuleOptions(), RulePlan())
    # It was captured several times: the class is another one each time.
    assert len(step.graphs) > 1
    assert {"first.linear", "last.linear"} <= {name.partition(":")[2] for name in found}
    assert set(found.parameters) == dict(new.named_parameters()).keys()


def _captured(module: nn.Module, x: Tensor) -> fx.GraphModule:
    _, step = captured_forward(module, "test")
    step(x)
    return step.graphs[0].base


class Constant(nn.Module):
    def __init__(self, factor: float, size: int = W) -> None:
        super().__init__()
        self.linear, self.factor, self.size = nn.Linear(W, W), factor, size

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, : self.size] * self.factor


def test_same_graphs_are_recognized() -> None:
    x = torch.randn(8, W)
    first = _captured(Constant(2.0), x)
    assert is_same_graph(first, _captured(Constant(2.0), x))
    others = (
        (Constant(3.0), x),
        (Constant(2.0, 3), x),
        (Constant(2.0).requires_grad_(False), x),
        (Constant(2.0), x[:4]),
        (nn.Linear(W, W), x),
    )
    for module, given in others:
        assert not is_same_graph(first, _captured(module, given))


@pytest.mark.slow
def test_second_step_keeps_earlier_decisions() -> None:
    module, inputs = GPT(32, 1), (tokens(),)
    first = plan(module, *inputs)
    other = RulePlan(
        {name.replace("forward:", "training_step:"): value for name, value in first.items()},
        first.parameters,
    )
    set_to_unit_scale(module, first.parameters)
    both = plan(module, tokens(9, 1), known=other)
    for name, value in first.items():
        assert both[name] == value
        assert both[name.replace("forward:", "training_step:")] == value
    assert both.parameters == first.parameters


def test_later_unknown_read_of_scaled_parameter_is_an_error() -> None:
    module = nn.Linear(W, W)
    known = plan(Of(lambda m, x: m[0](x).square().mean(), module), torch.randn(4, W))
    other = Of(lambda m, x: m[0](x).mean() + torch.linalg.svdvals(m[0].weight).sum(), module)
    with pytest.raises(
        CaptureError,
        match=r"svdvals reads parts\.0\.weight at \S+test_build_plan.py:\d+\. An earlier step has "
        r"set it to unit scale.*Register a rule",
    ):
        plan(other, torch.randn(4, W), known=known)


def _merge(module: nn.Linear, delta: Tensor) -> None:
    module.weight.data += delta


def test_merging_into_scaled_weight_is_an_error() -> None:
    module, delta = nn.Linear(W, W), torch.randn(W, W)
    known = plan(Of(lambda m, x: m[0](x).square().mean(), module), torch.randn(4, W))

    def merged(m: Any, x: Tensor) -> Tensor:
        _merge(m[0], delta)
        return m[0](x).mean()

    with pytest.raises(
        CaptureError, match=r"the step takes the numbers of parts\.0\.weight by"
    ) as e:
        plan(Of(merged, module), torch.randn(4, W), known=known)
    assert "An adapter that is not merged into its layer computes the same" in str(e.value)


def test_bias_has_output_scale_of_its_matmul() -> None:
    found = plan(Of(lambda m, x: m[1](m[0](x)).mean(), nn.Linear(W, 8), nn.Linear(8, 4)),
                 torch.randn(4, W))  # fmt: skip
    infos = {fqn: param.info for fqn, param in found.parameters.items()}
    assert infos["parts.0.bias"].output_scale == pytest.approx(W**-0.5)
    assert infos["parts.1.bias"].output_scale == pytest.approx(1 / 8)
    assert infos["parts.0.weight"].output_scale == 1.0


@pytest.mark.slow
def test_plan_without_gradients_is_the_same() -> None:
    module, inputs = MODELS["gpt"]()
    with torch.no_grad():
        found = plan(module, *inputs)
        _, step = captured_forward(module, "test")
        bare = plan_step(step, inputs, {}, RuleOptions(), RulePlan(), backward=False)
    assert found == bare == plan(module, *inputs)


# Work is counted in lines of the rules' code that were run, and in calls that read everything.


class Chain(nn.Module):
    """Residual blocks of all kinds in a row."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(num_blocks))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for index, part in enumerate(self.parts):
            kind = index % 4
            branch = part(F.layer_norm(x, (4,)) if kind == 1 else x)
            x = F.layer_norm(x + branch, (4,)) if kind == 2 else x + torch.tanh(branch)
        return self.head(x).square().mean()


class Lines:
    """Counts the lines of the rules that run inside the ``with`` block."""

    def __init__(self) -> None:
        self.count = 0
        self._folder = os.path.dirname(rules.__file__ or "")
        self._previous: Any = None

    def __enter__(self) -> "Lines":
        self._previous = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)

    def _called(self, frame: Any, event: str, argument: Any) -> Any:
        return self._ran if frame.f_code.co_filename.startswith(self._folder) else None

    def _ran(self, frame: Any, event: str, argument: Any) -> Any:
        self.count += event == "line"
        return self._ran


def _lines_per_block(num_blocks: int) -> dict[str, float]:
    flow = flow_of(Chain(num_blocks), torch.randn(2, 4))
    work: dict[str, float] = {}

    def counted(name: str, function: Callable[[], Any]) -> Any:
        with Lines() as lines:
            result = function()
        work[name] = lines.count / num_blocks
        return result

    residuals = counted("residuals", lambda: find_residuals(flow))
    assert len(residuals) == num_blocks
    structure = counted("structure", lambda: find_structure(flow))
    parameters = counted("parameters", lambda: plan_parameters(structure, init_weights=True))
    counted("weights", lambda: branch_weights(residuals, RuleOptions()))
    decider = Decider(structure, parameters, RuleOptions(), lambda node: None)

    def decide() -> None:
        for node in flow.nodes:
            decision = decider.before(node)
            if decision is not None:
                decider.after(node, decision)

    counted("decisions", decide)
    assert len(decider.decisions) > 2 * num_blocks
    return work


@pytest.mark.slow
def test_work_grows_linearly_from_32_to_256_blocks() -> None:
    middle, large = _lines_per_block(32), _lines_per_block(256)
    for name, lines in large.items():
        assert lines < 1.3 * middle[name], name  # a quadratic part would make it eight times

"""Predicted costs of a pipeline."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_unitscale.functional.scale import is_transforming
from lightning_unitscale.pipeline import (
    SplitPoint,
    balanced_split,
    explain_pipeline,
    pipe_split,
    pipeline,
)
from lightning_unitscale.pipeline.balance import possible_cuts
from lightning_unitscale.pipeline.captured_program import CalledSteps, sets_up
from lightning_unitscale.pipeline.cuts import insert_mark
from lightning_unitscale.pipeline.explain import PipelinePlan, explain_step, plan_of
from lightning_unitscale.pipeline.schedules import simulate_1f1b


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_microbatches", [7, 8, 32])
def test_bubble_of_equal_stages(num_stages: int, num_microbatches: int) -> None:
    timeline = simulate_1f1b([1.0] * num_stages, [2.0] * num_stages, num_microbatches)
    expected = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert timeline.bubble == pytest.approx(expected)
    assert timeline.seconds == pytest.approx(3 * (num_microbatches + num_stages - 1))
    assert len(timeline.work) == 2 * num_stages * num_microbatches


def test_slowest_stage_determines_step_time() -> None:
    timeline = simulate_1f1b([1.0, 3.0], [2.0, 6.0], 4)
    # The second stage is busy from the first microbatch's arrival to its last backward pass.
    assert timeline.seconds == 1 + 4 * 9 + 2
    assert timeline.picture().splitlines()[1].startswith("stage 1 |.")


def test_plan_has_costs_of_every_stage() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)))
    plan = explain_pipeline(module, torch.ones(128, 256), 2)
    assert [one.parameter_bytes for one in plan.stages] == [526336, 526336]
    assert [one.sent_bytes for one in plan.stages] == [128 * 256 * 4, 0]
    assert plan.stages[0].peak_saved_bytes == 2 * plan.stages[0].saved_bytes > 0
    assert 1 <= plan.imbalance < 1.15
    text = str(plan)
    assert "bubble" in text
    assert "stage 1 |" in text
    assert re.search(r"^ *1 .* ms .* ms *514.00 KiB .* [KM]iB +0 B$", text, re.MULTILINE)
    with pytest.raises(ValueError, match="num_microbatches=1"):
        explain_pipeline(module, torch.ones(128, 256), 2, num_microbatches=1)


class Scored(nn.Module):
    """A loss, and its argument."""

    def __init__(self, returns: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
        self.returns = returns

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        # Transposed and with a second way around, so that several tensors go over a cut.
        found = self.net[:3](x).t()
        found = self.net[3](found.t()) + found.t()
        shown = found.exp() if self.returns else None
        loss = (found - y).square().mean()
        return {"loss": loss} if shown is None else {"loss": loss, "shown": shown}


def _sums(plan: PipelinePlan) -> list[float]:
    return [
        sum(one.forward_seconds for one in plan.stages),
        sum(one.backward_seconds for one in plan.stages),
        sum(one.saved_bytes for one in plan.stages),
    ]


class Transforming(nn.Module):
    """A transform of torch.func, or a branch, between two layers."""

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.transform(self.first(x))).sum()


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": torch.vmap(lambda row: row.sin() * 2),
    "grad": torch.func.grad(lambda x: x.sin().sum()),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1],
    "cond": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
}


# A warning when torch first loads its rules of forward-mode differentiation.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_unprofilable_transform_needs_split_spec(name: str) -> None:
    module, x = Transforming(TRANSFORMS[name]), torch.randn(4, 8)
    # Twice: the first failure must not be the second's reason.
    for call in (
        lambda: explain_pipeline(module, x, 2),
        lambda: pipeline(module, x, split_policy=balanced_split(2)),
    ):
        with pytest.raises(RuntimeError, match=r"the costs .* split_spec=") as first:
            call()
        with pytest.raises(RuntimeError, match=r"the costs") as second:
            call()
        assert str(second.value) == str(first.value)
        assert not is_transforming()
    leaf = torch.randn(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        leaf.square().sum().backward()
    assert torch.equal(leaf.grad, 2 * leaf.detach())
    pipe = pipeline(module, x, split_spec={"last": SplitPoint.BEGINNING})
    assert torch.equal(pipe(x), module(x))


def test_every_operation_counts_in_one_stage() -> None:
    batch = {"x": torch.ones(64, 64), "y": torch.ones(64, 64)}
    whole = explain_pipeline(Scored(), batch, 1)
    assert whole.imbalance == 1
    assert whole.timeline.seconds == pytest.approx(whole.ideal_seconds)
    for num_stages in (3,):
        plan = explain_pipeline(Scored(), batch, num_stages)
        assert sum(len(one.received) for one in plan.pipe.info().stages) >= num_stages - 1
        assert _sums(plan) == pytest.approx(_sums(whole))
        assert 1 <= plan.least_imbalance <= plan.imbalance
        assert plan.ideal_seconds < plan.timeline.seconds


@pytest.mark.slow
def test_only_loss_has_backward_cost() -> None:
    batch = {"x": torch.ones(64, 64), "y": torch.ones(64, 64)}
    alone, both = (explain_pipeline(Scored(one), batch, 2) for one in (False, True))
    assert both.stages[1].forward_seconds > alone.stages[1].forward_seconds
    assert _sums(both)[1] == pytest.approx(_sums(alone)[1])
    # A tensor that the step only returns is sent forward, and no gradient comes back.
    late = pipeline(Scored(), (), batch, split_policy=_cut_at_loss)
    plan = plan_of(late, Scored(), None)
    assert plan.stages[0].sent_bytes == 2 * plan.stages[0].returned_bytes == 2 * 64 * 64 * 4


def _cut_at_loss(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A cut in front of the square of the error: the error is sent, and what is returned."""
    cuts, _ = possible_cuts(graph_module)
    nodes = {node.name: node for node in graph_module.graph.nodes}
    (square,) = (one for one in cuts if one.before.startswith("square"))
    # There and back, and there.
    assert square.boundary_bytes == 3 * 64 * 64 * 4
    insert_mark(graph_module.graph, nodes[square.before])
    return graph_module


def test_sent_bytes_cost_both_stages() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    plan = explain_pipeline(layers, torch.ones(8, 64), 2, num_microbatches=2)
    first, second = plan.stages
    assert first.sent_bytes == first.returned_bytes == 8 * 64 * 4
    sending = first.sent_bytes / 2e9
    assert [(one.stage, one.end - one.start) for one in plan.timeline.work[:3]] == [
        (0, pytest.approx(first.forward_seconds + sending)),
        (0, pytest.approx(first.forward_seconds + sending)),
        (1, pytest.approx(second.forward_seconds + sending)),
    ]
    assert "the largest operation allows no less than 1.000" in str(plan)
    with pytest.raises(ValueError, match="bytes_per_second=0"):
        balanced_split(2, bytes_per_second=0)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        balanced_split(2, num_microbatches=0)


class Stepping(nn.Module):
    """A module with its own step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
        self.logged: list[Tensor] = []

    def log(self, name: str, value: Tensor) -> None:
        self.logged.append(value)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        return {"loss": loss}

    def cut_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.net[0](batch[0])
        pipe_split()
        return (self.net[1:](hidden) - batch[1]).square().mean()

    def reading_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("number", loss.item())
        return loss

    def printing_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        print("a graph break")
        return (self.net[2:](self.net[:2](batch[0])) - batch[1]).square().mean()


def test_plan_of_training_step() -> None:
    module = Stepping()
    batch = [torch.ones(64, 64), torch.ones(64, 64)]
    plan = explain_step(module, batch, 2, batch_idx=0)
    # No weight is in both stages.
    assert sum(one.parameter_bytes for one in plan.stages) == 4 * 16640
    assert min(one.parameter_bytes for one in plan.stages) >= 16640
    # Microbatches of 16 samples.
    assert plan.stages[0].sent_bytes == 16 * 64 * 4
    assert plan.timeline.num_stages == 2
    assert plan.pipe.info().has_loss
    assert module.logged == []
    assert "training_step" not in module.__dict__
    with pytest.raises(RuntimeError, match="printing_step cannot be captured as one graph"):
        explain_step(module, batch, 2, batch_idx=0, method="printing_step")
    with pytest.raises(ValueError, match="num_microbatches=5: a batch of 64"):
        explain_step(module, batch, 2, batch_idx=0, num_microbatches=5)
    assert "printing_step" not in module.__dict__


class Installs(nn.Sequential):
    """Sets itself up in its first call, under a lock, as the models of transformers do."""

    lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        if "is_installed" not in self.__dict__:
            with self.lock:
                self.is_installed = True
        return super().forward(x)  # type: ignore[no-any-return]


def noting_step(self: Any, batch: list[Tensor], batch_idx: int) -> Tensor:
    self.steps.append(batch_idx)
    loss = Stepping.training_step(self, batch, batch_idx)["loss"]
    return loss + 0 * self.other(batch[0]).sum()


def test_plan_of_step_with_setup_in_first_call() -> None:
    module = Stepping()
    module.net = Installs(*module.net)
    module.other = Installs(nn.Linear(64, 1))
    module.num_hooks = 1
    module.steps = []
    module.training_step = MethodType(noting_step, module)
    state = torch.get_rng_state()
    plan = explain_step(module, [torch.ones(64, 64)] * 2, 2, batch_idx=0)
    assert plan.only == ""
    assert module.logged == module.steps == []
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("how", ["in place", "other memory"])
def test_first_run_restores_parameters(how: str) -> None:
    module = Stepping()
    module.net = Installs(*module.net)
    weight = module.net[0][0].weight
    before = weight.detach().clone()

    def step() -> None:
        module.net(torch.ones(1, 64))
        module.log("number", torch.ones(()))
        if how == "in place":
            weight.data.t()[0].mul_(2)
        else:
            weight.data = torch.zeros(64, 64)
        raise ValueError("not the last line")

    assert sets_up(CalledSteps(module, ("training_step",)), step)
    assert torch.equal(weight, before)
    assert module.net.is_installed
    assert module.logged == []


def test_plan_of_module_called_by_step() -> None:
    module = Stepping()
    batch = [torch.ones(64, 64), torch.ones(64, 64)]
    plan = explain_step(module, batch, 2, batch_idx=0, method="reading_step")
    assert sum(one.parameter_bytes for one in plan.stages) == 4 * 16640
    assert plan.stages[0].sent_bytes == 16 * 64 * 4
    assert "reading_step is not one graph" in str(plan)
    assert "only self.net runs as the pipeline" in str(plan)
    assert module.logged == []
    assert "forward" not in module.net.__dict__


def test_plan_of_step_with_explicit_cut() -> None:
    batch = [torch.ones(64, 64), torch.ones(64, 64)]
    plan = explain_step(Stepping(), batch, 2, batch_idx=0, method="cut_step")
    assert [one.parameter_bytes for one in plan.stages] == [16640, 3 * 16640]
    assert plan.imbalance > 1.3

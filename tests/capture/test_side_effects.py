"""Calls that follow the step, and calls that run outside of Dynamo."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.capture.side_effects import Postponed, UntracedCalls, plain_forward


class Updating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum()

    def update(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def step(self, x: Tensor) -> None:
        loss = self.forward(x)
        self.optimizer.zero_grad()
        loss.backward()
        self.update()

    def step_with_closure(self, x: Tensor) -> None:
        def closure() -> Tensor:
            loss = self.forward(x)
            self.optimizer.zero_grad()
            loss.backward()
            return loss

        self.update(closure)


@pytest.mark.parametrize("name", ["step", "step_with_closure"])
def test_optimizer_in_step_matches_uncaptured_step(name: str) -> None:
    weights = []
    for is_captured in (False, True):
        torch.manual_seed(2)
        module = Updating()
        if is_captured:
            steps = ModuleSteps(module, [name], untraced=lambda one: [(one, "update")])
            steps.attach("test")
        for _ in range(5):
            getattr(module, name)(torch.randn(4, 3))
        weights.append(module.linear.weight.detach().clone())
        if is_captured:
            assert steps.steps[name].num_graph_calls == 1
            assert "update" not in module.__dict__
            steps.detach("test")
    assert torch.equal(*weights)


def test_methods_are_restored_with_their_attributes() -> None:
    module = Updating()
    module.update = own = lambda: 3
    own.mark = True
    calls = UntracedCalls(lambda: [(module, "update"), (module, "forward")], lambda one: one)
    with pytest.raises(KeyError), calls.replaced():
        assert module.update is not own
        assert module.update.mark
        assert module.update() == 3
        first = module.update
        with calls.replaced():  # a step within a step
            assert module.update is first
            assert module.update() == 3
        raise KeyError
    assert module.__dict__["update"] is own
    assert "forward" not in module.__dict__
    with calls.replaced():
        assert module.update is first


def test_redundant_instance_forward_is_ignored() -> None:
    module = Updating()
    module.forward = own = module.forward
    with plain_forward(module):
        assert "forward" not in module.__dict__
    assert module.__dict__["forward"] is own
    module.forward = other = lambda x: x
    with plain_forward(module):
        assert module.forward is other


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.events: list[tuple[Any, ...]] = []

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.events.append(("log", name, value, options))

    def log_dict(self, values: dict[str, Any], *args: Any) -> None:
        self.events.append(("log_dict", values, args))

    def training_step(self, batch: Tensor) -> Tensor:
        self.log("first", 3, on_step=True)
        out = self.linear(batch)
        self.log("mean", out.mean())
        loss = out.square().sum()
        self.log_dict({"loss": loss.detach(), "number": 2.5}, "more")
        self.log("first", loss)
        return loss


def _steps(module: nn.Module) -> ModuleSteps:
    steps = ModuleSteps(module, ("training_step",), defer=("log", "log_dict", "missing"))
    steps.attach("test")
    return steps


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_side_effects_match_plain_step_in_order_and_value(executor: str) -> None:
    module, batch = Logging(), torch.randn(3, 4)
    module.training_step(batch)
    expected, module.events = module.events, []
    steps = _steps(module)
    steps.use_executor(executor)
    for _ in range(2):
        module.events.clear()
        loss = module.training_step(batch)
        assert [one[:2] for one in module.events[:2]] == [one[:2] for one in expected[:2]]
        assert [one[0] for one in module.events] == ["log", "log", "log_dict", "log"]
        assert module.events[0] == expected[0]
        assert torch.equal(module.events[1][2], expected[1][2])
        assert torch.equal(module.events[2][1]["loss"], expected[2][1]["loss"])
        assert module.events[2][1]["number"] == 2.5
        assert module.events[2][2] == ("more",)
        assert torch.equal(module.events[3][2], loss)
    (graph,) = steps.steps["training_step"].graphs
    assert graph.index == 0


def test_rehearsal_does_not_log() -> None:
    module, batch = Logging(), torch.randn(3, 4)
    steps = _steps(module)
    steps.steps["training_step"].rehearse(lambda graph, inputs: graph.base(*inputs), batch)
    assert module.events == []
    module.training_step(batch)
    assert len(module.events) == 4


def test_instance_method_is_restored() -> None:
    module = Logging()
    module.log = own = lambda name, value: module.events.append((name, value))
    deferred = Postponed(module, module.training_step, ("log", "log_dict", "missing"))
    with pytest.raises(KeyError), deferred.recording():
        module.log("a", 1)
        module.log_dict({"b": 2})
        assert not hasattr(module, "missing")
        raise KeyError
    assert module.events == []
    assert module.__dict__["log"] is own
    assert "log_dict" not in module.__dict__
    deferred.replay()
    assert module.events == [("a", 1), ("log_dict", {"b": 2}, ())]
    deferred.replay()
    assert len(module.events) == 2


def test_discarded_calls_are_not_replayed() -> None:
    module = Logging()
    deferred = Postponed(module, module.training_step, ("log",))
    with deferred.recording():
        module.log("a", 1)
    deferred.discard()
    deferred.replay()
    assert module.events == []


def test_new_recording_drops_calls_of_failed_step() -> None:
    module = Logging()
    deferred = Postponed(module, module.training_step, ("log",))
    with deferred.recording():
        module.log("stale", 1)
    with deferred.recording():
        module.log("fresh", 2)
    deferred.replay()
    assert [one[1] for one in module.events] == ["fresh"]

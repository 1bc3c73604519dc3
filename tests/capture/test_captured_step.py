"""A captured call runs only its graph, any number of times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.graph_variants import NotOneGraphError
from lightning_unitscale.capture.module_steps import ModuleSteps
from tests.helpers import assert_same_bits

COUNTS: list[int] = []
NUMBER = 0


class Buffer:
    def __init__(self) -> None:
        self.items: list[Tensor] = []
        self.count = 0

    def add(self, value: Tensor) -> None:
        self.items.append(value)
        self.count += 1
        self.late = True


class Slotted:
    __slots__ = ("count", "late")

    def __init__(self) -> None:
        self.count = 0


@dataclass
class Rows:
    rows: list[int]


class Forever:
    """An iterator whose state is Python's own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at


def _count_globally() -> None:
    global NUMBER
    NUMBER += 1
    COUNTS.append(NUMBER)


class Keeping(nn.Module):
    """Keeps its state where no module does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.zeros(2))
        self.buffer = {"deep": [Buffer()]}
        self.slotted = Slotted()
        self.held = Rows([0])
        self.total = 0
        self.forever = Forever()
        self.hidden = [nn.BatchNorm1d(2)]
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        self.buffer["deep"][0].add(x)
        self.slotted.count += 1
        self.slotted.late = 1
        self.held.rows.append(1)
        self.total += next(self.forever)
        _count_globally()
        self.seen += x.detach().mean(0)
        x.mul_(2)
        y = self.norm(self.hidden[0](self.layer(x)))
        return (y + torch.rand(2)).square().sum()


def _state(module: Keeping) -> list[Any]:
    buffer = module.buffer["deep"][0]
    return [
        sorted(vars(buffer)),
        len(buffer.items),
        buffer.count,
        module.slotted.count,
        hasattr(module.slotted, "late"),
        list(module.held.rows),
        module.total,
        module.forever.at,
        {name: value.clone() for name, value in module.hidden[0].state_dict().items()},
        {name: value.clone() for name, value in module.state_dict().items()},
        [param.grad for param in module.parameters()],
        list(COUNTS),
        NUMBER,
        torch.get_rng_state(),
    ]


def _captured(module: nn.Module) -> CapturedStep:
    steps = ModuleSteps(module, ("forward",))
    steps.attach("test")
    return steps.steps["forward"]


def _run_plain(graph: Any, inputs: tuple[Any, ...]) -> Any:
    return graph.interpret(lambda base: base.forward, inputs)


@pytest.mark.slow
def test_rehearsal_runs_only_graph_and_is_undone() -> None:
    module, x = Keeping(), torch.randn(3, 2)
    step = _captured(module)
    before, given = _state(module), x.clone()
    call = step.graph_call(x)
    losses = []
    for _ in range(2):
        with call.rehearsing() as (run, inputs):
            (position,) = call.differentiable
            loss = run(_run_plain)[position]
            leaves = [value for value in inputs if isinstance(value, nn.Parameter)]
            torch.autograd.grad(loss, leaves)
            losses.append(loss.detach())
            assert not torch.equal(module.seen, before[9]["seen"])
    assert_same_bits(_state(module), before)
    assert_same_bits(x, given)
    # The real call finds the graph, and computes the same.
    assert_same_bits(module(x).detach(), losses[0])
    assert_same_bits(losses[1], losses[0])
    assert len(step.graphs) == 1
    assert module.number == NUMBER == 1


def test_step_with_graph_break_is_an_error_and_does_not_run() -> None:
    class Printing(Keeping):
        def forward(self, x: Tensor) -> Tensor:
            self.number += 1
            loss = self.layer(x).square().sum()
            print("a graph break", float(loss.detach()))
            return self.layer(x).square().sum()

    module = Printing()
    step = _captured(module)
    with pytest.raises(NotOneGraphError, match="test_captured_step"):
        step.graph_call(torch.randn(3, 2))
    assert module.number == 0
    module(torch.randn(3, 2))
    assert (module.number, len(step.graphs)) == (1, 2)


def test_step_that_calls_item_is_not_one_graph() -> None:
    class Reading(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            self.mean = out.detach().mean().item()
            return out

    module = Reading(2, 2)
    with pytest.raises(NotOneGraphError, match="item"):
        _captured(module).graph_call(torch.randn(3, 2))
    assert not hasattr(module, "mean")


def test_user_error_is_raised_by_real_call() -> None:
    class Failing(Keeping):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    module = Failing()
    step = _captured(module)
    with pytest.raises(NotOneGraphError):
        step.graph_call(torch.randn(3, 2))
    with pytest.raises(KeyError, match="mine"):
        module(torch.randn(3, 2))


def test_backward_pass_stops_at_inputs_of_graph() -> None:
    """The graph that computed an input belongs to the caller, who runs its backward pass."""
    weight = nn.Parameter(torch.ones(2))
    x = torch.randn(3, 2) * weight
    layer = nn.Linear(2, 1)
    call = _captured(layer).graph_call(x)
    with call.rehearsing() as (run, inputs):
        output = run(_run_plain)[0]
        leaves = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
        assert all(leaf.is_leaf for leaf in leaves)
        output.sum().backward()
    assert weight.grad is None
    layer(x).sum().backward()
    assert weight.grad is not None

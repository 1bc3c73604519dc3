"""Names of nodes: by module path, unique, and the same in every capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from lightning_unitscale.capture.dynamo_capture import CapturedGraph
from lightning_unitscale.capture.graph_nodes import (
    Names,
    argument_at,
    changed_arguments,
    function_of,
    op_name,
    tensor_name,
)
from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.pipeline.captured_program import CalledSteps
from tests.helpers import captured


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.ModuleDict({"one": nn.ModuleList([nn.Linear(8, 4)])})
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down["one"][0](F.gelu(self.up(x))) * self.scale + self.offset


class Network(nn.Module):
    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.broken = broken

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.blocks[0](batch["x"])
        if self.broken:
            torch._dynamo.graph_break()
        x = self.blocks[1](x)
        return (x + self.blocks[1](x)).mean()


def _names(graph_module: fx.GraphModule) -> list[str]:
    return [tensor_name(node) for node in graph_module.graph.nodes if node.op != "output"]


def test_resume_function_has_name_of_original_function() -> None:
    found: list[str] = []

    def backend(graph_module: fx.GraphModule, _: Any) -> Any:
        found.extend(function_of(node) for node in graph_module.graph.find_nodes(op="call_method"))
        return graph_module.forward

    def latest_step(x: Tensor) -> Tensor:
        y = x.square()
        torch._dynamo.graph_break()
        return y.exp()

    torch.compile(latest_step, backend=backend)(torch.ones(2))
    assert found == ["latest_step", "latest_step"]


def test_names_are_module_paths_and_operations() -> None:
    network = Network()
    names = _names(captured(network, {"x": torch.randn(2, 4)}))
    assert len(set(names)) == len(names)
    assert set(names) == {
        "input.batch_x",
        *dict(network.named_parameters()),
        *dict(network.named_buffers()),
        *(
            f"blocks.{block}{op}{repeat}"
            for block, repeat in ((0, ""), (1, ""), (1, "_1"))
            for op in (".up.linear", ".gelu", ".down.one.0.linear", ".mul", ".add")
        ),
        "add",
        "mean",
    }


def test_paths_of_torch_containers_and_unusual_attributes() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.G = nn.Linear(2, 2)
            self.selfish = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.G(x) + self.selfish(x)

    assert {"G.linear", "selfish.linear"} <= set(_names(captured(Pair(), torch.ones(1, 2))))
    sequential = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    names = _names(captured(sequential.forward, torch.ones(1, 2)))
    assert {"0.linear", "1.relu"} <= set(names)


class Forwarding(nn.Module):
    """A wrapper that forwards unknown attributes, as those of PEFT do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_modules_with_custom_getattr() -> None:
    inner = Forwarding(nn.Sequential(nn.Linear(2, 2)))
    assert "inner.0.linear" in _names(captured(inner, torch.ones(1, 2)))
    # As the module that a step calls, which a pipeline captures by itself.
    steps = CalledSteps(nn.ModuleDict({"net": Forwarding(inner)}), ("net.forward",))
    call = steps.steps["net.forward"].graph_call(torch.ones(1, 2))
    assert "net.inner.inner.0.linear" in _names(call.graph.base)


def _all_names(steps: ModuleSteps) -> list[list[str]]:
    return [_names(graph.base) for graph in steps.steps["forward"].graphs]


def _observed(network: Network) -> ModuleSteps:
    steps = ModuleSteps(network, ("forward",))
    steps.attach("test")
    return steps


def test_recompilation_gives_the_same_names() -> None:
    network = Network()
    steps = _observed(network)
    # By identity; kept, since torch 2.11 forgets graphs when weights freeze.
    graphs: dict[int, Any] = {}

    def call() -> None:
        network({"x": torch.randn(2, 4)})
        graphs.update((id(graph), graph) for graph in steps.steps["forward"].graphs)

    call()
    network.eval()  # a flag that Dynamo guards on, from torch 2.12 on
    call()
    network.blocks[0].up.weight.requires_grad_(False)
    call()
    first, *others = [_names(graph.base) for graph in graphs.values()]
    assert others
    assert all(one == first for one in others)


@pytest.mark.slow
def test_names_are_unique_over_the_graphs_of_a_step_and_the_same_in_every_run() -> None:
    runs = []
    for _ in range(2):
        torch._dynamo.reset()
        network = Network(broken=True)
        steps = _observed(network)
        network({"x": torch.randn(2, 4)})
        runs.append(_all_names(steps))
    first, second = runs
    assert first == second
    assert len(first) == 2
    parameters = {*dict(network.named_parameters()), *dict(network.named_buffers())}
    own = [name for names in first for name in names if name not in parameters]
    assert len(set(own)) == len(own)


@pytest.mark.slow
def test_another_step_captured_first_changes_no_name() -> None:
    class Steps(Network):
        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            return Network.forward(self, batch)

        def validation_step(self, batch: dict[str, Tensor]) -> Tensor:
            return Network.forward(self, batch)

    names = []
    for order in (("training_step", "validation_step"), ("validation_step", "training_step")):
        torch._dynamo.reset()
        module = Steps()
        steps = ModuleSteps(module, ("training_step", "validation_step"))
        steps.attach("test")
        for one in order:
            getattr(module, one)({"x": torch.randn(2, 4)})
        names.append([_names(steps.steps[one].graphs[0].base) for one in sorted(order)])
    assert names[0] == names[1]
    assert "blocks.0.up.linear" in names[0][0]


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["x", "x_1", "x__1", "x_", "y", "x_1_1"]), min_size=1, unique=True))
def test_inputs_have_unique_names(targets: list[str]) -> None:
    graph = fx.Graph()
    for target in targets:
        graph.placeholder(target)
    graph.output(())
    module = fx.GraphModule(nn.Module(), graph)
    Names().assign(CapturedGraph(module, (), 0, ()), module)
    names = _names(module)
    assert len(set(names)) == len(names)


def test_op_name_is_same_for_every_call_form() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.add(x, x).add(x).add_(x) + x

    nodes = [
        node for node in captured(function, torch.ones(2)).graph.nodes if node.op[:4] == "call"
    ]
    assert [op_name(node) for node in nodes] == ["add"] * 4


def test_one_use_of_an_argument_is_replaced() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node = graph.call_function(torch.cat, ([x, x, (x,)],), {"out": x})
    for path in ((0, 1), (0, 2, 0)):
        node.args, node.kwargs = changed_arguments(node.args, node.kwargs, path, y)
    assert node.args == ([x, y, (y,)],)
    assert node.kwargs == {"out": x}
    node.args, node.kwargs = changed_arguments(node.args, node.kwargs, ("out",), y)
    assert argument_at(node, ("out",)) is y
    assert argument_at(node, (0, 0)) is x
    assert set(node.all_input_nodes) == {x, y}


class Led(nn.Module):
    """Reads its size through an object that has the module, as Lightning's Trainer does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.trainer = SimpleNamespace(lightning_module=self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.trainer.lightning_module.training:
            x = self.second(x)
        return x


def test_modules_reached_through_other_object_keep_paths() -> None:
    module = Led()
    steps = ModuleSteps(module, ("forward",))
    steps.attach("test")
    module(torch.ones(1, 2))
    (names,) = _all_names(steps)
    assert {"first.linear", "second.linear"} <= set(names)

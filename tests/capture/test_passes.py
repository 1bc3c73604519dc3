"""Passes run in the order of their phases and may add inputs and outputs of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.capture.copy_graphs import add_placeholder
from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.capture.passes import GraphPass, Phase, Region, StepGraph, run_passes
from tests.helpers import assert_same_bits, captured, run


class Mark(GraphPass):
    """Notes when it ran, and requests the given inputs and outputs."""

    def __init__(self, name: str, phase: Phase, log: list[str], out_of_place: bool = False) -> None:
        self.name, self.phase, self.log, self.out_of_place = name, phase, log, out_of_place

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        self.log.append(self.name)
        return (f"{self.name} was here",)


class MultiplyLinears(GraphPass):
    """Multiplies each linear's result by a state and hands its sum out, in checkpoints as well."""

    name = "multiply"
    phase = Phase.REWRITE

    def __init__(self) -> None:
        self.factor = torch.tensor(1.0)
        self.seen: list[float] = []

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        factor = graph.add_state("factor", lambda: self.factor, self.factor)
        count = 0
        for region in list(graph.regions()):
            for node in list(region.graph.nodes):
                if node.op != "call_function" or "linear" not in str(node.target):
                    continue
                inside = region.thread(factor)
                with region.graph.inserting_after(node):
                    scaled = region.graph.call_function(torch.mul, (node, inside))
                node.replace_all_uses_with(
                    scaled, delete_user_cb=lambda user, new=scaled: user != new
                )
                scaled.meta.update(node.meta)
                count += 1
        output = graph.graph.output_node()
        with graph.graph.inserting_before(output):
            graph.add_result(
                graph.graph.call_function(torch.mul, (factor, 3)),
                lambda value: self.seen.append(float(value)),
            )
        return (f"{count} linears multiplied",)


class Network(nn.Module):
    def __init__(self, regions: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.regions = regions

    def body(self, x: Tensor) -> Tensor:
        return torch.dropout(self.two(x).tanh(), 0.25, True)

    def outer(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, self.one(x).sin(), use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.regions:
            return checkpoint(self.outer, x, use_reentrant=False).sum()
        return self.body(self.one(x).sin()).sum()


class Multiplied(Network):
    """The expected result of ``MultiplyLinears``."""

    factor = 1.0

    def body(self, x: Tensor) -> Tensor:
        return torch.dropout((self.two(x) * self.factor).tanh(), 0.25, True)

    def outer(self, x: Tensor) -> Tensor:
        inner = (self.one(x) * self.factor).sin()
        return checkpoint(self.body, inner, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x).sum()


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize("regions", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("executor", ["eager", "aot_eager", "inductor"])
def test_pass_states_and_outputs_in_every_executor(
    executor: str, regions: bool, torch_kernels: None
) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    network, oracle = Network(regions), Multiplied(regions)
    oracle.load_state_dict(network.state_dict())
    steps = ModuleSteps(network, ("forward",))
    rewrite = MultiplyLinears()
    steps.add_pass(rewrite)
    steps.use_executor(executor)
    steps.attach("test")
    results = []
    for factor in (2.0, 0.125):
        rewrite.factor, oracle.factor = torch.tensor(factor), factor
        got = run(network, x)
        results.append(got)
        if executor == "inductor":  # random numbers of its own: only what is without them
            assert got["output"].isfinite()
        else:
            assert_same_bits(got, run(oracle, x))
    assert rewrite.seen == [6.0, 0.375]
    assert len(steps.steps["forward"].graphs) == 1
    assert not torch.equal(results[0]["output"], results[1]["output"])
    assert "2 linears multiplied" in steps.explain()


class CountTanh(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("regions", [False, True], ids=["plain", "checkpoint"])
def test_checkpoints_still_recompute_and_save_little(regions: bool) -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def packed(module: nn.Module) -> list[tuple[int, ...]]:
        """Shapes of the saved activations; parameters are there anyway."""
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one: saved.append(one) or one, lambda one: one
        ):
            module(x)
        known = {one.data_ptr() for one in module.parameters()}
        return sorted(tuple(one.shape) for one in saved if one.data_ptr() not in known)

    network = Network(regions)
    plain = packed(network)
    with CountTanh() as count:
        run(network, x)
    num_calls = count.calls
    calls = []
    hook = torch.tanh

    class Counted(MultiplyLinears):
        def run(self, graph: StepGraph) -> tuple[str, ...]:
            def counted(value: Tensor) -> Tensor:
                calls.append(1)
                return hook(value)

            for region in graph.regions():
                for node in region.graph.nodes:
                    if node.op == "call_method" and node.target == "tanh":
                        node.op, node.target = "call_function", counted
            return ()

    steps = ModuleSteps(network, ("forward",))
    steps.add_pass(Counted())
    steps.attach("test")
    assert packed(network) == plain
    calls.clear()
    run(network, x)
    assert len(calls) == num_calls
    assert (num_calls > 1) == regions


@pytest.mark.parametrize("backwards", [False, True])
def test_passes_run_in_order_of_phases(backwards: bool) -> None:
    log: list[str] = []
    passes = [
        Mark("rewrite", Phase.REWRITE, log),
        Mark("second rewrite", Phase.REWRITE, log),
        Mark("observe", Phase.OBSERVE, log, out_of_place=True),
        Mark("gather", Phase.GATHER, log),
    ]
    given = passes[::-1] if backwards else passes
    expected = ["rewrite", "second rewrite", "observe", "gather"]
    if backwards:  # equal phases keep the order they were given in
        expected[:2] = expected[1::-1]
    graph_module = captured(lambda x: (x * 2).add_(1), torch.ones(2))
    records = run_passes(StepGraph(graph_module, observed=True), given, step="s", graph_index=7)
    assert log == expected
    assert [one.pass_name for one in records] == ["out of place", *expected]
    assert all((one.step, one.graph_index, one.observed) == ("s", 7, True) for one in records)
    assert records[0].changes == ("1 in-place operations made out of place",)
    assert records[-1].changes == ("gather was here",)
    assert all(one.seconds >= 0 and one.nodes_before == one.nodes_after for one in records)


def test_plain_variant_has_no_observers() -> None:
    log: list[str] = []
    module = nn.Linear(2, 2)
    steps = ModuleSteps(module, ("forward",))
    for phase in (Phase.OBSERVE, Phase.REWRITE):
        steps.add_pass(Mark(phase.name, phase, log))
    steps.attach("test")
    assert steps.variants() == (False, True)
    module(torch.ones(1, 2))
    assert log == ["REWRITE"]
    steps.observe("me", True)
    assert steps.observed
    module(torch.ones(1, 2))
    assert log == ["REWRITE", "REWRITE", "OBSERVE"]
    module(torch.ones(1, 2))
    steps.observe("me", False)
    module(torch.ones(1, 2))
    assert len(log) == 3
    assert len(steps.steps["forward"].graphs) == 1
    steps.observe("me", False, always=True)
    assert steps.variants() == (True,)


def test_node_is_passed_into_nested_region_once() -> None:
    network = Network(regions=True)
    graph = StepGraph(captured(network, torch.randn(3, 4)), observed=False)
    outermost, outer, inner = graph.regions()
    assert isinstance(inner, Region)
    state = graph.add_state("s", lambda: torch.ones(()), torch.ones(()))
    first = inner.thread(state)
    assert inner.thread(state) is first
    assert outermost.thread(state) is state
    assert first.graph is inner.graph
    assert inner.call.args[-1].graph is outer.graph
    assert outer.call.args[-1] is state
    graph.finish()


def test_added_placeholders_come_last() -> None:
    graph_module = captured(lambda x, y: x + y, torch.ones(2), torch.ones(2))
    add_placeholder(graph_module.graph, "ours", torch.ones(()))
    names = [one.name for one in graph_module.graph.find_nodes(op="placeholder")]
    assert names[-1] == "ours"
    assert len(names) == 3

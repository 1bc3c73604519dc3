"""Dynamo's graphs are described and copied, and never changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.capture import dynamo_capture as capture
from lightning_unitscale.capture import executors
from lightning_unitscale.capture.copy_graphs import autocast_dtypes, copy_graph_module
from lightning_unitscale.capture.dynamo_capture import CapturedGraph
from lightning_unitscale.capture.graph_nodes import op_name
from lightning_unitscale.capture.module_steps import ModuleSteps
from tests.helpers import assert_same_bits, captured, run, same_bits


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = self.linear
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor, count: int) -> Tensor:
        y = checkpoint(lambda a: self.linear(a).sin(), x, use_reentrant=False)
        return y * count + self.offset


def _capture(module: nn.Module, *inputs: Any) -> CapturedGraph:
    graphs = []

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(capture.describe(graph_module, example_inputs, module))
        return graph_module.forward

    torch.compile(module, backend=backend)(*inputs)
    (graph,) = graphs
    return graph


def test_graph_inputs_have_kind_and_fqn() -> None:
    x = torch.randn(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    graph = _capture(Network(), x, 2)
    kinds = {(one.kind, one.fqn) for one in graph.inputs}
    assert kinds == {
        ("input", None),
        ("parameter", "linear.weight"),
        ("parameter", "linear.bias"),
        ("buffer", "offset"),
        ("symbol", None),
    }
    placeholders = [one.name for one in graph.graph_module.graph.find_nodes(op="placeholder")]
    assert len(graph.inputs) == len(placeholders)
    assert len(graph.example_inputs) == len(placeholders)
    assert graph.frame_id >= 0


def test_rewriting_copy_does_not_change_dynamo_graph() -> None:
    original = _capture(Network(), torch.randn(3, 4), 2).graph_module
    code = original.code
    copy = copy_graph_module(original)
    nested = [one for one in copy.children() if isinstance(one, fx.GraphModule)]
    assert len(nested) == 1
    nested_code = [one.code for one in original.children()]
    for graph_module in (copy, *nested):
        for node in graph_module.graph.nodes:
            if node.op == "call_method" and node.target == "sin":
                node.target = "cos"
            if node.op == "call_function" and node.target.__name__ == "mul":
                node.target = torch.sub
        graph_module.recompile()
    original.recompile()
    assert original.code == code
    assert [one.code for one in original.children()] == nested_code
    assert "cos" in nested[0].code
    for old, new in zip(original.graph.nodes, copy.graph.nodes, strict=True):
        assert old is not new
        assert old.meta.get("example_value") is new.meta.get("example_value")
        assert getattr(old, "_dynamo_source", None) is getattr(new, "_dynamo_source", None)


def test_compiled_modules_are_recognized() -> None:
    module = nn.Linear(2, 2)
    assert not capture.is_compiled(module)
    assert capture.is_compiled(torch.compile(module))
    module.compile()
    assert capture.is_compiled(module)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_executors_do_not_change_results(executor: executors.Executor) -> None:
    network, x = Network(), torch.randn(3, 4, requires_grad=True)
    expected = run(network, x, 2)

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        copied = copy_graph_module(graph_module)
        return executors.execute_with(executor, copied, example_inputs)

    compiled = torch.compile(network, backend=backend)
    got = run(compiled, x, 2)
    assert_same_bits(got["output"], expected["output"])
    assert_same_bits(got["inputs"], expected["inputs"])


def test_original_error_is_unwrapped() -> None:
    inner, outer = ValueError("inner"), RuntimeError("outer")
    assert capture.original_error(outer) is outer
    outer.inner_exception = inner
    assert capture.original_error(outer) is inner


def test_reset_functions_are_captured_again() -> None:
    graphs = []

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    def function(x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("three")
        return x * 2

    compiled = torch.compile(function, backend=backend)
    with pytest.raises(ValueError, match="three"):
        compiled(torch.ones(3))
    capture.forget_captures(function)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert len(graphs) == 1
    capture.forget_captures(torch.nn.Identity())  # no code that Dynamo could have captured


def test_dtypes_under_autocast_inside_and_outside_step() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        a = F.linear(x, w)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            b = F.linear(a, w)
            with torch.autocast("cpu", enabled=False):
                c = F.linear(b.float(), w)
            d = F.linear(c, w)
        return F.linear(d.float(), w)

    inputs = torch.randn(2, 2), torch.randn(2, 2)
    graph = captured(function, *inputs).graph
    states = autocast_dtypes(graph)
    linears = [node for node in graph.nodes if "linear" in str(node.target)]
    bf16 = torch.bfloat16
    assert [states.get(node) for node in linears] == [None, bf16, None, bf16, None]
    with torch.autocast("cpu", dtype=bf16):
        states = autocast_dtypes(graph)
    assert [states.get(node) for node in linears] == [bf16, bf16, None, bf16, bf16]


def test_recurrent_kernel_is_one_node() -> None:
    """Without this, Dynamo gives up on every frame that mentions a recurrent kernel."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(7, 4)
            self.recurrent = nn.GRU(4, 6, batch_first=True)
            self.out = nn.Linear(6, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            states, _ = self.recurrent(self.tokens(tokens))
            return self.out(states)

    torch.manual_seed(0)
    module, tokens = Encoder(), torch.randint(7, (2, 5))
    plain = module(tokens)
    steps = ModuleSteps(module, ("forward",))
    steps.attach("test")
    assert same_bits(module(tokens), plain)
    (graph,) = steps.steps["forward"].graphs
    assert not steps.graph_breaks
    operations = [op_name(node) for node in graph.base.graph.nodes if node.op == "call_function"]
    assert {"embedding", "gru", "linear"} <= set(operations)

"""Costs written into existing graphs of FX, Dynamo and AOTAutograd."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_unitscale.profiler import MetaInfoProp, profile_graph
from tests.helpers import captured
from tests.memory.oracles import sum_of


def _module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_symbolic_trace_has_costs_of_module(device: str) -> None:
    module, given = _module(), torch.randn(32, 8)
    graph_module = fx.symbolic_trace(module)
    info = MetaInfoProp(graph_module, device=device)
    profile = info.run(given, loss=sum_of)
    direct = profile_graph(module, given, loss=sum_of, device=device)
    assert profile.saved_bytes == direct.saved_bytes
    assert profile.peak_bytes == direct.peak_bytes
    assert profile.bwd_flops == direct.bwd_flops
    costs = {
        n.name: n.meta["node_costs"] for n in graph_module.graph.nodes if n.op == "call_module"
    }
    fields = ("fwd_mem_in", "fwd_mem_tmp", "fwd_mem_out", "bwd_mem_out", "fwd_flops")
    for ours, theirs in zip(costs.values(), direct.nodes, strict=False):
        assert all(getattr(ours, name) == getattr(theirs, name) for name in fields)
    assert info.profile is not None and next(iter(costs)) in info.profile.summary()


def test_dynamo_graph_has_costs_of_module() -> None:
    module, given = _module(), torch.randn(32, 8)
    graph_module = captured(module, given)
    inputs = [
        node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")
    ]
    profile = MetaInfoProp(graph_module).run(*inputs, loss=sum_of)
    direct = profile_graph(module, given, loss=sum_of)
    assert profile.fwd_flops == direct.fwd_flops
    assert {node.module for node in profile.nodes} == {"0", "1", "2", "3"}


def test_inputs_that_share_a_storage_count_once() -> None:
    """Placeholders of a backward graph may be views of one saved tensor."""
    graph_module = make_fx(lambda a, b: a @ b)(torch.ones(4, 4), torch.ones(4, 4))
    base = torch.randn(2, 4, 4)
    profile = MetaInfoProp(graph_module).run(base[0], base[1])
    assert profile.input_bytes == 4 * 32
    assert profile.peak_bytes == 4 * 32 + 4 * 16


def test_values_are_freed_after_last_reader() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        a = x + 1
        b = a + 1
        return b + 1

    profile = MetaInfoProp(fx.symbolic_trace(chain)).run(torch.ones(100))
    assert [node.fwd_mem_out for node in profile.nodes] == [400, 400, 400]
    assert profile.peak_bytes == 3 * 400  # the input, and two of the three at a time
    assert profile.timeline.after_bytes == 2 * 400 or profile.timeline.after_bytes == 400


def test_data_dependent_node_error_has_node() -> None:
    graph_module = make_fx(lambda x: x * 2)(torch.ones(3))
    multiply = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[
        0
    ]
    with graph_module.graph.inserting_after(multiply):
        graph_module.graph.call_function(torch.ops.aten.nonzero.default, (multiply,))
    graph_module.recompile()
    with pytest.raises(RuntimeError, match=r"node nonzero"):
        MetaInfoProp(graph_module).run(torch.ones(3))

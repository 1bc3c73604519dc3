"""The flow of tensors through all graphs of a step."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.capture.graph_nodes import op_name
from lightning_unitscale.rules.flow import (
    Flow,
    float_arguments,
    handed_on,
    is_attention,
    is_softmax,
    numel,
)
from tests.helpers import captured
from tests.rules.models import Of
from tests.rules.oracle import flow_of


def _named(flow: Flow, op: str) -> list[fx.Node]:
    return [
        node
        for node in flow.nodes
        if node.op in {"call_function", "call_method"} and op_name(node) == op
    ]


def test_flow_has_order_sources_and_readers() -> None:
    flow = flow_of(Of(lambda m, x: m[0](x).relu() + x, nn.Linear(4, 4)), torch.randn(2, 4))
    (linear,), (relu,), (add,) = (_named(flow, value) for value in ("linear", "relu", "add"))
    assert flow.order(linear) < flow.order(relu) < flow.order(add)
    assert flow.sources(relu) == [linear]
    assert flow.readers(linear) == [relu]
    assert flow.readers(relu) == [add]
    assert flow.readers(add) == []
    assert flow.outputs == [add]
    assert [numel(source) for source in flow.sources(add)] == [8, 8]


def test_flow_continues_over_graph_breaks() -> None:
    def function(m: nn.ModuleList, x: Tensor) -> Tensor:
        h = m[0](x).tanh()
        torch._dynamo.graph_break()
        y = m[1](h)
        torch._dynamo.graph_break()
        return y + h

    flow = flow_of(Of(function, nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    (tanh,), (add,) = _named(flow, "tanh"), _named(flow, "add")
    first, second = _named(flow, "linear")
    assert tanh.graph is not add.graph
    assert set(flow.readers(tanh)) == {second, add}
    assert flow.sources(add) == [second, tanh]
    assert flow.outputs == [add]
    assert flow.is_learned(add) and not flow.is_learned(flow.sources(first)[0])


def test_parameter_is_same_tensor_in_all_graphs() -> None:
    linear = nn.Linear(4, 4)

    def function(m: nn.ModuleList, x: Tensor) -> Tensor:
        h = m[0](x)
        torch._dynamo.graph_break()
        return m[0](h) @ m[0].weight

    flow = flow_of(Of(function, linear), torch.randn(2, 4))
    assert set(flow.parameters) == {"parts.0.weight", "parts.0.bias"}
    weight = flow.parameters["parts.0.weight"]
    assert flow.readers(weight) == [*_named(flow, "linear"), *_named(flow, "matmul")]
    assert flow.parameter_of(weight) == "parts.0.weight"


def test_flow_enters_and_leaves_checkpoints() -> None:
    def function(m: nn.ModuleList, x: Tensor) -> Tensor:
        h = m[0](x)
        inner = checkpoint(
            lambda a: checkpoint(lambda b: m[1](b), a, use_reentrant=False).tanh(),
            h,
            use_reentrant=False,
        )
        return h + inner

    flow = flow_of(Of(function, nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    outer, inner = _named(flow, "linear")
    (tanh,), (add,) = _named(flow, "tanh"), _named(flow, "add")
    assert flow.sources(inner)[0] is outer
    assert flow.sources(add) == [outer, tanh]
    assert flow.parameter_of(flow.sources(inner)[1]) == "parts.1.weight"


def test_root_looks_through_views_and_casts() -> None:
    def function(m: nn.ModuleList, x: Tensor) -> Tensor:
        q, k, _ = m[0](x).view(2, 5, 3, 4).unbind(2)
        h = F.dropout(q[:, 1:].transpose(0, 1).contiguous().to(torch.float64), 0.5).float()
        return h.flatten() @ m[0].weight.mT.T.reshape(-1)[: h.numel()] + k.mean()

    flow = flow_of(Of(function, nn.Linear(4, 12)), torch.randn(2, 5, 4))
    (linear,), (matmul,) = _named(flow, "linear"), _named(flow, "matmul")
    left, right = (float_argument for _, float_argument in float_arguments(matmul))
    assert flow.root(left) is linear
    assert flow.parameter_of(right) == "parts.0.weight"
    assert flow.parameter_of(left) is None
    (mean,) = _named(flow, "mean")
    assert flow.root(mean) is mean
    assert handed_on(mean) is None


def test_frozen_parameters_are_learned() -> None:
    linear = nn.Linear(4, 4).requires_grad_(False)
    flow = flow_of(Of(lambda m, x: m[0](x) + x.square(), linear), torch.randn(2, 4))
    (linear_node,), (square,), (add,) = (_named(flow, x) for x in ("linear", "square", "add"))
    assert flow.is_learned(linear_node) and flow.is_learned(add)
    assert not flow.is_learned(square)


def test_float_arguments_have_positions() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cat([x, torch.arange(4), x.relu()]).where(x.sum() > 0, other=x.new_zeros(10))

    graph = captured(function, torch.randn(3)).graph
    found = {
        op_name(node): [path for path, _ in float_arguments(node)]
        for node in graph.nodes
        if node.op in {"call_function", "call_method"}
    }
    assert found["cat"] == [(0, 0), (0, 2)]
    assert found["where"] == [(0,), ("other",)]
    assert found["arange"] == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.softmax(x, -1),
        lambda x: x.softmax(dim=-1),
        lambda x: F.softmax(x, dim=-1),
        lambda x: nn.Softmax(-1)(x),
        lambda x: torch.ops.aten._safe_softmax(x, -1),
    ],
)
def test_every_softmax_form_is_recognized(function: object) -> None:
    nodes = captured(function, torch.randn(3, 4)).graph.nodes
    assert [is_softmax(node) for node in nodes].count(True) == 1


def test_attention_is_not_a_softmax() -> None:
    x = torch.randn(1, 2, 5, 4)
    nodes = captured(lambda a: F.scaled_dot_product_attention(a, a, a), x).graph.nodes
    (node,) = (node for node in nodes if node.op.startswith("call"))
    assert is_attention(node) and not is_softmax(node)

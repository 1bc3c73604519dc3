"""Possible cuts of a graph."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx, nn

from lightning_unitscale.pipeline import pipeline
from lightning_unitscale.pipeline.cuts import (
    insert_mark,
    keep_items_with_their_tuples,
    legal_cuts,
)


class Regions(nn.Module):
    """A write into a view, a ``vmap``, and a tuple that is read late."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        table = torch.zeros(3, 4)
        row = table.select(0, 1)
        z = y.cos()
        row.add_(1.0)
        doubled = torch.vmap(lambda each: each.sin() * 2)(z)
        pair = doubled.max(1)
        w = doubled.tanh()
        return (self.last(w) + table).mean() + pair.values.sum() + pair.indices.sum()


def test_possible_cuts_are_found() -> None:
    module, x = Regions(), torch.randn(3, 4)
    legal: list[str] = []

    def behind_the_tuple(graph_module: fx.GraphModule) -> fx.GraphModule:
        nodes = legal_cuts(graph_module.graph)
        legal.extend(str(getattr(node.target, "__name__", node.target)) for node in nodes)
        insert_mark(graph_module.graph, next(node for node in nodes if node.target == "tanh"))
        return graph_module

    def within_the_vmap(graph_module: fx.GraphModule) -> fx.GraphModule:
        (inner,) = graph_module.graph.find_nodes(op="call_method", target="sin")
        insert_mark(graph_module.graph, inner)
        return graph_module

    pipe = pipeline(module, x, split_policy=behind_the_tuple)
    assert torch.equal(pipe(x), module(x))
    # Neither behind the first write, inside of the vmap, nor between a tuple and its items.
    assert [name for name in legal if "vmap" not in name and "lazy" not in name] == [
        *("zeros", "max", "tanh", "linear", "add", "mean", "sum", "add", "sum", "add")
    ]
    assert "_vmap_decrement_nesting" not in legal
    second = pipe.get_stage_module(1).graph
    assert second.find_nodes(op="call_method", target="tanh")
    assert not second.find_nodes(op="call_method", target="max")
    # A mark within a region takes effect behind it.
    pipe = pipeline(module, x, split_policy=within_the_vmap)
    assert torch.equal(pipe(x), module(x))
    assert pipe.get_stage_module(0).graph.find_nodes(op="call_method", target="sin")
    assert pipe.get_stage_module(1).graph.find_nodes(op="call_method", target="max")


def test_getitem_nodes_follow_their_tuple() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(torch.max, (x, 1))
    other = graph.call_function(torch.cos, (x,))
    items = [graph.call_function(operator.getitem, (pair, index)) for index in range(2)]
    end = graph.output((other, *items))
    for node in (other, *items):
        node.meta["example_value"] = torch.ones(2)
    keep_items_with_their_tuples(graph)
    assert list(graph.nodes) == [x, pair, *items, other, end]

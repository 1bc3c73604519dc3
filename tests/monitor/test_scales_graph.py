"""Pruning a graph: removed nodes, the new inputs of their readers, and linear time."""

import copy
import operator
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_unitscale.transforms import (
    Metrics,
    ScalesGraph,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
    track_scales,
)


def data(mean_abs: float) -> Metrics.Data:
    return Metrics.Data(mean_abs, 0.0, 1.0, 2.0, 0.0, 8)


def described(node: fx.Node, fwd: float | None = None, bwd: float | None = None) -> fx.Node:
    metrics = None
    if fwd is not None:
        metrics = Metrics(data(fwd), None if bwd is None else data(bwd))
    node.meta.update(metrics=metrics, outputs_float_tensor=fwd is not None, clean_name=node.name)
    return node


def arguments(graph: fx.Graph) -> dict[str, Any]:
    """Arguments of every node, by name, with nodes as names."""
    return {
        node.name: fx.map_arg((node.args, node.kwargs), lambda one: one.name)
        for node in graph.nodes
    }


@pytest.fixture
def graph() -> ScalesGraph:
    made = ScalesGraph()
    x = described(made.placeholder("x"), 1.0, 0.5)
    w = described(made.placeholder("w"), 2.0, 0.25)
    size = described(made.call_method("size", (x, 0)))
    flat = described(made.call_method("view", (x, size)), 1.0, 0.5)
    mask = described(made.call_function(torch.gt, (flat, w)))
    top = described(made.call_function(torch.argmax, (flat,), {"dim": -1}))
    both = described(made.call_function(torch.cat, ([flat, w],), {"dim": top}), 1.0, 0.5)
    late = described(made.call_function(F.dropout, (both, mask)), 1.0, 0.75)
    parts = described(made.call_function(torch.chunk, (late, 2)))
    first = described(made.call_function(operator.getitem, (parts, 0)), 1.0 + 2**-18, 0.75)
    described(made.output((first, {"mask": mask})))
    return made


def test_prune_non_float_tensors(graph: ScalesGraph) -> None:
    pruned = prune_non_float_tensors(graph)
    assert arguments(pruned) == {
        "x": ((), {}),
        "w": ((), {}),
        "view": (("x", "x"), {}),
        "cat": ((["view", "w"],), {"dim": "view"}),
        "dropout": (("cat", None), {}),
        "getitem": (("dropout", 0), {}),
        "output": ((("getitem", {"mask": None}),), {}),
    }
    pruned.lint()


def test_prune_same_scale_tensors(graph: ScalesGraph) -> None:
    pruned = prune_same_scale_tensors(prune_non_float_tensors(graph))
    # The concatenation reads two tensors, and the dropout's gradient is another one.
    assert arguments(pruned) == {
        "x": ((), {}),
        "w": ((), {}),
        "cat": ((["x", "w"],), {"dim": "x"}),
        "dropout": (("cat", None), {}),
        "output": ((("dropout", {"mask": None}),), {}),
    }
    assert "getitem" in arguments(prune_same_scale_tensors(graph, rtol=2**-20))
    assert "dropout" not in arguments(prune_same_scale_tensors(graph, rtol=0.5))


def test_missing_gradient_on_one_side_keeps_node() -> None:
    made = ScalesGraph()
    x = described(made.placeholder("x"), 1.0)
    y = described(made.call_method("view", (x,)), 1.0, 1.0)
    described(made.output(y))
    assert len(prune_same_scale_tensors(made).nodes) == 3
    y.meta["metrics"].bwd = None
    assert len(prune_same_scale_tensors(made).nodes) == 2


def test_prune_selected_nodes(graph: ScalesGraph) -> None:
    pruned = prune_selected_nodes(graph, ["view", torch.cat, "w"])
    assert arguments(pruned) == {
        "x": ((), {}),
        "size": (("x", 0), {}),
        "gt": ((None, None), {}),
        "argmax": ((None,), {"dim": -1}),
        "dropout": ((None, "gt"), {}),
        "chunk": (("dropout", 2), {}),
        "getitem": (("chunk", 0), {}),
        "output": ((("getitem", {"mask": "gt"}),), {}),
    }


def test_pruning_does_not_change_its_argument(graph: ScalesGraph) -> None:
    before = arguments(graph)
    for result in (
        prune_non_float_tensors(graph),
        prune_same_scale_tensors(graph),
        prune_selected_nodes(graph, [torch.cat]),
        copy.deepcopy(graph),
    ):
        assert isinstance(result, ScalesGraph)
        assert result is not graph
        assert not set(result.nodes) & set(graph.nodes)
    assert arguments(graph) == before == arguments(copy.deepcopy(graph))


def test_bad_arguments_are_an_error(graph: ScalesGraph) -> None:
    plain = fx.symbolic_trace(nn.Linear(2, 2)).graph
    for prune in (prune_non_float_tensors, prune_same_scale_tensors):
        with pytest.raises(RuntimeError, match="track_scales"):
            prune(plain)
        assert len(prune(ScalesGraph()).nodes) == 0
    with pytest.raises(ValueError, match="rtol"):
        prune_same_scale_tensors(graph, rtol=-1.0)
    assert len(prune_selected_nodes(plain, []).nodes) == len(plain.nodes)


def test_pruning_takes_linear_time() -> None:
    made = ScalesGraph()
    hub = described(made.placeholder("x"), 1.0)
    last = hub
    for index in range(5000):
        if index % 3 == 0:
            last = described(made.call_method("size", (last,)))
        else:
            scale = 1.0 + (index % 3 == 1)
            last = described(made.call_function(torch.add, (last, 1)), scale)
    described(made.output(last))
    start = time.perf_counter()
    kept = prune_non_float_tensors(made)
    assert len(kept.nodes) == 2 + 5000 - 1667
    assert len(prune_same_scale_tensors(kept, rtol=2.0).nodes) == 2
    assert len(prune_selected_nodes(kept, [torch.add]).nodes) == 2
    copy.deepcopy(made)
    # Quadratic time would be minutes.
    assert time.perf_counter() - start < 20.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.linear = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embedding(tokens)
        h = h.flatten(0, 1).view(h.shape)
        scores = F.softmax(self.linear(h), -1)
        best = scores.argmax(-1)
        return torch.gather(h, -1, best.unsqueeze(-1)).sum(), best


def test_pruning_of_tracked_model() -> None:
    model, tokens = track_scales(Model()), torch.randint(0, 20, (3, 5))
    model(tokens)[0].backward()
    floats = prune_non_float_tensors(model.scales_graph())
    targets = {node.target for node in floats.nodes}
    assert not targets & {torch.argmax, "argmax", "unsqueeze", "L_tokens_"}
    assert {F.embedding, "flatten", "view"} <= targets
    targets = {node.target for node in prune_same_scale_tensors(floats).nodes}
    assert not targets & {"flatten", "view"}
    assert F.embedding in targets

"""``track_scales``: metrics against an interpreter of the plain graph."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.transforms import (
    Metrics,
    ScalesGraph,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    track_scales,
)
from tests.helpers import assert_same_bits, run
from tests.monitor.test_metrics import assert_close, expected
from tests.monitor.tracked import Call, directions, metrics

graph_break = torch._dynamo.graph_break


class Oracle(fx.Interpreter):
    """Runs a graph as Dynamo made it and keeps every tensor, with gradients of inputs too."""

    def __init__(self, graph_module: fx.GraphModule, kept: dict[str, "Kept"]) -> None:
        super().__init__(graph_module)
        self.kept = kept

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output" and isinstance(result, Tensor) and result.is_floating_point():
            is_buffer = "buffers" in n.name
            if n.op == "placeholder" and not result.requires_grad and not is_buffer:
                result = result.detach().requires_grad_()
            if result.requires_grad:
                result.retain_grad()
            # Its numbers are taken now: a batch norm is going to write into its buffers.
            self.kept[n.name] = (expected(result), result)
        return result


Kept = tuple[Metrics.Data, Tensor]


def oracle(module: nn.Module, *args: Any) -> dict[str, Kept]:
    """Every tensor of one step of a module of one graph, by node name, with its gradient."""
    kept: dict[str, Kept] = {}
    step = torch.compile(module, backend=lambda graph, _: Oracle(graph, kept).run)
    torch.manual_seed(7)
    step(*args).backward()
    return kept


def _attention(project: nn.Linear, norm: nn.LayerNorm, x: Tensor, shift: Tensor) -> Tensor:
    q, k, v = project(norm(x)).chunk(3, -1)
    scores = (q @ k.transpose(-2, -1)).softmax(-1)
    h = F.dropout(scores, 0.1) @ v + shift
    return F.gelu(h).reshape(-1).view(5, 8).square().mean()


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "mlp": lambda: (
        Call(lambda a, b, x: b(F.relu(a(x))).square().mean(), nn.Linear(8, 6), nn.Linear(6, 2)),
        (torch.randn(5, 8) * 30,),
    ),
    "attention": lambda: (
        Call(_attention, nn.Linear(8, 24), nn.LayerNorm(8)),
        (torch.randn(5, 8), torch.randn(8)),
    ),
    "convolution": lambda: (
        Call(
            lambda c, n, x: F.max_pool2d(n(c(x)).relu(), 2).sum(),
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
        ),
        (torch.randn(2, 3, 8, 8),),
    ),
    "loss_of_targets": lambda: (
        Call(lambda a, x, y: F.mse_loss(a(x).tanh(), y * 2), nn.Linear(8, 3)),
        (torch.randn(5, 8), torch.randn(5, 3)),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_metrics_of_plain_step(name: str) -> None:
    module, args = MODELS[name]()
    tracked = track_scales(module)
    wanted = oracle(module, *args)
    torch.manual_seed(7)
    tracked(*args).backward()
    graph = tracked.scales_graph()
    found = {node.name: node.meta["metrics"] for node in graph.nodes if node.meta["metrics"]}
    assert found.keys() == wanted.keys()
    for node_name, (numbers, tensor) in wanted.items():
        assert_close(found[node_name].fwd, numbers)
        if tensor.grad is None:
            assert found[node_name].bwd is None, node_name
        else:
            assert_close(found[node_name].bwd, expected(tensor.grad))


def test_metadata_of_nodes() -> None:
    model = track_scales(Call(lambda a, x, i: (a(x)[i].sum(), i + 1), nn.Linear(4, 3)))
    assert isinstance(model.scales_graph(), ScalesGraph)
    assert len(model.scales_graph().nodes) == 0
    model(torch.randn(5, 4), torch.tensor([0, 2]))
    nodes = {node.meta["clean_name"]: node for node in model.scales_graph().nodes}
    for node in nodes.values():
        assert {"metrics", "outputs_float_tensor", "requires_grad"} <= node.meta.keys()
        assert node.meta["outputs_float_tensor"] == (node.meta["metrics"] is not None)
    weights = [name for name, node in nodes.items() if node.meta["requires_grad"]]
    assert len(weights) == 2 and all("parameters" in name for name in weights)
    assert nodes["linear"].target is torch._C._nn.linear
    assert nodes["linear"].meta["module_path"] == "parts.0"
    assert nodes["sum_1"].op == "call_method"
    assert nodes["add"].meta["metrics"] is None


def test_clean_names_are_variable_names_in_every_call() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            scores = F.softmax(hidden, dim=-1)
            left, right = scores.chunk(2, -1)
            flat = left.reshape(-1)
            return F.relu(right).sum() - flat.sum()

    model = track_scales(Layer())
    for _ in range(12):
        model(torch.randn(5, 4))
        names = [node.meta["clean_name"] for node in model.scales_graph().nodes if node.args]
        expected_names = ["hidden", "scores", "chunk", "left", "right", "flat", "relu", "sum_1"]
        assert names == [*expected_names, "sum_2", "sub", "output"]


def test_forward_only_and_evaluation() -> None:
    model = track_scales(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2)))
    x = torch.randn(5, 4)
    model(x).sum().backward()
    assert set(directions(model).values()) == {"both"}
    model.eval()
    assert model(x).requires_grad
    assert set(directions(model).values()) == {"fwd"}
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not model(2 * x).requires_grad
        assert set(directions(model).values()) == {"fwd"}
    (found,) = (one for name, one in metrics(model).items() if name.startswith("input."))
    assert found is not None
    assert_close(found.fwd, expected(2 * x))


def test_metrics_are_of_last_call_and_backward_pass() -> None:
    model = track_scales(Call(lambda a, x: a(x).sum(), nn.Linear(4, 3)))
    first, second = torch.randn(5, 4), torch.randn(7, 4)
    (model(first) + 3 * model(second)).backward()
    found = metrics(model)["sum"]
    assert found is not None and found.bwd is not None
    assert found.bwd.mean_abs == 3.0
    found = metrics(model)["input.args_0"]
    assert found is not None and found.fwd.numel == 28
    loss = model(first)
    loss.backward(retain_graph=True)
    (loss * 5).backward()
    found = metrics(model)["sum"]
    assert found is not None and found.bwd is not None
    assert (found.bwd.mean_abs, found.bwd.numel) == (5.0, 1)


def test_graph_breaks_make_one_graph() -> None:
    def function(a: nn.Linear, b: nn.Linear, x: Tensor) -> Tensor:
        h = x * 2
        graph_break()
        h = a(h)
        graph_break()
        h += 1
        return b(h).sum()

    plain = Call(function, nn.Linear(4, 6), nn.Linear(6, 2))
    model, x = track_scales(plain), torch.randn(5, 4)
    assert_same_bits(run(plain, x), run(model, x))
    graph = model.scales_graph()
    graph.lint()
    (output,) = graph.find_nodes(op="output")
    found: set[fx.Node] = set()
    pending = [output]
    while pending:
        node = pending.pop()
        found.add(node)
        pending += [one for one in node.all_input_nodes if one not in found]
    # Every tensor leads to the loss.
    assert found == set(graph.nodes)
    names = {node.meta["tensor_name"] for node in graph.nodes}
    assert {"mul", "iadd", "sum"} <= names
    assert set(directions(model).values()) == {"both"}


def test_module_called_after_graph_breaks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            graph_break()
            return h.tanh()

    def function(a: Block, b: Block, x: Tensor) -> Tensor:
        return b(a(a(x))).sum()

    plain = Call(function, Block(), Block())
    model, x = track_scales(plain), torch.randn(5, 4)
    assert_same_bits(run(plain, x), run(model, x))
    linear = [n for n in model.scales_graph().nodes if n.target is torch._C._nn.linear]
    paths = [one.meta["module_path"] for one in linear]
    assert paths == ["parts.0.linear", "parts.0.linear", "parts.1.linear"]
    sizes = [one.meta["metrics"].fwd.mean_abs for one in linear]
    assert len(set(sizes)) == 3
    assert all(one.meta["metrics"].bwd for one in linear)


def test_checkpointed_nodes_are_inlined() -> None:
    def function(a: nn.Linear, b: nn.Linear, x: Tensor) -> Tensor:
        h = checkpoint(lambda y: F.gelu(b(F.relu(a(y)))), x, use_reentrant=False)
        return h.sum()

    plain = Call(function, nn.Linear(4, 4), nn.Linear(4, 4))
    model, x = track_scales(plain), torch.randn(5, 4)
    assert_same_bits(run(plain, x), run(model, x))
    found = {name: one for name, one in directions(model).items() if not name.startswith("empty")}
    assert set(found.values()) == {"both"}  # torch 2.11's checkpoints make empty tensors as well
    assert {"parts.0.linear", "relu", "parts.1.linear", "gelu", "sum"} <= found.keys()
    assert not any("checkpoint" in name for name in found)


def test_complex_integer_and_empty_tensors_are_ignored() -> None:
    def function(a: nn.Linear, x: Tensor, i: Tensor, empty: Tensor) -> dict[str, Any]:
        z = torch.view_as_complex(a(x).view(5, 2, 2)) * 1j
        keep = i > 2
        loss = (z.abs().sum(1) * keep).sum() + i.sum() + torch.vmap(torch.sin)(x).sum()
        return {"loss": loss + empty.sum(), "others": (keep, None, empty * 2, "text")}

    plain = Call(function, nn.Linear(4, 4))
    model = track_scales(plain)
    args = (torch.randn(5, 4), torch.arange(5), torch.zeros(0, 3))
    wanted, found = plain(*args), model(*args)
    assert_same_bits(found, wanted)
    found["loss"].backward()
    tensors = metrics(model)
    assert tensors["view_as_complex"] is None and tensors["gt"] is None
    assert "sin" not in tensors  # inside the vmap
    empty = tensors["input.args_2"]
    assert empty is not None and empty.fwd.numel == 0 and empty.bwd is None
    scalar = tensors["add_2"]
    assert scalar is not None and scalar.fwd.numel == 1 and scalar.bwd is not None


def test_frozen_and_parameterless_modules() -> None:
    model = track_scales(nn.Sequential(nn.Linear(4, 3), nn.ReLU()).requires_grad_(False))
    model(torch.randn(5, 4)).sum().backward()
    found = directions(model)
    assert found["0.weight"] == "fwd"
    (given,) = (one for name, one in found.items() if name.startswith("input."))
    assert given == found["0.linear"] == found["1.relu"] == "both"
    assert all(one.grad is None for one in model.parameters())


def test_new_shapes_are_measured() -> None:
    model = track_scales(Call(lambda a, x: a(x).sum(), nn.Linear(4, 3)))
    for size in (5, 7, 2):
        model(torch.randn(size, 4)).backward()
        found = metrics(model)["parts.0.linear"]
        assert found is not None and found.bwd is not None
        assert found.fwd.numel == found.bwd.numel == 3 * size


def test_metrics_match_reference_package() -> None:
    peer = pytest.importorskip("unit_scaling.transforms")

    def function(e: nn.Embedding, a: nn.Linear, tokens: Tensor) -> Tensor:
        h = e(tokens).flatten(0, 1)
        best = a(h).softmax(-1).argmax(-1, keepdim=True)
        return (torch.gather(h, -1, best) * a(h).relu()).sum()

    plain, tokens = (
        Call(function, nn.Embedding(30, 8), nn.Linear(8, 8)),
        torch.arange(20).view(4, 5),
    )
    graphs = []
    for package in (peer.track_scales, track_scales):
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = package(plain)
            model(tokens).backward()
        graphs.append(model.scales_graph())
    theirs, ours = graphs
    pairs = [(theirs, ours)]
    for prune, other in (
        (peer.prune_non_float_tensors, prune_non_float_tensors),
        (peer.prune_same_scale_tensors, prune_same_scale_tensors),
    ):
        pairs.append((prune(pairs[-1][0]), other(pairs[-1][1])))
    for first, second in pairs:
        assert len(first.nodes) > 5
        for node, own in zip(first.nodes, second.nodes, strict=True):
            assert (node.op, node.target) == (own.op, own.target)
            for key in ("clean_name", "outputs_float_tensor", "requires_grad"):
                assert node.meta[key] == own.meta[key], key
            if not node.meta["outputs_float_tensor"]:
                continue
            for direction in ("fwd", "bwd"):
                wanted, found = (getattr(one.meta["metrics"], direction) for one in (node, own))
                assert (wanted is None) == (found is None)
                for name in Metrics.names() if wanted else ():
                    value = pytest.approx(getattr(wanted, name), rel=1e-4, abs=1e-6, nan_ok=True)
                    assert getattr(found, name) == value, name

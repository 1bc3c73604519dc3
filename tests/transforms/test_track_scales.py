"""Tracking: metrics against an interpreter of the plain graph, and nothing else changed."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.graph.capture import Executor
from lightning_unitscale.graph.steps import steps_of
from lightning_unitscale.transforms import (
    Metrics,
    ScalesGraph,
    lossless_unit_scale,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    track_scales,
)
from tests.helpers import assert_same_bits, run
from tests.transforms.test_metrics import assert_close, expected
from tests.transforms.zoo import NETWORKS

graph_break = torch._dynamo.graph_break


class Call(nn.Module):
    """A function of modules and inputs as a module."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)

    def forward(self, *args: Any) -> Any:
        return self.function(*self.parts, *args)


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


def metrics(module: Any) -> dict[str, Metrics | None]:
    """Metrics by people's name for the tensor; the graph must be a sound one."""
    graph = module.scales_graph()
    graph.lint()
    return {
        node.meta["tensor_name"]: node.meta["metrics"]
        for node in graph.nodes
        if node.op != "output"
    }


def directions(module: Any) -> dict[str, str]:
    return {
        name: "" if one is None else "fwd" if one.bwd is None else "both"
        for name, one in metrics(module).items()
    }


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


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_the_metrics_of_the_plain_step(name: str, executor: Executor) -> None:
    module, args = MODELS[name]()
    tracked = track_scales(module)
    steps_of(tracked).use_executor(executor)  # type: ignore[union-attr]
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


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", NETWORKS)
def test_bits_stay_what_they_are(name: str, executor: Executor) -> None:
    module, inputs = NETWORKS[name]()
    tracked = track_scales(module)
    steps_of(tracked).use_executor(executor)  # type: ignore[union-attr]
    plain = run(module, *inputs)
    if executor == "eager" or name not in {"alpha_dropout", "group_norm_pooling"}:
        assert_same_bits(plain, run(tracked, *inputs))
    else:
        run(tracked, *inputs)  # AOTAutograd itself decomposes these differently
    graph = tracked.scales_graph()
    graph.lint()
    assert any(node.meta["metrics"] and node.meta["metrics"].bwd for node in graph.nodes)
    prune_same_scale_tensors(prune_non_float_tensors(graph)).lint()


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


def test_inputs_of_the_caller_are_left_alone() -> None:
    model = track_scales(Call(lambda a, x, y: (a(x) * y["scale"]).sum(), nn.Linear(4, 3)))
    x, scale = torch.randn(5, 4), torch.randn(3)
    model(x, {"scale": scale}).backward()
    assert not x.requires_grad and x.grad is None
    assert not scale.requires_grad and scale.grad is None
    found = metrics(model)
    inputs = [one for name, one in found.items() if name.startswith("input.")]
    assert len(inputs) == 2
    assert all(one is not None and one.bwd is not None for one in inputs)
    asking = x.clone().requires_grad_()
    model(asking, {"scale": scale}).backward()
    assert asking.grad is not None and scale.grad is None


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


def test_the_last_call_and_its_last_backward_pass_count() -> None:
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


def test_two_losses_with_a_backward_pass_each() -> None:
    """They share parameters and inputs, as the losses of a GAN do, and no other tensor."""

    def losses(a: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
        return a(x).sum(), 2 * a(x).tanh().sum()

    model = track_scales(Call(losses, nn.Linear(4, 3)))
    first, second = model(torch.randn(5, 4))
    first.backward()
    assert directions(model)["tanh"] == "fwd"
    assert directions(model)["parts.0.linear"] == "both"
    second.backward()
    assert set(directions(model).values()) == {"both"}


def test_gradient_penalty() -> None:
    plain = Call(lambda a, x: a(x).pow(2).sum(), nn.Linear(4, 3))
    results = []
    for model in (plain, track_scales(plain)):
        x = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
        loss = model(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.pow(2).sum()).backward()
        results.append((x.grad, [one.grad for one in model.parameters()]))
    assert_same_bits(*results)


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
    # Every tensor leads to the loss, and only what is written into lacks a gradient.
    assert found == set(graph.nodes)
    names = {node.meta["tensor_name"] for node in graph.nodes}
    assert {"mul", "iadd", "sum"} <= names
    ungraded = [name for name, one in metrics(model).items() if one and one.bwd is None]
    assert ungraded == ["iadd"]


def test_a_module_used_after_graph_breaks() -> None:
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


def test_checkpoints_stand_in_line() -> None:
    def function(a: nn.Linear, b: nn.Linear, x: Tensor) -> Tensor:
        h = checkpoint(lambda y: F.gelu(b(F.relu(a(y)))), x, use_reentrant=False)
        return h.sum()

    plain = Call(function, nn.Linear(4, 4), nn.Linear(4, 4))
    model, x = track_scales(plain), torch.randn(5, 4)
    assert_same_bits(run(plain, x), run(model, x))
    found = directions(model)
    assert set(found.values()) == {"both"}
    assert {"parts.0.linear", "relu", "parts.1.linear", "gelu", "sum"} <= found.keys()
    assert not any("checkpoint" in name for name in found)


def test_other_tensors_do_not_disturb() -> None:
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
    assert tensors["sin"] is None  # inside the vmap
    empty = tensors["input.args_2"]
    assert empty is not None and empty.fwd.numel == 0 and empty.bwd is None
    scalar = tensors["add_2"]
    assert scalar is not None and scalar.fwd.numel == 1 and scalar.bwd is not None


def test_state_that_the_module_keeps() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("replaced", torch.zeros(4))
            self.register_buffer("written", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.replaced = 0.9 * self.replaced + 0.1 * x.mean(0)
            self.written.mul_(0.9).add_(x.mean(0))
            return (self.linear(x - self.replaced) * self.written.sum()).sum()

    plain = Running()
    tracked = track_scales(plain)
    x = torch.randn(5, 4)
    for model in (plain, tracked):
        for _ in range(3):
            model.zero_grad()
            model(x).backward()
    assert_same_bits(dict(tracked.named_buffers()), dict(plain.named_buffers()))
    assert_same_bits(tracked.linear.weight.grad, plain.linear.weight.grad)
    assert not any(one.requires_grad for one in tracked.buffers())
    copy.deepcopy(tracked)


def test_kernels_that_depend_on_gradients_stay_the_same() -> None:
    def function(a: nn.Linear, x: Tensor, mask: Tensor, small: Tensor) -> Tensor:
        q = a(x)[None, None]
        h = F.scaled_dot_product_attention(q, q, q, mask)[0, 0]
        return (h.view(2, 8, 24).transpose(1, 2) @ small).square().mean()

    plain = Call(function, nn.Linear(24, 24))
    args = (torch.randn(16, 24), torch.randn(16, 16), torch.randn(8, 3))
    model = track_scales(plain)
    assert_same_bits(run(plain, *args), run(model, *args))
    found = directions(model)
    assert found["input.args_0"] == "both"
    assert found["input.args_1"] == found["input.args_2"] == "fwd"


def test_frozen_and_parameterless_modules() -> None:
    model = track_scales(nn.Sequential(nn.Linear(4, 3), nn.ReLU()).requires_grad_(False))
    model(torch.randn(5, 4)).sum().backward()
    found = directions(model)
    assert found["0.weight"] == "fwd"
    (given,) = (one for name, one in found.items() if name.startswith("input."))
    assert given == found["0.linear"] == found["1.relu"] == "both"
    assert all(one.grad is None for one in model.parameters())


def test_an_error_in_the_step_keeps_the_last_graph() -> None:
    class Failing(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise KeyError("no")
            return x.exp()

    model = track_scales(Failing())
    model(torch.ones(3))
    model.fails = True
    with pytest.raises(KeyError):
        model(torch.ones(4))
    found = metrics(model)["exp"]
    assert found is not None and found.fwd.numel == 3


def test_new_shapes() -> None:
    model = track_scales(Call(lambda a, x: a(x).sum(), nn.Linear(4, 3)))
    for size in (5, 7, 2):
        model(torch.randn(size, 4)).backward()
        found = metrics(model)["parts.0.linear"]
        assert found is not None and found.bwd is not None
        assert found.fwd.numel == found.bwd.numel == 3 * size


def test_copies_and_twice_tracked_modules() -> None:
    plain = nn.Linear(4, 3)
    model = track_scales(track_scales(plain))
    assert model.weight is not plain.weight
    model(torch.randn(5, 4)).sum().backward()
    assert len(metrics(model)) == 4
    other = copy.deepcopy(model)
    assert len(other.scales_graph().nodes) == 0
    other(torch.randn(5, 4))
    assert set(directions(other).values()) == {"fwd"}
    assert set(directions(model).values()) == {"both"}


def test_a_module_compiled_by_the_user_is_refused() -> None:
    with pytest.raises(ValueError, match="compiled already"):
        track_scales(torch.compile(nn.Linear(2, 2)))


def test_tensors_of_a_step_are_let_go() -> None:
    class Keeping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    model = track_scales(Keeping())
    alive = []
    for _ in range(3):
        result = model(torch.randn(4, requires_grad=True))
        result.sum().backward()
        alive.append(weakref.ref(result))
    del result
    gc.collect()
    assert [one() for one in alive] == [None] * 3


@pytest.mark.parametrize("depth", ["products", "all"])
def test_with_lossless_unit_scaling_in_either_order(depth: Any) -> None:
    plain = Call(
        lambda a, b, x: b(a(x).relu()).square().mean(), nn.Linear(64, 64), nn.Linear(64, 8)
    )
    x = torch.randn(32, 64) * 50
    wanted, reference = run(plain, x), track_scales(plain)
    run(reference, x)
    graphs = []
    for model in (
        track_scales(lossless_unit_scale(plain, x, depth=depth)),
        lossless_unit_scale(track_scales(plain), x, depth=depth),
    ):
        assert_same_bits(run(model, x), wanted)
        assert model.gauge()
        found = metrics(model)
        for name in ("parts.0.linear:input", "parts.0.linear:weight", "parts.1.linear:input"):
            one = found[name]
            assert one is not None and 0.5 < one.fwd.std < 2.0
        for name in ("parts.0.linear:stored", "parts.1.linear:stored"):
            one = found[name]
            assert one is not None and one.bwd is not None and 0.5 < one.bwd.std < 2.0
        if depth == "products":
            truth = metrics(reference)
            assert all(found[name] == truth[name] for name in truth)
        graphs.append(model.scales_graph().tabulate())
    assert graphs[0] == graphs[1]


def test_with_units_that_are_still_being_measured() -> None:
    """Without a loss to begin with, lossless unit scaling measures in the first real step."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(5, 8)
    model = track_scales(lossless_unit_scale(plain, x))
    for _ in range(2):
        assert_same_bits(run(model, x), run(plain, x))
        assert set(directions(model).values()) == {"both"}
        assert "0.linear" in directions(model)


def test_the_peer_finds_the_same() -> None:
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


def test_a_tensor_handed_on_as_it_is_has_one_gradient() -> None:
    """Autograd adds up the gradient of ``x.float()`` and of ``x`` in one go: they are one tensor."""

    def function(a: nn.Linear, x: Tensor) -> Tensor:
        h = a(x)
        same = F.dropout(h.float().contiguous(), 0.0)
        return (h + same * same.pow(2).mean(-1, keepdim=True).rsqrt() + same.exp()).sum()

    plain = Call(function, nn.Linear(64, 64))
    model, x = track_scales(plain), torch.randn(32, 64)
    assert_same_bits(run(plain, x), run(model, x))
    found = metrics(model)
    assert found["parts.0.linear"] == found["float"] == found["contiguous"] == found["dropout"]
    assert found["dropout"] is not None and found["dropout"].bwd is not None


def test_results_between_graph_breaks_are_those_of_the_plain_module() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.seen: list[bool] = []

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = x.exp()
            graph_break()
            self.seen.append(h.requires_grad)
            h.requires_grad = True  # as models do for their checkpoints
            graph_break()
            return self.linear(h).sum(), x.cos()

    plain, x = Asking(), torch.randn(5, 4)
    model = track_scales(plain)
    loss, other = model(x)
    plain(x)[0].backward()
    loss.backward()
    assert model.seen == [False]
    assert_same_bits(model.linear.weight.grad, plain.linear.weight.grad)
    # The caller's backward pass reaches the result that has no parameter in it.
    other.sum().backward()
    assert directions(model)["cos"] == "both"

"""FP8 layers that cast inside a compiled graph: saved tensors, and when the graph runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.capture.module_steps import matmuls_of
from lightning_unitscale.functional.low_precision import OPERAND
from lightning_unitscale.matmuls import compiled_formats
from lightning_unitscale.matmuls.compiled_formats import FormatsInGraph, RoundedGraph
from lightning_unitscale.matmuls.gauge import Gauge, GaugePair
from lightning_unitscale.matmuls.measurement import Unrepresentable
from lightning_unitscale.transforms import compile, fp8_linears, lossless_unit_scale
from tests.helpers import assert_same_bits

WIDTH, ROWS = 32, 48
aten, ours = torch.ops.aten, torch.ops.lightning_unitscale


class Net(nn.Module):
    """Two layers with a function between them, or none."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Deep(nn.Module):
    """Layers of one class, which share the compiled code of the first."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.nets = nn.ModuleList(Net() for _ in range(3))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for net in self.nets:
            x = x + (checkpoint(net, x, use_reentrant=False) if self.is_checkpointed else net(x))
        return x


class Seen(CustomGraphPass):
    """Keeps the forward and the backward graphs that Inductor compiles."""

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []

    def __call__(self, graph: fx.Graph) -> None:
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        self.graphs.append(copy)

    def uuid(self) -> None:
        return None


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        # Of torch's own, while it compiles.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield
    torch._dynamo.reset()


@pytest.fixture
def seen() -> Iterator[list[fx.Graph]]:
    graph_pass = Seen()
    with config.patch(post_grad_custom_pre_pass=graph_pass):
        yield graph_pass.graphs


def example(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    x.grad = None
    result = module(x)
    result.square().mean().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert x.grad is not None
    return [result.detach(), x.grad, *gradients]


def pair(net: nn.Module, x: Tensor, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A module in FP8, as it is and compiled."""
    if options.get("scaling") != "dynamic":
        net = lossless_unit_scale(net, x)
        step(net, x)
        net(x)
    made = fp8_linears(net, **options)
    compiled = compile(made)
    # Its first step has all compiled again.
    step(made, x)
    matmuls_of(made).session.units.step = matmuls_of(compiled).session.units.step
    return made, compiled


def count(graph: fx.Graph, target: Any) -> int:
    return sum(node.target is target for node in graph.nodes)


def num_casts(graph: fx.Graph) -> int:
    converted = graph.find_nodes(
        op="call_function", target=torch.ops.prims.convert_element_type.default
    )
    return sum(node.args[1] is OPERAND for node in converted)


def kept(graph: fx.Graph) -> list[Tensor]:
    """Return the larger tensors that a forward graph makes for the backward graph."""
    (results,) = graph.output_node().args
    made = [node for node in results[1:] if node is not None and node.op != "placeholder"]
    return [value for node in made if (value := node.meta["val"]).numel() > 4 * WIDTH]


@pytest.mark.slow  # Inductor compiles C++
@pytest.mark.parametrize("scaling", ["constant", "dynamic"])
def test_casts_are_plain_operations_and_save_no_operand(scaling: Any, seen: list[fx.Graph]) -> None:
    x = example(torch.bfloat16)
    compiled = pair(Net().to(torch.bfloat16), x, scaling=scaling)[1]
    step(compiled, x)
    forward, backward = seen
    for graph, num_matmuls in ((forward, 2), (backward, 4)):
        assert count(graph, ours.matmul.default) == 0
        matmuls = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
        assert len(matmuls) == num_matmuls
        # Sums may be rounded on the way in the forward pass alone.
        assert {node.args[7] for node in matmuls} == {graph is forward}
    # Each operand once in the forward pass. There are inputs and weights again, and gradients.
    assert num_casts(forward) == 4 and num_casts(backward) == 6
    # Nothing goes along rows and is written the other way round.
    assert count(forward, ours.fp8_turned.default) == 0
    assert count(backward, ours.fp8_turned.default) == 4
    # The second operand of ``down`` comes from a tensor that the function's gradient reads anyway.
    (only,) = kept(forward)
    assert only.shape == (ROWS, 4 * WIDTH) and only.dtype is torch.bfloat16
    assert "4 of 4" not in compiled.explain() and "100 % of their FLOPs" in compiled.explain()


@pytest.mark.slow
def test_operands_needed_only_by_matmuls_are_saved_in_fp8(seen: list[fx.Graph]) -> None:
    x = example(torch.bfloat16)
    step(pair(Net(lambda x: x).to(torch.bfloat16), x)[1], x)
    (only,) = kept(seen[0])
    assert only.dtype is OPERAND and only.shape == (ROWS, 4 * WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"grid": "moving"}, {"scaling": "dynamic"}], ids=str)
def test_compiled_steps_match_eager(options: dict[str, Any]) -> None:
    x = example()
    made, compiled = pair(Net(torch.relu), x, **options)
    for _ in range(3):
        torch.testing.assert_close(step(compiled, x), step(made, x), rtol=1e-5, atol=1e-7)
    if "scaling" not in options:
        units = matmuls_of(compiled).session.units
        pairs = {
            name: GaugePair(pair.log2_sigma + 3, pair.log2_gamma + 3)
            for name, pair in units.gauge.pairs.items()
        }
        for each in (made, compiled):
            matmuls_of(each).session.units.set_gauge(Gauge(pairs))
        torch.testing.assert_close(step(compiled, x), step(made, x), rtol=1e-5, atol=1e-7)
    # Neither numbers that move nor units compile anything again.
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_changed_decisions_recompile() -> None:
    x = example()
    made, compiled = pair(Net(torch.relu), x)
    before = step(compiled, x)
    name, other = "up.linear", "down.linear"
    for unfit in (Unrepresentable({}, {other: "wide"}), Unrepresentable({name: "wide"}, {})):
        for each in (made, compiled):
            matmuls_of(each).formats[0].leave_out(unfit)
        found = step(compiled, x)
        torch.testing.assert_close(found, step(made, x), rtol=1e-5, atol=1e-7)
        assert any(not torch.equal(one, two) for one, two in zip(found, before, strict=True))
        before = found
    assert counters["stats"]["unique_graphs"] == 3
    # A look measures operands: the matmuls run one by one in it.
    matmuls_of(compiled).session.units.is_looking = True
    step(compiled, x)
    assert len(matmuls_of(compiled).session.units.send()().matmuls) == 6
    matmuls_of(compiled).session.units.is_looking = False
    assert_same_bits(step(compiled, x), found)
    assert counters["stats"]["unique_graphs"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_layers_of_same_class_share_graph(is_checkpointed: bool) -> None:
    x = example()
    net = lossless_unit_scale(Deep(), x)
    step(net, x)
    net(x)
    made, compiled = fp8_linears(net), fp8_linears(net)
    expected = step(made, x)
    made.is_checkpointed = compiled.is_checkpointed = is_checkpointed
    for each in compiled.nets:
        each.compile()
    for _ in range(2):
        torch.testing.assert_close(step(compiled, x), expected, rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert "18 of 18 matmuls" in compiled.explain() or is_checkpointed
    # Outside of the module's steps a part of it has no formats.
    part = compiled.nets[1]
    torch.testing.assert_close(part(x), Net.forward(part, x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_checkpoint_inside_graph_saves_only_its_input(seen: list[fx.Graph]) -> None:
    x = example()
    net = nn.Sequential(Deep(is_checkpointed=True))
    net = lossless_unit_scale(net, x)
    step(net, x)
    net(x)
    made, compiled = fp8_linears(net), fp8_linears(net)
    expected = step(made, x)
    compiled[0].compile()
    torch.testing.assert_close(step(compiled, x), expected, rtol=1e-5, atol=1e-6)
    assert count(seen[0], ours.matmul.default) == 0
    assert {(value.dtype, value.shape) for value in kept(seen[0])} == {(x.dtype, x.shape)}


class FakeSites:
    """The names of matmuls without an owner."""

    module = None

    def run_of(self, *_: Any) -> None:
        return None

    def path_of(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_matmul_arguments_have_required_layout(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both operands along the inner dimension, scales at multiples of 16 bytes, and the bias."""

    def both(x: Tensor, w: Tensor, b: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        y = aten.addmm(b, x, w.t())
        return y, tangents @ w, tangents.t() @ x

    with FakeTensorMode():
        shapes = [(ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,), (ROWS, WIDTH)]
        tensors = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        graph = make_fx(both)(*tensors).graph
    for node, name in zip(
        graph.find_nodes(op="placeholder"), ("x", "w", "b", "tangents_1"), strict=True
    ):
        node.name = name
    addmm, *grads = [node for node in graph.nodes if "mm" in str(node.target)]
    for number, node in enumerate((addmm, *grads)):
        node.meta["seq_nr"] = 1
        if number:
            node.meta["partitioner_tag"] = "is_backward"
    monkeypatch.setattr(compiled_formats, "guard_by", lambda *_: True)
    monkeypatch.setattr(
        RoundedGraph, "modes_now", lambda self: dict.fromkeys(self.layers, ("constant", "E5M2"))
    )
    monkeypatch.setattr(compiled_formats, "is_weight", lambda *_: True)
    session: Any = SimpleNamespace(sites=FakeSites(), numerics=(None,))
    FormatsInGraph(graph, session).run()
    graph.lint()
    matmuls = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    assert len(matmuls) == 3 and count(graph, ours.matmul.default) == 0
    for node in matmuls:
        rows, columns, *scales = node.meta["eager_input_vals"][0][:4]
        assert rows.is_contiguous() and columns.t().is_contiguous()
        assert all(scale.shape == (1, 1) and scale.storage_offset() % 4 == 0 for scale in scales)
        assert {value.device.type for value in (rows, columns, *scales)} == {"cuda"}
    forward, *others = matmuls
    # It adds a bias to what it rounds to 16 bits.
    joins = dtype is torch.bfloat16
    assert (forward.args[4] is not None) == joins
    assert count(graph, aten.add.Tensor) == (not joins)
    assert [node.meta["eager_input_vals"][0][0].dtype for node in others] == [torch.float8_e5m2] * 2

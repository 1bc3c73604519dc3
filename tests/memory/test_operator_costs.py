"""Operations against torch's counter and against direct counting; bytes moved by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from lightning_unitscale.memory.costs import operator_costs
from lightning_unitscale.profiler import aten_node_costs, profile_graph
from tests.memory.networks import Step
from tests.memory.oracles import sum_of

aten = torch.ops.aten


def _attention_by_matmuls(linear: nn.Module, x: Tensor) -> Tensor:
    q, k, v = linear(x).view(2, 10, 3, 4, 8).permute(2, 0, 3, 1, 4)
    return (q @ k.mT).softmax(-1) @ v


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.randn(3, 5, 8)),
    "matmuls": lambda: (Step(_attention_by_matmuls, nn.Linear(16, 96)), torch.randn(2, 10, 16)),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)),
        torch.randn(2, 3, 16, 16),
    ),
    "transposed": lambda: (
        nn.Sequential(nn.Conv1d(4, 8, 3), nn.ConvTranspose1d(8, 4, 4, 2)),
        torch.randn(2, 4, 20),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_flops_match_torch_flop_counter(name: str) -> None:
    module, given = CASES[name]()
    with FlopCounterMode(display=False) as forward:
        loss = sum_of(module(given))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    profile = profile_graph(module, given, loss=sum_of)
    assert profile.fwd_flops == forward.get_total_flops() > 0
    assert profile.bwd_flops == backward.get_total_flops() > 0


def test_grouped_convolution_gradients_cost_forward_flops() -> None:
    module = nn.Conv2d(16, 32, 3, padding=1, groups=4)
    (node,) = profile_graph(module, torch.randn(2, 16, 8, 8).requires_grad_()).nodes
    assert node.fwd_flops == 2 * (2 * 8 * 8) * 32 * 4 * 9
    assert node.bwd_flops == 2 * node.fwd_flops


def test_fused_attention_counts_its_matmuls() -> None:
    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    given = torch.randn(2, 4, 10, 8, requires_grad=True)
    (node,) = profile_graph(Step(attention), given).nodes
    matmul = 2 * 2 * 4 * 10 * 10 * 8
    # Backward: the scores again, then the gradients of weights, value, query and key.
    assert (node.fwd_flops, node.bwd_flops) == (2 * matmul, 5 * matmul)


@pytest.mark.parametrize(
    ("function", "args", "flops"),
    [
        (aten.mv.default, (torch.ones(3, 4), torch.ones(4)), 24),
        (aten.dot.default, (torch.ones(4), torch.ones(4)), 8),
        (aten.addmv.default, (torch.ones(3), torch.ones(3, 4), torch.ones(4)), 24),
        (aten.add.Tensor, (torch.ones(3), torch.ones(3)), 0),
    ],
    ids=["mv", "dot", "addmv", "add"],
)
def test_flops_of_matmuls_missing_in_torch_counter(function, args, flops) -> None:  # type: ignore[no-untyped-def]
    assert operator_costs(function, args, {}, function(*args)).flops == flops


@pytest.mark.parametrize(
    ("function", "args", "num_bytes"),
    [
        (aten.add.Tensor, (torch.ones(6), torch.ones(6)), 3 * 24),
        (aten.add.Tensor, (torch.ones(2, 6), torch.ones(6)), 2 * 48 + 24),
        (aten.mul.Tensor, (torch.ones(2, 6), torch.ones(1, 6).expand(2, 6)), 2 * 48 + 24),
        (aten.mul_.Tensor, (torch.ones(6), 2.0), 2 * 24),
        (aten.view.default, (torch.ones(2, 6), [12]), 0),
        (aten.t.default, (torch.ones(2, 6),), 0),
        (aten.empty_like.default, (torch.ones(6),), 0),
        (aten.zeros_like.default, (torch.ones(6),), 2 * 24),
        (aten.cat.default, ([torch.ones(2), torch.ones(4)],), 2 * 24),
    ],
    ids=["add", "vector", "expanded", "in_place", "view", "transpose", "empty", "zeros", "cat"],
)
def test_bytes_moved_by_operators(function, args, num_bytes) -> None:  # type: ignore[no-untyped-def]
    assert operator_costs(function, args, {}, function(*args)).bytes_moved == num_bytes


def test_costs_of_aten_graph_nodes() -> None:
    graph = make_fx(lambda a, b: (a @ b).relu(), tracing_mode="fake")(
        torch.ones(2, 3), torch.ones(3, 4)
    ).graph
    costs = {node.name: aten_node_costs(node) for node in graph.nodes}
    assert costs["mm"].flops == 48
    assert costs["mm"].bytes_moved == 4 * (6 + 12 + 8)
    assert (costs["relu"].flops, costs["relu"].bytes_moved) == (0, 64)
    assert costs["output"] == costs["a_1"] == aten_node_costs(next(iter(graph.nodes)))


def test_symbolic_sizes_use_traced_sizes() -> None:
    traced = make_fx(lambda a, b: a @ b, tracing_mode="symbolic")
    graph = traced(torch.ones(5, 3), torch.ones(3, 4)).graph
    (matmul,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert aten_node_costs(matmul).flops == 2 * 5 * 3 * 4

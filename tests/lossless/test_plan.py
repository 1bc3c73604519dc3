"""Depth "all": which tensors have units of their own, and that FP16 needs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_unitscale.capture.steps import steps_of
from lightning_unitscale.graph.aliasing import make_out_of_place
from lightning_unitscale.graph.nodes import tensor_name
from lightning_unitscale.lossless.plan import StoredUnits
from lightning_unitscale.transforms import Gauge, GaugePair, lossless_unit_scale
from tests.helpers import assert_same_bits, captured, run
from tests.zoo import Step, w, x


def _owners(function: Callable[..., Any], *inputs: Tensor) -> dict[str, str | None]:
    graph: fx.Graph = captured(function, *inputs).graph
    make_out_of_place(graph)
    units = StoredUnits(graph)
    return {
        tensor_name(node): units.owner(node)
        for node in graph.nodes
        if node.op in {"call_function", "call_method"}
    }


def test_a_chain_that_keeps_units_has_one_gauge() -> None:
    def function(a: Tensor) -> Tensor:
        h = a.sin().view(-1).unsqueeze(0)
        h = F.relu(-h.clone()).to(torch.float64).transpose(0, 1)
        first, second = h.abs().chunk(2)
        return first + second

    owners = _owners(function, x(4, 4))
    assert owners.pop("add") == "add"
    assert set(owners.values()) == {"sin"}
    assert {"view", "relu", "to", "chunk", "getitem", "getitem_1"} <= set(owners)


def test_operations_that_do_not_keep_units_have_their_own() -> None:
    def function(a: Tensor) -> Tensor:
        h = F.alpha_dropout(a.sin(), 0.2, training=True)
        top, _ = h.max(dim=0)
        return top.exp() * h.softmax(0)

    owners = _owners(function, x(4, 4))
    assert owners["alpha_dropout"] == "alpha_dropout"
    assert owners["max"] is None  # several results: in true units on both sides
    assert owners["getitem"] == "getitem"
    assert owners["exp"] == "exp"
    assert owners["mul"] == "mul"


def test_what_has_no_units() -> None:
    def function(a: Tensor, index: Tensor) -> Tensor:
        z = torch.view_as_complex(a.sin().view(8, 2))
        real = torch.view_as_real(z * z)
        numbers = index.to(torch.float32) + torch.ones(16)
        bits = a.cos().view(torch.int32) & 1
        written = a.tan()
        seen = written.view(-1)
        seen[0] = 1.0
        return real.flatten() + numbers + bits.flatten() + seen + written.flatten()

    owners = _owners(function, x(4, 4), torch.arange(16))
    for name in ("view_as_complex", "mul", "to", "ones", "tan"):
        assert owners[name] is None, name
    assert owners["sin"] == "sin"
    assert owners["cos"] == "cos"
    assert owners["view_as_real"] == "view_as_real"
    assert owners["view_1"] is None  # the bits of a cosine, read as integers
    assert owners["and"] is None


def test_the_stored_tensors_are_near_unit_scale() -> None:
    function = Step(
        lambda one, two, a: two(F.gelu(one(a)) * 1e-3).exp().sum(0) * 1e4,
        nn.Linear(8, 16),
        nn.Linear(16, 8),
    )
    inputs = (x(5, 8),)
    scaled = lossless_unit_scale(function, *inputs, depth="all")
    gauge = scaled.gauge()
    assert gauge["mul"].log2_sigma < -5  # gelu times a thousandth
    assert gauge["mul_1"].log2_sigma > 10
    assert gauge["w0.linear"].log2_gamma > 5
    assert {"gelu", "exp", "sum", "mean", "w1.linear"} <= set(gauge)


class Deep(nn.Module):
    """Its gradients underflow in FP16 long before they reach the first layer."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.half_precision = half

    def forward(self, a: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.half_precision):
            for one in self.layers:
                a = F.silu(one(a)) * 2.0**-6
        return (a.float() * 2.0**-8).square().mean()


def test_sixteen_bits_keep_gradients_that_the_plain_model_loses() -> None:
    exact, plain, a = Deep(half=False), Deep(half=True), torch.randn(8, 16)
    plain.load_state_dict(exact.state_dict())
    expected, lost = (run(one, a)["parameters"] for one in (exact, plain))
    name = "layers.0.weight"
    assert float(lost[name].abs().max()) == 0.0
    assert float(expected[name].abs().max()) > 0.0
    # Measured in FP32: what has underflowed cannot be measured any more.
    gauge = lossless_unit_scale(exact, a, depth="all").gauge()
    assert gauge["layers.0.linear"].log2_gamma < -24  # the smallest number of FP16 and below
    scaled = lossless_unit_scale(plain, a, depth="all")
    (rewrite,) = steps_of(scaled).passes
    rewrite.set_gauge(gauge)
    assert set(gauge) == set(scaled.gauge())
    kept = run(scaled, a)["parameters"]
    for one, gradient in expected.items():
        error = (kept[one] - gradient).norm() / gradient.norm()
        assert error < 0.01, one


def _diamond(m: nn.Module, a: Tensor) -> Tensor:
    h = m(a)
    return h.sin() + h * h.exp() - h.mean() + torch.cat([h, h * 2.0], 0)[: h.shape[0]]


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_a_reused_tensor_are_summed_in_the_plain_order(seed: int) -> None:
    torch.manual_seed(seed)
    module, inputs = Step(_diamond, nn.Linear(8, 8)), (x(5, 8, scale=0.1),)
    expected = run(module, *inputs)
    scaled = lossless_unit_scale(module, *inputs, depth="all")
    assert_same_bits(run(scaled, *inputs), expected)
    (rewrite,) = steps_of(scaled).passes
    names = sorted(scaled.gauge())
    rewrite.set_gauge(
        Gauge({name: GaugePair(i % 7 - 3, 5 - i % 11) for i, name in enumerate(names)})
    )
    assert_same_bits(run(scaled, *inputs), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda p, a: torch.add(a.sin(), p, alpha=3),
        lambda p, a: a.sin() + 1.0,
        lambda p, a: 2.0 - a.sin() * p,
        lambda p, a: torch.stack([a.sin(), p.expand(5, 3)]).sum(0),
        lambda p, a: torch.cat((a.sin(), a.cos()), dim=1) * 0.3,
        lambda p, a: torch.where(a > 0, a.sin(), p),
        lambda p, a: a.sin().masked_fill(a > 0, 2.0),
        lambda p, a: a.sin() * (a > 0),
        lambda p, a: torch.addcmul(p, a.sin(), a.cos(), value=0.7),
        lambda p, a: a.sin().pow(2) / (p.abs() + 1),
        lambda p, a: torch.sort(a.sin(), dim=0)[0].cumsum(0) * p,
        lambda p, a: F.pad(a.sin(), (1, 1), value=3.0),
        lambda p, a: F.pad(a.sin(), (1, 1)) @ p.new_ones(5, 2),
        lambda p, a: a.sin().to(torch.bfloat16).float() + p,
        lambda p, a: torch.logsumexp(a.sin(), 0) + F.log_softmax(p, 0),
        lambda p, a: a.sin().detach() * p + a.sin().float() * a.sin().mean(),
        lambda p, a: torch.lerp(a.sin(), p, 0.3).T.reshape(-1)[1:].unfold(0, 2, 1),
        lambda p, a: a.sin().topk(2, dim=1).values.norm() * p,
        lambda p, a: a.sin().contiguous().index_select(0, torch.tensor([1, 1])) @ p,
    ],
)
def test_operations_between_products_have_the_same_bits(function: Callable[..., Tensor]) -> None:
    module, inputs = Step(function, w(3, scale=0.3)), (x(5, 3, scale=0.01),)
    expected = run(module, *inputs)
    scaled = lossless_unit_scale(module, *inputs, depth="all")
    assert_same_bits(run(scaled, *inputs), expected)
    assert len(scaled.gauge()) > 2

"""The factors around one product cancel, whatever the gauge."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.graph.matmuls import Product, product_of
from lightning_unitscale.graph.passes import Region
from lightning_unitscale.lossless.gauge import ONE, Factor, Gauge, GaugePair, gamma, sigma
from lightning_unitscale.lossless.plan import operand_name, plan_product
from lightning_unitscale.lossless.units import Edit, NodePlan
from tests.helpers import captured


def _planned(
    function: Callable[..., Tensor], *inputs: Tensor, gauge: Gauge | None = None
) -> tuple[Product, NodePlan]:
    graph_module = captured(function, *inputs)
    (product,) = [one for one in map(product_of, graph_module.graph.nodes) if one is not None]
    return product, plan_product(product, Region(graph_module), gauge or Gauge())


def _edits(plan: NodePlan) -> dict[str, Edit]:
    return {edit.name.rpartition(":")[2] if edit.path else "result": edit for edit in plan.edits}


def _random(names: set[str]) -> Gauge:
    dice = random.Random(4)
    return Gauge(
        {one: GaugePair(dice.randint(1, 9), dice.randint(-9, -1)) for one in sorted(names)}
    )


def _names(plan: NodePlan) -> set[str]:
    return {
        name
        for edit in plan.edits
        for factor in (edit.forward, edit.backward)
        for name, _ in (*factor.sigmas, *factor.gammas)
    }


def _inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape).requires_grad_() for shape in shapes]


def test_the_factors_of_a_linear_cancel_in_both_directions() -> None:
    product, plan = _planned(F.linear, *_inputs((5, 4), (3, 4), (3,)))
    edits = _edits(plan)
    assert set(edits) == {"input", "weight", "bias", "result"}
    gauge = _random(_names(plan))

    def exponent(factor: Factor) -> int:
        return factor.exponent(gauge)

    x, w, b, y = (edits[one] for one in ("input", "weight", "bias", "result"))
    # Forward: (true x) (true w) comes out as it is, and the bias meets the product in its units.
    x_own, w_own = (exponent(sigma(operand_name(product, one))) for one in product.operands)
    assert exponent(x.forward) == -x_own
    assert exponent(w.forward) == -w_own
    assert exponent(y.forward) == x_own + w_own
    assert exponent(b.forward) == -(x_own + w_own)
    # Backward: the gradient arrives in the product's own gamma, and leaves in true units.
    arriving = exponent(gamma(str(product.node.meta["tensor_name"])))
    assert exponent(y.backward) == -arriving
    assert exponent(x.backward) == arriving + w_own
    assert exponent(w.backward) == arriving + x_own
    assert exponent(b.backward) == arriving


@pytest.mark.parametrize("beta", [1, 0.5, 0, 0.0])
def test_what_is_added_times_zero_is_left_alone(beta: float) -> None:
    def added(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.baddbmm(x, a, b, beta=beta)

    _, plan = _planned(added, *_inputs((2, 3, 5), (2, 3, 4), (2, 4, 5)))
    assert ("input" in _edits(plan)) == (beta != 0)


def test_names_and_what_is_measured() -> None:
    product, plan = _planned(F.linear, *_inputs((5, 4), (3, 4), (3,)))
    measured = [operand_name(product, one) for one in product.operands]
    assert measured == ["linear:input", "linear:weight"]
    edits = _edits(plan)
    assert edits["input"].forward_name == "linear:input"
    assert edits["input"].forward_unit == sigma("linear:input")
    assert edits["result"].backward_name == "linear"
    assert product_of(next(iter(product.node.graph.nodes))) is None


@pytest.mark.parametrize("scale", [None, 0.3, -2.0])
def test_a_fused_attention_takes_the_units_of_query_and_key_in_its_temperature(
    scale: float | None,
) -> None:
    gauge = Gauge(
        {
            "scaled_dot_product_attention:query": GaugePair(5),
            "scaled_dot_product_attention:key": GaugePair(-2),
            "scaled_dot_product_attention:value": GaugePair(7),
        }
    )
    inputs = _inputs(*[(1, 2, 5, 16)] * 3)
    _, plan = _planned(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale),
        *inputs,
        gauge=gauge,
    )
    ((key, value),) = plan.kwargs
    assert (key, value) == ("scale", (0.25 if scale is None else scale) * 2.0**3)
    edits = _edits(plan)
    drifted = Gauge({name: GaugePair(pair.log2_sigma + 2) for name, pair in gauge.items()})
    for now in (gauge, drifted):
        logits = edits["query"].forward.exponent(now) + edits["key"].forward.exponent(now)
        assert math.ldexp(value, logits) == (0.25 if scale is None else scale)
        assert edits["value"].forward.exponent(now) + edits["result"].forward.exponent(now) == 0
    assert edits["query"].forward.exponent(gauge) == -5


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("keyword", [False, True])
def test_the_bias_of_a_fused_attention(learned: bool, keyword: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if keyword:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.scaled_dot_product_attention(q, k, v, mask)

    mask = torch.randn(5, 5, requires_grad=learned)
    _, plan = _planned(function, *_inputs(*[(1, 2, 5, 16)] * 3), mask)
    edit = _edits(plan)["attn_mask"]
    assert edit.path == (("attn_mask",) if keyword else (3,))
    assert edit.forward == ONE
    name = "scaled_dot_product_attention"
    assert edit.backward == (gamma(name) * sigma(f"{name}:value") if learned else ONE)


def test_a_mask_of_bools_needs_no_factor() -> None:
    mask = torch.ones(5, 5, dtype=torch.bool)
    _, plan = _planned(F.scaled_dot_product_attention, *_inputs(*[(1, 2, 5, 16)] * 3), mask)
    assert "attn_mask" not in _edits(plan)

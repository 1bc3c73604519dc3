"""Attention has the logits (m / d) q.k, whatever form the code has."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_unitscale.rules.flow import Flow
from lightning_unitscale.rules.patterns import logit_factor, times_number
from lightning_unitscale.rules.transform import unit_scale
from tests.helpers import captured
from tests.rules.models import Of
from tests.rules.oracle import decided, flow_of

B, H, T, D = 2, 4, 12, 16
WIDTH = H * D

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def _in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores /= 4.0
    scores.add_(torch.zeros(T, T))
    return scores.softmax(-1) @ v


def _flat(q: Tensor, k: Tensor, v: Tensor, matmul: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    q, k, v = (value.flatten(0, 1) for value in (q, k, v))
    return torch.bmm(matmul(q, k.mT).softmax(-1), v).view(B, H, T, D)


def _einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhtd,bhsd->bhts", q, k).mul(D**-0.5)
    return torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), v)


def _stable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / 4
    return F.softmax(scores - scores.amax(-1, keepdim=True), dim=-1) @ v


def _by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / 4
    scores = scores - scores.amax(-1, keepdim=True)
    return scores.exp() / scores.exp().sum(-1, keepdim=True) @ v


def _by_hand_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    terms = torch.exp(torch.einsum("bhtd,bhsd->bhts", q, k) / 4)
    return torch.div(terms, torch.sum(terms, -1).unsqueeze(-1) + 1e-12) @ v


def _by_hand_after_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    terms = (q @ k.mT / 4).exp()
    return (terms @ v) / terms.sum(-1, keepdim=True).clamp(min=1e-9)


def _by_hand_with_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    terms = (q @ k.mT / torch.tensor(4.0)).exp() * torch.ones(T, T)
    return terms / terms.sum(-1, keepdim=True) @ v


def _by_hand_in_logarithms(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / 4
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


FORMS: dict[str, Form] = {
    "fused": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "fused_keywords": lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v),
    "fused_scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.7),
    "fused_no_mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.zeros(T, T)),
    "divided": lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), -1) @ v,
    "multiplied": lambda q, k, v: ((q @ k.mT) * D**-0.5).softmax(-1) @ v,
    "number_first": lambda q, k, v: (D**-0.5 * (q @ k.mT)).softmax(-1) @ v,
    "query_first": lambda q, k, v: F.softmax((q * D**-0.5) @ k.mT, dim=-1) @ v,
    "both_first": lambda q, k, v: F.softmax((q * D**-0.25) @ (k * D**-0.25).mT, dim=-1) @ v,
    "unscaled": lambda q, k, v: F.softmax(q @ k.mT, dim=-1) @ v,
    "odd_number": lambda q, k, v: F.softmax(q @ k.mT * 3.7 / 11, dim=-1) @ v,
    "methods": lambda q, k, v: q.matmul(k.mT).div(4.0).softmax(dim=-1).matmul(v),
    "keywords": lambda q, k, v: (
        torch.softmax(torch.div(torch.matmul(q, other=k.mT), other=4.0), dim=-1) @ v
    ),
    "all_keywords": lambda q, k, v: torch.mul(input=q @ k.mT, other=0.25).softmax(-1) @ v,
    "in_place": _in_place,
    "einsum": _einsum,
    "bmm": lambda q, k, v: _flat(q, k, v, lambda a, b: torch.bmm(a, b) * 0.25),
    "baddbmm": lambda q, k, v: _flat(
        q, k, v, lambda a, b: torch.baddbmm(torch.zeros(B * H, T, T), a, b, alpha=0.25)
    ),
    "baddbmm_beta": lambda q, k, v: _flat(
        q, k, v, lambda a, b: torch.baddbmm(torch.ones(1, 1, T), a, b, beta=0, alpha=0.25) * 0.5
    ),
    "mask": lambda q, k, v: torch.softmax(q @ k.mT / 4 + torch.zeros(T, T), -1) @ v,
    "mask_before": lambda q, k, v: (
        torch.softmax((q @ k.mT).masked_fill(torch.zeros(T, T).bool(), -1e9) / 4, -1) @ v
    ),
    "where": lambda q, k, v: (
        torch.softmax(torch.where(torch.ones(T, T).bool(), q @ k.mT / 4, -torch.inf), -1) @ v
    ),
    "softmax_in_float32": lambda q, k, v: (
        F.softmax(q @ k.mT / 4, dim=-1, dtype=torch.float32).to(q.dtype) @ v
    ),
    "module": lambda q, k, v: nn.Softmax(dim=-1)(q @ k.mT / 4) @ v,
    "stable": _stable,
    "tensor": lambda q, k, v: torch.softmax(q @ k.mT / torch.sqrt(torch.tensor(D)), -1) @ v,
    "tensor_of_integer": lambda q, k, v: torch.softmax(q @ k.mT / torch.tensor(D), -1) @ v,
    "new_tensor": lambda q, k, v: torch.softmax(q @ k.mT * q.new_tensor(D).rsqrt(), -1) @ v,
    "full_like": lambda q, k, v: torch.softmax(q @ k.mT * torch.full_like(q.sum(), 0.25), -1) @ v,
    "tensor_with_query": lambda q, k, v: torch.softmax(q / torch.tensor(4.0) @ k.mT, -1) @ v,
    "one_for_each_head": lambda q, k, v: (
        torch.softmax(q @ k.mT * torch.full((H, 1, 1), 3.0), -1) @ v
    ),
    "numpy": lambda q, k, v: torch.softmax(q @ k.mT / np.sqrt(D), -1) @ v,
    "times_mask": lambda q, k, v: torch.softmax(q @ k.mT * 0.25 * torch.ones(T, T) - 0.0, -1) @ v,
    "times_truth": lambda q, k, v: torch.softmax(q @ k.mT * 0.25 * torch.ones(T, T).bool(), -1) @ v,
    "by_hand": _by_hand,
    "by_hand_once": _by_hand_once,
    "by_hand_after_values": _by_hand_after_values,
    "by_hand_with_a_mask": _by_hand_with_a_mask,
    "by_hand_in_logarithms": _by_hand_in_logarithms,
}  # fmt: skip


def _model(form: Form) -> nn.Module:
    torch.manual_seed(0)

    def attend(parts: nn.ModuleList, x: Tensor) -> Tensor:
        q, k, v = parts[0](x).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
        return parts[1](form(q, k, v).transpose(1, 2).reshape(B, T, WIDTH))

    return Of(attend, nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))


# Forms in which one step is written in another way than in a form of the first tier.
_VARIANTS = {
    *("baddbmm_beta", "mask_before", "stable", "tensor_of_integer", "new_tensor", "full_like"),
    *("tensor_with_query", "times_mask", "times_truth", "by_hand_once", "by_hand_after_values"),
}


@pytest.mark.slow_cases(4)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in _VARIANTS else []) for name in FORMS],
)
def test_attention_logits_are_scaled_by_m_over_d(name: str) -> None:
    x, mult = torch.randn(B, T, WIDTH), 3.0
    module = unit_scale(_model(FORMS[name]), attention_mult=mult)
    y = module(x)
    qkv, out = (part.weight for part in module.parts)
    q, k, v = (x @ qkv.T * WIDTH**-0.5).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
    mixed = torch.softmax(mult / D * q @ k.mT, -1) @ v
    expected = mixed.transpose(1, 2).reshape(B, T, WIDTH) @ out.T
    # Everything after the softmax is linear: its factors are for scale, not for the function.
    ratio = (y * expected).sum() / expected.square().sum()
    torch.testing.assert_close(y, ratio * expected, rtol=1e-3, atol=1e-5)
    assert 0.6 < float(y.detach().square().mean().sqrt()) < 1.6


@pytest.mark.slow
def test_learned_temperature_is_not_changed() -> None:
    """Attention by cosines: (1 / d) q.k of tensors at RMS 1 is what its author wrote."""

    def attend(parts: nn.ModuleList, x: Tensor) -> Tensor:
        q, k = (F.normalize(part(x), dim=-1) for part in parts[:2])
        scores = q @ k.mT * parts[2].weight.exp()
        return torch.softmax(scores + torch.zeros(T, T), -1) @ x

    torch.manual_seed(0)
    x = torch.randn(H, T, D)
    temperature = nn.Embedding(1, 1)
    nn.init.constant_(temperature.weight, 2.0)
    module = Of(attend, nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False), temperature)
    scaled = unit_scale(module)
    with torch.no_grad():
        y, expected = scaled(x), module(x)
    # By the last matmul's factor alone.
    ratio = float((y * expected).sum() / expected.square().sum())
    torch.testing.assert_close(y, ratio * expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "form",
    [
        lambda s: s / s.sum(-1, keepdim=True),
        lambda s: s.exp() / s.sum(-1, keepdim=True),
        lambda s: s.exp() / s.shape[-1],
        lambda s: s.sum(-1, keepdim=True) / s.exp(),
    ],
)
def test_scores_without_softmax_have_no_logit_factor(form: Callable[..., Tensor]) -> None:
    flow = flow_of(Of(lambda _, a, b: form(a @ b.mT)), torch.randn(T, D), torch.randn(T, D))
    matmul = next(node for node in flow.nodes if "matmul" in str(node.target))
    assert logit_factor(flow, matmul) is None


def test_grouped_query_attention_with_causal_mask() -> None:
    q, k, v = torch.randn(B, 4, T, D), torch.randn(B, 2, T, D), torch.randn(B, 2, T, D)

    def attend(parts: nn.ModuleList, x: Tensor) -> Tensor:
        del parts
        return F.scaled_dot_product_attention(x, k, v, is_causal=True, enable_gqa=True)

    y = unit_scale(Of(attend))(q)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=1 / D)
    ratio = (y * expected).sum() / expected.square().sum()
    torch.testing.assert_close(y, ratio * expected, rtol=1e-2, atol=2e-2)


def test_learned_score_bias_is_not_scaled() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk, self.bias = nn.Linear(D, 2 * D, bias=False), nn.Parameter(torch.randn(T, T))

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.qk(x).chunk(2, -1)
            return (q @ k.mT / 4 + self.bias).softmax(-1)

    x = torch.randn(B, T, D)
    module = unit_scale(Biased())
    bias = module.bias.detach().clone()
    y = module(x)
    assert torch.equal(module.bias, bias)  # a bias of scores is no bias of a linear map
    q, k = (x @ module.qk.weight.T * D**-0.5).chunk(2, -1)
    torch.testing.assert_close(y, (q @ k.mT / D + bias).softmax(-1), rtol=1e-4, atol=1e-6)


def test_scores_without_softmax_are_at_unit_scale() -> None:
    module = unit_scale(Of(lambda _, a, b: a @ b.mT))
    module(torch.randn(T, D), torch.randn(T, D))
    (decision,) = decided(module, "matmul")
    assert decision.output == pytest.approx(D**-0.5, rel=0.01)


def _graph(function: Callable[..., Tensor]) -> list[fx.Node]:
    return [
        node
        for node in captured(function, torch.randn(3, 4)).graph.nodes
        if node.op in {"call_function", "call_method"}
    ]


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda x: x * 3, 3.0),
        (lambda x: -0.5 * x, 0.5),
        (lambda x: x / 8, 0.125),
        (lambda x: x.mul(2.0), 2.0),
        (lambda x: x.mul_(2.0), 2.0),
        (lambda x: x.div(other=4), 0.25),
        (lambda x: torch.mul(x, other=5.0), 5.0),
        (lambda x: torch.multiply(input=x, other=5.0), 5.0),
        (lambda x: torch.divide(x, 0.0), math.inf),
    ],
)
def test_products_with_numbers_are_recognized(
    function: Callable[..., Tensor], number: float
) -> None:
    (node,) = _graph(function)
    flow = Flow()
    assert times_number(flow, node) == (node.all_input_nodes[0], number)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x,
        lambda x: 1 / x,
        lambda x: x + 2,
        lambda x: torch.div(x, 3.0, rounding_mode="floor"),
        lambda x: x.pow(2),
    ],
)
def test_other_products_are_not_products_with_numbers(function: Callable[..., Tensor]) -> None:
    (node,) = _graph(function)
    assert times_number(Flow(), node) is None


def test_softmax_search_stops_at_matmul() -> None:
    weight = torch.randn(T, T)
    module = Of(lambda _, a, b: ((a @ b.mT * 0.5) @ weight * 7).softmax(-1))
    flow = flow_of(module, torch.randn(T, D), torch.randn(T, D))
    first, second = (node for node in flow.nodes if "matmul" in str(node.target))
    assert logit_factor(flow, first) is None
    assert logit_factor(flow, second) == 7.0

"""Residual adds: which adds count as residual, and their factors."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.rules.plan import RuleOptions
from lightning_unitscale.rules.residuals import Residual, branch_weights, find_residuals
from lightning_unitscale.rules.transform import unit_scale
from tests.rules.models import Of
from tests.rules.oracle import decided, flow_of, residuals_of, rms

W = 16
Parts = nn.ModuleList


def _linear() -> nn.Linear:
    return nn.Linear(W, W)


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (W,))


def find(function: Callable[..., Tensor]) -> list[Residual]:
    """Residual adds of a function of eight linear maps and the first one's output."""
    module = Of(lambda m, x: function(m, m[0](x)), *(_linear() for _ in range(8)))
    return residuals_of(module, torch.randn(4, 6, W))


def shape(found: list[Residual]) -> list[tuple[int, int, int]]:
    return [(item.stream, item.index, item.length) for item in found]


def _in_place(m: Parts, h: Tensor) -> Tensor:
    h += m[1](h)
    h.add_(m[2](h))
    return h


def _other_name(m: Parts, h: Tensor) -> Tensor:
    kept = h
    h = m[1](norm(h))
    kept += h
    return kept


FORMS: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "operator": lambda m, h: h + m[1](h),
    "branch_first": lambda m, h: m[1](h) + h,
    "function": lambda m, h: torch.add(h, m[1](h)),
    "keywords": lambda m, h: torch.add(input=h, other=m[1](h)),
    "alpha_of_one": lambda m, h: torch.add(h, m[1](h), alpha=1),
    "method": lambda m, h: h.add(m[1](h)),
    "method_keyword": lambda m, h: h.add(other=m[1](h)),
    "in_place_operator": _other_name,
    "in_place_method": lambda m, h: h.clone().add_(m[1](h)),
    "pre_norm": lambda m, h: h + m[1](norm(h)),
    "post_norm": lambda m, h: norm(h + m[1](h)),
    "numbers": lambda m, h: 0.5 * h + m[1](h) * 0.1,
    "dropout": lambda m, h: F.dropout(h, 0.1) + F.dropout(m[1](h), 0.1),
    "layer_scale": lambda m, h: h + m[2].bias * m[1](h),
    "views": lambda m, h: h.view(24, W) + m[1](h).flatten(0, 1),
    "shifted": lambda m, h: h[:, 1:] + m[1](h)[:, :-1],
    "deep_branch": lambda m, h: h + m[3](F.gelu(m[2](norm(m[1](h))).tanh())),
    "checkpoint": lambda m, h: h + checkpoint(m[1], h, use_reentrant=False),
    "inside_checkpoint": lambda m, h: checkpoint(lambda a: a + m[1](a), h, use_reentrant=False),
    "two_branches_as_one": lambda m, h: h + (m[1](norm(h)) + m[2](norm(h))),
    "sum_of_a_list": lambda m, h: sum([h, m[1](h)]),
    "sum_of_a_list_with_the_branch_first": lambda m, h: sum([m[1](norm(h)), h]),
    "two_branches_first": lambda m, h: m[1](h) + m[2](h) + h,
}


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_residual_add_is_found(form: str) -> None:
    (residual,) = find(FORMS[form])
    assert (residual.index, residual.length, residual.has_attention) == (0, 1, False)
    assert residual.skip != residual.branch


def _gelu(h: Tensor) -> Tensor:
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))


def _rotary(m: Parts, h: Tensor) -> Tensor:
    angle = torch.arange(6.0)[:, None]
    turned = torch.cat([-h[..., W // 2 :], h[..., : W // 2]], -1)
    return m[1](h * angle.cos() + turned * angle.sin())


def _gates(m: Parts, h: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sigmoid(m[1](h)), torch.tanh(m[2](h))


def _gru(m: Parts, h: Tensor) -> Tensor:
    z, n = _gates(m, h)
    return (1 - z) * n + z * h


def _gru_towards(m: Parts, h: Tensor) -> Tensor:
    z, n = _gates(m, h)
    return h + z * (n - h)


def _gru_of_torch(m: Parts, h: Tensor) -> Tensor:
    for _ in range(2):
        z, n = _gates(m, h)
        h = n + z * (h - n)
    return h


def _lstm(m: Parts, c: Tensor) -> Tensor:
    h = torch.tanh(c)
    for _ in range(3):
        i, g = _gates(m, h)
        c = torch.sigmoid(m[3](h)) * c + i * g
        h = torch.tanh(c)
    return h


def _bias_of_scores(m: Parts, h: Tensor) -> Tensor:
    bias = m[1](h).mean(-1, keepdim=True)
    scores = m[2](h) @ h.mT + bias
    h = scores.softmax(-1) @ h
    return (m[3](h) @ h.mT + scores).softmax(-1) @ h


def _losses(m: Parts, h: Tensor) -> Tensor:
    """The second loss reads a tensor that the first one weights."""
    first = m[1](h).square().mean()
    return first + m[2](h * first).square().mean()


NONE: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "losses": _losses,
    "losses_of_shape_one": lambda m, h: _losses(m, h)[None] + m[3](h * _losses(m, h)).mean()[None],
    "no_branch": lambda m, h: h + h,
    "no_matmul_in_the_branch": lambda m, h: h + F.gelu(norm(h)),
    "gelu": lambda m, h: m[1](_gelu(h)),
    "rms_norm": lambda m, h: m[1](h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)),
    "rotary": _rotary,
    "gru": _gru,
    "gru_towards": _gru_towards,
    "gru_of_torch": _gru_of_torch,
    "lstm": _lstm,
    "highway": lambda m, h: torch.sigmoid(m[1](h)) * m[2](h) + (1 - torch.sigmoid(m[1](h))) * h,
    "bias_of_scores": _bias_of_scores,
    "alpha": lambda m, h: torch.add(h, m[1](h), alpha=2),
    "difference": lambda m, h: h - m[1](h),
    "matmul": lambda m, h: h * torch.sigmoid(m[1](h)),
    "projected_skip": lambda m, h: m[1](h) + m[2](m[3](h).relu()),
    "constants": lambda m, h: m[1](h) + torch.ones(W) @ torch.ones(W, W),
}


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("name", NONE)
def test_other_adds_are_not_residual(name: str) -> None:
    assert find(NONE[name]) == []


def _blocks(m: Parts, h: Tensor) -> Tensor:
    for part in m[1:5]:
        h = h + part(norm(h))
    return h


def _post_norm_blocks(m: Parts, h: Tensor) -> Tensor:
    for part in m[1:5]:
        h = norm(h + part(h))
    return h


def _parallel(m: Parts, h: Tensor) -> Tensor:
    for value, other in ((m[1], m[2]), (m[3], m[4])):
        n = norm(h)
        h = h + value(n) + other(n)
    return h


def _broken(m: Parts, h: Tensor) -> Tensor:
    h = h + m[1](h)
    torch._dynamo.graph_break()
    h = h + m[2](h)
    branch = m[3](h)
    torch._dynamo.graph_break()
    h = h + branch
    return h + m[4](h)


def _summed(m: Parts, h: Tensor) -> Tensor:
    return sum([h, *(part(norm(h)) for part in m[1:5])])  # type: ignore[return-value]


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("blocks", [_summed, _blocks, _post_norm_blocks, _parallel, _broken])
def test_stream_with_four_branches(blocks: Callable[..., Tensor]) -> None:
    found = find(blocks)
    assert shape(found) == [(0, 0, 4), (0, 1, 4), (0, 2, 4), (0, 3, 4)]


def test_nested_streams_are_counted_separately() -> None:
    def function(m: Parts, h: Tensor) -> Tensor:
        for value, two in ((m[1], m[2]), (m[3], m[4])):
            inner = m[5](h)
            inner = inner + value(norm(inner))
            inner = inner + two(norm(inner))
            h = h + m[6](inner)
        return h

    found = find(function)
    streams = [item.stream for item in found]
    assert streams[0] == streams[1] != streams[2] != streams[3] == streams[4]
    assert streams[2] == streams[5]
    assert [item.length for item in found] == [2] * 6
    outer = found[5]
    assert found[3].nodes < outer.nodes and found[3].add in outer.nodes
    assert found[0].add not in outer.nodes


def test_long_skips_of_a_u_net() -> None:
    def function(m: Parts, a: Tensor) -> Tensor:
        b = m[1](a)
        c = m[2](b)
        c = c + m[3](c)
        b = m[4](c) + b
        return m[5](b) + a

    found = find(function)
    assert [item.index for item in found] == [0, 0, 0]
    assert len({item.stream for item in found}) == 3
    assert found[0].nodes < found[1].nodes < found[2].nodes


def test_attention_branch_is_detected() -> None:
    def function(m: Parts, h: Tensor) -> Tensor:
        h = h + m[1](
            F.scaled_dot_product_attention(*(m[i](norm(h))[:, None] for i in (2, 3, 4)))[:, 0]
        )
        h = h + m[5](norm(h))
        q, k = m[6](norm(h)), m[7](norm(h))
        return h + (q @ k.mT).softmax(-1) @ h

    assert [value.has_attention for value in find(function)] == [True, False, True]


def _chain(*kinds: bool, stream: int = 0) -> dict[object, Residual]:
    residual = Residual(None, (0,), (1,), frozenset(), False)  # type: ignore[arg-type]
    return {
        f"{stream}.{index}": replace(
            residual, has_attention=kind, stream=stream, index=index, length=len(kinds)
        )
        for index, kind in enumerate(kinds)
    }


@pytest.mark.parametrize(("mult", "ratio"), [(1.0, 1.0), (0.5, 1.0), (1.0, 3.0), (2.0, 0.25)])
def test_branch_weights_follow_depth_rule(mult: float, ratio: float) -> None:
    layers = 3
    weights = branch_weights(
        _chain(*([True, False] * layers)),  # type: ignore[arg-type]
        RuleOptions(residual_mult=mult, residual_attn_ratio=ratio),
    )
    a_mlp = mult * math.sqrt(2 / (1 + ratio**2))
    a_attn = ratio * a_mlp
    for i, tau in enumerate(weights.values()):
        n_attn, n_mlp = (i + 1) // 2, i // 2
        total = 2 * layers / 2 + n_attn * a_attn**2 + n_mlp * a_mlp**2
        assert tau == pytest.approx((a_attn if i % 2 == 0 else a_mlp) / math.sqrt(total))
    # The purpose: in the last sum all branches of a kind weigh the same, the embedding as much as
    # half of the branches would at mult 1.
    shares, rest = [], 1.0
    for tau in reversed(weights.values()):
        shares.append(rest * tau / math.hypot(1, tau))
        rest /= math.hypot(1, tau)
    assert shares[0::2] == pytest.approx([shares[0]] * layers)
    assert shares[1::2] == pytest.approx([shares[1]] * layers)
    assert shares[1] / shares[0] == pytest.approx(ratio)
    assert sum(share**2 for share in shares) + rest**2 == pytest.approx(1.0)
    assert sum(share**2 for share in shares) / rest**2 == pytest.approx(2 * mult**2)


def test_streams_have_independent_weights() -> None:
    both = {**_chain(False, False), **_chain(True, False, stream=1)}
    alone = branch_weights(_chain(False, False), RuleOptions())  # type: ignore[arg-type]
    weights = branch_weights(both, RuleOptions())  # type: ignore[arg-type]
    assert list(weights.values()) == [*alone.values()] * 2


def test_explicit_residual_weights_are_used() -> None:
    options = RuleOptions(residual=(0.1, 0.7))
    weights = branch_weights(_chain(True, False, False), options)  # type: ignore[arg-type]
    assert list(weights.values()) == [0.1, 0.7, 0.7]


@pytest.mark.parametrize("form", ["operator", "branch_first", "keywords", "in_place_operator"])
def test_residual_sum_is_weighted_and_at_unit_scale(form: str) -> None:
    function = FORMS[form]
    module = Of(lambda m, x: function(m, m[0](x)), *(_linear() for _ in range(2)))
    x = torch.randn(64, W)
    scaled = unit_scale(module, residual=(9.0, 0.5))
    y = scaled(x)
    first, second = (part.weight for part in scaled.parts)
    skip = x @ first.T / 4
    start = norm(skip) if form == "in_place_operator" else skip
    expected = (skip + 0.5 * (start @ second.T / 4)) / math.hypot(1, 0.5)
    torch.testing.assert_close(y, expected, rtol=0.1, atol=0.1)
    assert rms(y) == pytest.approx(1.0, abs=0.15)
    (decision,) = (each for each in decided(scaled, "add")
              if each.origin == "residual")  # fmt: skip
    assert "feed-forward branch 1 of 1, tau = 0.5 (given)" in decision.reason


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_constant_factor_on_branch_is_replaced(size: float) -> None:
    x = torch.randn(64, W)
    torch.manual_seed(5)
    part = nn.Linear(W, W)
    plain = unit_scale(Of(lambda m, x: x + m[0](x), part))(x)
    numbered = unit_scale(Of(lambda m, x: x + size * m[0](x), part))(x)
    torch.testing.assert_close(numbered, plain)


@pytest.mark.slow
def test_deep_chain_does_not_recurse() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(100))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = x + part(x)
            return x

    flow = flow_of(Chain(), torch.randn(1, 2))
    limit, depth = sys.getrecursionlimit(), 0
    frame = sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(depth + 40)
    try:
        found = find_residuals(flow)
    finally:
        sys.setrecursionlimit(limit)
    assert shape(list(found.values())) == [(0, index, 100) for index in range(100)]
    assert all(len(item.nodes) == 1 for item in found.values())

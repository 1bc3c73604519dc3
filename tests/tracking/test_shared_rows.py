"""Rows that follow from others are those that would have been measured, to the element."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.capture.attach import captured_forward
from lightning_unitscale.graph.nodes import is_whole_view
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.tracking import probes as probes_file
from lightning_unitscale.tracking.fuse_rows import SharedRows
from lightning_unitscale.tracking.probes import ScaleProbes
from tests.helpers import assert_same_bits, run
from tests.tracking.tracked import Call

LAYOUT = RowLayout(sample_size=None)
SUMS = slice(LAYOUT.index("sum"), LAYOUT.index("square_sum") + 1)


def _attention(a: nn.Linear, x: Tensor) -> Tensor:
    h = x.sin()
    q, k, v = a(h).view(4, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 8, 16)
    h = h + F.dropout(F.pad(y, (0, 0)), 0.0)
    return (h + h.cos()).square().sum()


def _residual(a: nn.Linear, x: Tensor) -> Tensor:
    x = a(x)[..., :16].contiguous()
    x = x + x.tanh()
    return torch.add(x.exp().flatten(), x.sin().reshape(-1)).square().sum()


def _halves(a: nn.Linear, x: Tensor) -> Tensor:
    gate, up = a(x).chunk(2, dim=-1)
    return (F.silu(gate) * up).sum()


def _uneven(a: nn.Linear, x: Tensor) -> Tensor:
    first, second, third = torch.split(a(x), [8, 24, 16], dim=-1)
    return first.sin().sum() + second.square().sum() + third.exp().mean()


def _rows(a: nn.Linear, x: Tensor) -> Tensor:
    first, *others = a(x).unbind(0)
    return first.square().sum() + sum(one.sin().sum() for one in others)


def _no_gradient_in_a_part(a: nn.Linear, x: Tensor) -> Tensor:
    first, second, third = a(x).chunk(3, dim=-1)
    return (first.sin() * second.detach()).sum() + third.gt(0).sum()


def _no_gradient_at_all(a: nn.Linear, x: Tensor) -> Tensor:
    first, second = a(x).chunk(2, dim=-1)
    return a.weight.square().sum() + (first.detach() * second.detach()).sum()


# What looks alike and is something else.


def _parts_that_are_missing(a: nn.Linear, x: Tensor) -> Tensor:
    h = a(x)
    return h[0].sin().sum() + h[1].sin().sum()


def _read_twice(a: nn.Linear, x: Tensor) -> Tensor:
    h = a(x)
    first, second = h.chunk(2, dim=-1)
    y = h.sin()
    return (first + second).square().sum() + (y + h.cos()).square().sum() + y.exp().sum()


def _doubled(a: nn.Linear, x: Tensor) -> Tensor:
    h = a(x).sin()
    return (h + h).square().sum()


def _broadcast(a: nn.Linear, x: Tensor) -> Tensor:
    h = a(x)
    return (h + h.mean(0).exp()).square().sum()


def _scaled_summand(a: nn.Linear, x: Tensor) -> Tensor:
    h = a(x)
    return torch.add(h.sin(), h.cos(), alpha=3).square().sum()


def _other_type(a: nn.Linear, x: Tensor) -> Tensor:
    h = a(x)
    return (h.half().sin() + h).square().sum()


def _written_into(a: nn.Linear, x: Tensor) -> Tensor:
    h = a(x) * 1.5
    first, second, third, fourth = h[0], h[1], h[2], h[3]
    first.mul_(2)
    return (first * second).square().sum() + (third + fourth.sin()).square().sum()


def _special_values(a: nn.Linear, x: Tensor) -> Tensor:
    h = a(x)
    h = torch.where(h > 0.5, torch.inf, torch.where(h < -0.5, torch.nan, h * 1e-40))
    first, second = h.chunk(2, dim=-1)
    return torch.nan_to_num(first + second.sin()).sum()


SHARING = {
    _attention: ({"parts.0.linear"}, {"pad", "cos"}),
    _residual: (set(), {"tanh", "exp", "sin"}),
    _halves: ({"parts.0.linear"}, set()),
    _uneven: ({"parts.0.linear"}, set()),
    _rows: ({"parts.0.linear"}, set()),
    _no_gradient_in_a_part: ({"parts.0.linear"}, set()),
    _no_gradient_at_all: ({"parts.0.linear"}, set()),
    _special_values: ({"where_1"}, set()),
    _parts_that_are_missing: (set(), set()),
    _read_twice: (set(), {"cos"}),
    _doubled: (set(), set()),
    _broadcast: (set(), set()),
    _scaled_summand: (set(), set()),
    _other_type: (set(), set()),
    _written_into: (set(), set()),
}


def _snapshot(function: Callable[..., Any], executor: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    plain = Call(function, nn.Linear(16, 48))
    probes = ScaleProbes(LAYOUT, lambda node: not is_whole_view(node))
    module, step = captured_forward(plain, "test", probes)
    step.owner.use_executor(executor)  # type: ignore[arg-type]
    step.owner.observe("test", True)
    x = torch.randn(4, 8, 16, requires_grad=True)
    results = run(module, x), run(plain, x)
    return probes.take(0), *results


CASES = [(one, "eager") for one in SHARING]
CASES += [(one, "aot_eager") for one in (_attention, _no_gradient_in_a_part, _written_into)]


@pytest.mark.parametrize(("function", "executor"), CASES)
def test_rows_are_what_would_have_been_measured(
    function: Callable[..., Any], executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[set[str], set[str]]] = []
    find = probes_file.find_shared_rows

    def noted(nodes: Any, *others: Any) -> SharedRows:
        shared = find(nodes, *others)
        names = [node.meta["tensor_name"] for node in nodes]
        parts, twins = ({names[one] for one in rows} for rows in (shared.parts, shared.twins))
        found.append((parts, twins))
        return shared

    monkeypatch.setattr(probes_file, "find_shared_rows", noted)
    shared, bits, plain_bits = _snapshot(function, executor)
    if executor == "eager":
        assert_same_bits(bits, plain_bits)
    parts, twins = SHARING[function]
    assert found[0][0] == parts and found[0][1] >= twins
    monkeypatch.setattr(probes_file, "find_shared_rows", lambda *_: SharedRows({}, {}))
    measured, *_ = _snapshot(function, executor)
    assert shared.names == measured.names
    for direction in ("forward", "backward"):
        ours, theirs = getattr(shared, direction), getattr(measured, direction)
        np.testing.assert_allclose(ours[:, SUMS], theirs[:, SUMS], rtol=1e-5, atol=1e-3)
        np.testing.assert_array_equal(np.delete(ours, SUMS, 1), np.delete(theirs, SUMS, 1))

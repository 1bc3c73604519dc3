"""An in-place operation is replaced only if values and gradients stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_unitscale.capture.aliasing import make_out_of_place, written_arguments
from tests.helpers import assert_same_bits, captured, run


def _augmented(x: Tensor) -> Tensor:
    y = x * 2
    y += 1
    y -= x
    y *= x
    y /= 3
    y **= 2
    return y


def _integers(x: Tensor) -> Tensor:
    y = (x * 8).to(torch.int64).abs()
    y = y + 1
    y |= 4
    y &= 7
    y ^= 2
    y <<= 2
    y >>= 1
    y //= 2
    y %= 5
    return y * x


def _remainder(x: Tensor) -> Tensor:
    y = x * 5
    y %= 1.5
    z = torch.full_like(x, 7.0, requires_grad=False)
    z //= 2
    return y + z


def _methods(x: Tensor) -> Tensor:
    y = x + 1
    y.add_(x, alpha=2).mul_(0.5)
    z = y.sin()
    z.clamp_(max=3).masked_fill_(x > 0, 0.25)
    return torch.relu_(z * y) + (y * 2).sigmoid_()


def _flags(x: Tensor) -> Tensor:
    y = F.leaky_relu(x * 2, 0.1, True)
    y = F.silu(y * 1, inplace=True)
    return F.hardtanh(F.dropout(y + 1, 0.3, True, True) * 1, inplace=True)


def _read_before_and_after(x: Tensor) -> Tensor:
    y = x.sin()
    before = y * 1
    y += 1
    return before + y


def _scattered(x: Tensor) -> Tensor:
    y = torch.zeros(5, 4)
    y.index_add_(0, torch.tensor([1, 3, 1, 0, 2]), x)
    return y.scatter_(1, torch.zeros(5, 1, dtype=torch.int64), 2.0)


_REWRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "augmented": _augmented,
    "integers": _integers,
    "remainder": _remainder,
    "methods": _methods,
    "flags": _flags,
    "read_before_and_after": _read_before_and_after,
    "scattered": _scattered,
}


def _compare(function: Callable[..., Any], graph_module: fx.GraphModule, *inputs: Tensor) -> None:
    graph_module.graph.lint()
    graph_module.recompile()
    expected, got = run(function, *inputs), run(lambda *args: graph_module(*args)[0], *inputs)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("name", _REWRITTEN)
def test_values_and_gradients_do_not_change(name: str) -> None:
    function = _REWRITTEN[name]
    x = torch.randn(5, 4, requires_grad=True)
    graph_module = captured(function, x)
    before = sum(bool(written_arguments(node)) for node in graph_module.graph.nodes)
    (line,) = make_out_of_place(graph_module.graph)
    assert before > 0
    assert line == f"{before} in-place operations made out of place"
    assert not any(written_arguments(node) for node in graph_module.graph.nodes)
    _compare(function, graph_module, x)


def _view(x: Tensor) -> Tensor:
    y = x * 2
    y[0].add_(1)
    return y


def _view_by_keyword(x: Tensor) -> Tensor:
    y = x * 2
    torch.transpose(input=y, dim0=0, dim1=1).add_(1)
    return y * 3


def _seen_through_a_view(x: Tensor) -> Tensor:
    y = x * 2
    rows = y.view(-1)
    y += 1
    return rows * y.view(-1)


def _same_type(x: Tensor) -> Tensor:
    y = x * 2
    z = y.type_as(x)
    z += 1
    return y * 1


def _item(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1] = x[:, 0]
    return y


def _the_input(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def _promotes(x: Tensor) -> Tensor:
    y = x.to(torch.bfloat16) * 2
    y += x.new_tensor([1.0, 2.0, 3.0, 4.0])
    return y * 1


def _changes_the_layout(x: Tensor) -> Tensor:
    y = x.t() * 1
    y += torch.ones(4, 5)
    z = x * 1
    z.t_()
    return y + z


def _bernoulli(x: Tensor) -> Tensor:
    return x * torch.full((5, 4), 0.0).bernoulli_() + x * torch.zeros(5, 1).bernoulli_(0.7)


_KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "view": _view,
    "view_by_keyword": _view_by_keyword,
    "seen_through_a_view": _seen_through_a_view,
    "same_type": _same_type,
    "item": _item,
    "promotes": _promotes,
    "changes_the_layout": _changes_the_layout,
    "bernoulli": _bernoulli,
}


@pytest.mark.parametrize("name", _KEPT)
def test_in_place_operations_that_must_stay_are_reported(name: str) -> None:
    function = _KEPT[name]
    x = torch.randn(5, 4, requires_grad=True)
    graph_module = captured(function, x)
    lines = make_out_of_place(graph_module.graph)
    assert any("in-place operations kept" in line for line in lines)
    assert any(written_arguments(node) for node in graph_module.graph.nodes)
    _compare(function, graph_module, x)


def test_inputs_and_parameters_are_still_mutated() -> None:
    x = torch.randn(3)
    graph_module = captured(_the_input, x.clone())
    assert make_out_of_place(graph_module.graph) == ("1 in-place operations kept: add",)
    graph_module.recompile()
    given = x.clone()
    graph_module(given)
    assert torch.equal(given, x + 1)


def test_matrix_matmul_is_never_in_place() -> None:
    # Dynamo's own graph of this is wrong when it is run as FX writes it out (torch 2.13).
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * 1
        z = y
        z @= w
        return y + z

    inputs = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    graph_module = captured(function, *inputs)
    assert make_out_of_place(graph_module.graph) == ()
    _compare(function, graph_module, *inputs)

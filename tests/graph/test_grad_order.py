"""Who reads a tensor how often, and whose gradient comes first: as autograd itself has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_unitscale.graph.grad_order import first_to_last
from lightning_unitscale.graph.nodes import op_name
from tests.helpers import captured

Places = list[tuple[Any, ...]]
ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], Places]] = {
    # One operation of autograd: in the order of its arguments.
    "mm": (lambda x: torch.mm(x, x), [(0,), (1,)]),
    "addcmul": (lambda x: torch.addcmul(x, x, x, value=0.3), [(0,), (1,), (2,)]),
    # Views of both before the product: the last one made comes first.
    "matmul": (lambda x: torch.matmul(x[None, None], x[None, None]), []),
    "einsum": (lambda x: torch.einsum("ij,jk,kl->il", x, x, x), []),
    "multi_dot": (lambda x: torch.linalg.multi_dot([x, x, x]), []),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_in_which_gradients_arrive(name: str) -> None:
    function, expected = ORDERS[name]
    graph = captured(lambda x: function(x.sin()), torch.randn(4, 4, requires_grad=True)).graph
    node = next(one for one in graph.nodes if op_name(one).endswith(name))
    places = _places(node)
    assert len(places) > 1
    found = first_to_last(node, places)
    assert sorted(found, key=str) == sorted(places, key=str)
    assert found == first_to_last(node, places[::-1])
    if expected:
        assert found == expected


def _places(node: fx.Node) -> Places:
    single: Places = [(i,) for i, one in enumerate(node.args) if isinstance(one, fx.Node)]
    nested: Places = [
        (i, j)
        for i, several in enumerate(node.args)
        if isinstance(several, (list, tuple))
        for j, one in enumerate(several)
        if isinstance(one, fx.Node)
    ]
    return single + nested


def test_what_cannot_be_run_by_itself_counts_as_one_operation() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(3, requires_grad=True)
    failing = graph.call_function(_failing, (x, x))
    graph.output(failing)
    assert first_to_last(failing, [(0,), (1,)]) == [(0,), (1,)]


def _failing(*_: Tensor) -> Tensor:
    raise RuntimeError

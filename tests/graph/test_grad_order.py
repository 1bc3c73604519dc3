"""Who reads a tensor how often, and whose gradient comes first: as autograd itself has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_unitscale.graph.grad_order import first_to_last, repeated_reads
from lightning_unitscale.graph.nodes import TRANSFORMED, op_name
from tests.helpers import captured

SEVERAL: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "softsign": F.softsign,
    "normalize": F.normalize,
    "diff": torch.diff,
    "trapezoid": torch.trapezoid,
}
ONCE: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "gelu": F.gelu,
    "mul": lambda x: x * x,
    "matmul": lambda x: x @ x,
    "sort": lambda x: x.sort()[0],
    "exp": lambda x: x.exp(),
    "index": lambda x: x[torch.tensor([1, 1])],
}


def _reads(function: Callable[[Tensor], Tensor], *, alone: bool = False) -> dict[str, list[str]]:
    def shared(x: Tensor) -> Any:
        y = x.sin()
        return function(y) if alone else (function(y), y.cos())

    graph = captured(shared, torch.randn(4, 4, requires_grad=True)).graph
    found = repeated_reads(graph).items()
    return {op_name(node): [op_name(one) for one in read] for node, read in found}


@pytest.mark.parametrize("name", SEVERAL)
def test_operations_that_read_an_argument_several_times(name: str) -> None:
    assert _reads(SEVERAL[name]) == {name: ["sin"]}
    assert not _reads(SEVERAL[name], alone=True)


@pytest.mark.parametrize("name", ONCE)
def test_operations_that_read_each_argument_once(name: str) -> None:
    assert not _reads(ONCE[name])


def test_what_runs_inside_of_a_vmap_is_not_run_by_itself() -> None:
    def function(x: Tensor) -> Any:
        y = x.sin()
        return torch.vmap(F.softsign)(y), torch.vmap(lambda one: one @ one)(y), y

    module = torch.nn.Module()
    module.forward = function  # type: ignore[method-assign]
    graph = captured(module, torch.randn(4, 4, requires_grad=True)).graph
    assert any(TRANSFORMED in node.meta for node in graph.nodes)
    assert not repeated_reads(graph)


def test_a_parameter_may_be_read_by_another_graph() -> None:
    graph = captured(F.softsign, torch.randn(4, requires_grad=True)).graph
    assert list(repeated_reads(graph)) == graph.find_nodes(op="call_function", target=F.softsign)


def test_a_tensor_that_is_handed_on_as_it_is_has_the_readers_of_all_its_names() -> None:
    def function(x: Tensor) -> Any:
        y = x.sin()
        return F.softsign(y.float()), y

    graph = captured(function, torch.randn(4, requires_grad=True)).graph
    assert [op_name(one) for one in repeated_reads(graph)] == ["softsign"]


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
    assert not repeated_reads(graph)
    assert first_to_last(failing, [(0,), (1,)]) == [(0,), (1,)]


def _failing(*_: Tensor) -> Tensor:
    raise RuntimeError

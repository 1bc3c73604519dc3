"""An in-place operation is rewritten only where neither values nor gradients can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_unitscale.graph.out_of_place import (
    aliased_by_mutation,
    make_out_of_place,
    mutated_argument,
    returned_alone,
    same_tensor,
)
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
def test_values_and_gradients_stay(name: str) -> None:
    function = _REWRITTEN[name]
    x = torch.randn(5, 4, requires_grad=True)
    graph_module = captured(function, x)
    before = sum(mutated_argument(node) is not None for node in graph_module.graph.nodes)
    (line,) = make_out_of_place(graph_module.graph)
    assert before > 0
    assert line == f"{before} in-place operations made out of place"
    assert not any(mutated_argument(node) for node in graph_module.graph.nodes)
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
def test_what_cannot_be_rewritten_is_kept_and_named(name: str) -> None:
    function = _KEPT[name]
    x = torch.randn(5, 4, requires_grad=True)
    graph_module = captured(function, x)
    lines = make_out_of_place(graph_module.graph)
    assert any("in-place operations kept" in line for line in lines)
    assert any(mutated_argument(node) for node in graph_module.graph.nodes)
    _compare(function, graph_module, x)


def test_inputs_and_parameters_are_still_written_into() -> None:
    x = torch.randn(3)
    graph_module = captured(_the_input, x.clone())
    assert make_out_of_place(graph_module.graph) == ("1 in-place operations kept: add",)
    graph_module.recompile()
    given = x.clone()
    graph_module(given)
    assert torch.equal(given, x + 1)


def test_a_matrix_product_is_never_in_place() -> None:
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


def test_who_shares_memory_with_a_mutated_tensor() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        first, second = y.chunk(2, dim=0)
        first.add_(1)
        other = x.sin()
        return other.view(-1)[:4] * second.flatten()[:4]

    graph = captured(function, torch.randn(4, 4)).graph
    aliased = {node.name for node in aliased_by_mutation(graph)}
    by_target = {str(node.target): node for node in graph.nodes}
    assert {"y", "first", "second"} <= aliased
    assert by_target["chunk"].name in aliased
    assert by_target["flatten"].name in aliased
    assert by_target["sin"].name not in aliased
    assert by_target["view"].name not in aliased


def test_which_operations_hand_their_argument_back() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.exp()
        y = F.dropout(y.float().contiguous().type_as(x), 0.0)
        y = F.dropout(y, 0.5, training=False)
        y = F.dropout(y, 0.5).double().view(4, 4)
        return F.relu(y.t().contiguous(), inplace=True).add_(1)

    graph_module = captured(function, torch.randn(4, 4))
    make_out_of_place(graph_module.graph)
    # What torch itself does, node by node.
    handed_back: dict[fx.Node, bool] = {}

    class Identities(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            arguments = [self.env[one] for one in n.all_input_nodes]
            writes = mutated_argument(n) is not None
            handed_back[n] = not writes and any(result is one for one in arguments)
            return result

    Identities(graph_module).run(torch.randn(4, 4))
    found = {node: same_tensor(node) is not None for node in graph_module.graph.nodes}
    assert found == {**dict.fromkeys(found, False), **handed_back}
    assert sum(found.values()) == 5


def test_which_results_nobody_else_looks_into() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        own = x * 2
        whole = (x + 1).sin()
        part = whole[:2]
        return own.view(-1), x.view(-1), whole, part, (x - 1).float()

    graph = captured(function, torch.randn(4, 4)).graph
    returned = graph.output_node().args[0]
    alone = returned_alone(graph)
    assert [one in alone for one in returned] == [True, False, False, False, True]
    # The tensor that ``float`` hands back is the one that is returned.
    assert returned[-1].all_input_nodes[0] in alone


@pytest.mark.parametrize("function", [F.embedding, F.embedding_bag])
@pytest.mark.parametrize("by_name", [False, True])
def test_an_embedding_that_shortens_its_rows_writes_into_its_weight(
    function: Any, by_name: bool
) -> None:
    graph = fx.Graph()
    index, weight = graph.placeholder("index"), graph.placeholder("weight")
    options = ((), {"max_norm": 1.0}) if by_name else ((None, 1.0), {})
    found = graph.call_function(function, (index, weight, *options[0]), options[1])
    plain = graph.call_function(function, (index, weight))
    graph.output((found, plain))
    assert mutated_argument(found) is weight
    assert mutated_argument(plain) is None
    # What it looks up is a copy.
    assert aliased_by_mutation(graph) == {weight}


@pytest.mark.parametrize(("function", "by_default"), [(F.dropout, False), (F.alpha_dropout, True)])
def test_which_dropout_hands_its_argument_back_by_default(function: Any, by_default: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    dropped = graph.call_function(function, (x, 0.4))
    x.meta["example_value"] = dropped.meta["example_value"] = torch.zeros(2)
    assert (same_tensor(dropped) is x) == by_default

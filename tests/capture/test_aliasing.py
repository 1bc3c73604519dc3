"""Shared memory and writes into it are detected as in torch's storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_unitscale.capture.aliasing import (
    aliased_by_mutation,
    make_out_of_place,
    memory_roots,
    returned_alone,
    same_tensor,
    written_arguments,
)
from tests.helpers import assert_same_bits, captured, run


def test_aliases_of_mutated_tensor_are_found() -> None:
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


def test_operations_that_return_their_argument_are_detected() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.exp()
        y = F.dropout(y.float().contiguous().type_as(x), 0.0)
        y = F.dropout(y, 0.5, training=False)
        y = F.dropout(y, 0.5).double().view(4, 4)
        return F.relu(y.t().contiguous(), inplace=True).add_(1)

    graph_module = captured(function, torch.randn(4, 4))
    make_out_of_place(graph_module.graph)
    # The effects of torch itself, node by node.
    handed_back: dict[fx.Node, bool] = {}

    class Identities(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            arguments = [self.env[one] for one in n.all_input_nodes]
            writes = bool(written_arguments(n))
            handed_back[n] = not writes and any(result is one for one in arguments)
            return result

    Identities(graph_module).run(torch.randn(4, 4))
    found = {node: same_tensor(node) is not None for node in graph_module.graph.nodes}
    assert found == {**dict.fromkeys(found, False), **handed_back}
    assert sum(found.values()) == 5


def test_results_without_aliases_are_found() -> None:
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
def test_embedding_with_max_norm_writes_into_its_weight(function: Any) -> None:
    def looked_up(index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return function(index, weight, max_norm=1.0), function(index, weight)

    graph = captured(looked_up, torch.zeros(2, 2, dtype=torch.int64), torch.ones(3, 4)).graph
    _, weight = graph.find_nodes(op="placeholder")
    shortened, plain = _returned(graph)
    assert written_arguments(shortened) == (weight,)
    assert written_arguments(plain) == ()
    # The result is a copy.
    assert aliased_by_mutation(graph) == {weight}


def _returned(graph: fx.Graph) -> tuple[fx.Node, ...]:
    return graph.output_node().args[0]  # type: ignore[return-value]


@pytest.mark.parametrize(("function", "by_default"), [(F.dropout, False), (F.alpha_dropout, True)])
def test_dropout_inactive_by_default_returns_its_argument(function: Any, by_default: bool) -> None:
    graph = captured(lambda x: function(x, 0.4), torch.zeros(2)).graph
    (dropped,) = _returned(graph)
    assert (same_tensor(dropped) is dropped.args[0]) == by_default


def _data(h: Tensor) -> Tensor:
    h.data.mul_(0.5).add_(1)
    return h


def _initialized(h: Tensor) -> Tensor:
    torch.nn.init.constant_(h.data[0], 2.0)
    return h


def _einsum(h: Tensor) -> Tensor:
    torch.einsum("ij->ji", h).mul_(2)
    return h


def _same_dtype(h: Tensor) -> Tensor:
    counts = h.long() * 1
    counts.long().add_(3)
    return h * counts


def _same_truth(h: Tensor) -> Tensor:
    mask = h > 0
    mask.bool().fill_(True)
    return h * mask


def _as_tensor(h: Tensor) -> Tensor:
    torch.as_tensor(h).mul_(2)
    return h


def _broadcast(h: Tensor) -> Tensor:
    first, _ = torch.broadcast_tensors(h, h * 2)
    first.mul_(2)
    return h


def _foreach(h: Tensor) -> Tensor:
    torch._foreach_mul_([h, h * 1], 2.0)
    return h


def _numpy(h: Tensor) -> Tensor:
    n = h.detach()
    n.numpy()[:] *= 2
    return h + n


def _out(h: Tensor) -> Tensor:
    known = h.detach()
    out = torch.empty(5, 4)
    torch.mul(known, 3, out=out.view(5, 4))
    torch.mul(known, 3, out=known)
    return h + out


_WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    one.__name__: one
    for one in (
        _data, _initialized, _einsum, _same_dtype, _same_truth, _as_tensor, _broadcast, _foreach,
        _numpy, _out,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", _WRITES)
def test_write_through_alias_is_detected(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        h = x * 2
        h += 1
        return _WRITES[name](h) * x

    x = torch.randn(5, 4, requires_grad=True)
    expected = run(function, x)
    graph_module = captured(function, x)
    make_out_of_place(graph_module.graph)
    graph_module.recompile()
    assert_same_bits(run(lambda given: graph_module(given)[0], x), expected)
    assert any(written_arguments(node) for node in graph_module.graph.nodes)


def test_inputs_with_shared_storage_are_aliases() -> None:
    base = torch.randn(4, 4)
    graph = captured(lambda a, b: a.data.add_(1) + b[0], base, base.view(16)).graph
    first, second = graph.find_nodes(op="placeholder")
    assert memory_roots(graph)[second] is first
    assert {first, second} <= aliased_by_mutation(graph)


def test_checkpoint_mutates_inputs_that_its_body_mutates() -> None:
    def body(x: Tensor, seen: Tensor) -> Tensor:
        seen.data.add_(1)
        return x.sin()

    def function(x: Tensor, seen: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(body, x, seen, use_reentrant=False) + seen

    x, seen = torch.randn(3, requires_grad=True), torch.zeros(3)
    graph = captured(function, x, seen).graph
    aliased = {str(one.target) for one in aliased_by_mutation(graph)}
    assert "L_seen_" in aliased
    assert "L_x_" not in aliased


class _ReluInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.clamp_(min=0)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


def test_autograd_function_mutates_inputs_of_its_forward() -> None:
    def function(x: Tensor) -> Tensor:
        h = x.exp()
        return _ReluInPlace.apply(h) + x.cos()

    graph = captured(function, torch.randn(3, requires_grad=True)).graph
    aliased = {node.name for node in aliased_by_mutation(graph)}
    assert "h" in aliased
    assert not aliased & {"cos", "l_x_", "x"}

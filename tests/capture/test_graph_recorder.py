"""The recorder sees every value of a graph and changes none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.capture.graph_nodes import op_name
from lightning_unitscale.capture.graph_recorder import (
    CallRecord,
    GraphInterpreter,
    stored_elements,
    tap_gradient,
)
from tests.helpers import assert_same_bits, captured


def test_interpreter_visits_bodies_of_checkpoints() -> None:
    def step(a: Tensor, b: Tensor) -> Any:
        return checkpoint(lambda c: F.gelu(c @ b).sin(), a + 1, use_reentrant=False) * 2

    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    seen: list[str] = []

    def visit(interpreter: GraphInterpreter, node: fx.Node) -> Any:
        if node.op in {"call_function", "call_method"}:
            seen.append(op_name(node))
        return interpreter.evaluate(node)

    (result,) = GraphInterpreter(captured(step, a, b), visit).run(a, b)
    assert_same_bits(result, step(a, b))
    gradients = torch.autograd.grad(result.sum(), (a, b))
    assert_same_bits(gradients, torch.autograd.grad(step(a, b).sum(), (a, b)))
    assert [name for name in seen if name != "getitem"] == ["add", "matmul", "gelu", "sin", "mul"]


def test_visit_can_replace_value_of_node() -> None:
    graph_module = captured(lambda a: a.sin() + 1, torch.randn(3))

    def visit(interpreter: GraphInterpreter, node: fx.Node) -> Any:
        value = interpreter.evaluate(node)
        return value * 0 if op_name(node) == "sin" else value

    (result,) = GraphInterpreter(graph_module, visit).run(torch.randn(3))
    assert_same_bits(result, torch.ones(3))


def test_tap_reads_gradient_without_changing_it() -> None:
    tensor, slot = torch.randn(3, 4, requires_grad=True), torch.zeros(2, requires_grad=True)
    row = torch.tensor([5.0, 7.0])
    seen: list[Tensor] = []

    def on_gradient(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return row

    tapped = tap_gradient(tensor, slot, on_gradient)
    assert_same_bits(tapped, tensor)
    gradient = torch.randn(3, 4)
    tapped.backward(gradient)
    assert_same_bits((seen, tensor.grad, slot.grad), ([gradient], gradient, row))


def test_tap_without_slot_is_called_only_with_gradient() -> None:
    tensor, seen = torch.randn(3, requires_grad=True), []
    tapped = tap_gradient(tensor, None, seen.append)
    assert torch.autograd.grad((tensor * 2).sum() + 0 * tapped.detach().sum(), tensor)
    assert seen == []
    torch.autograd.grad((tapped * 2).sum(), tensor)
    assert_same_bits(seen, [torch.full((3,), 2.0)])


def test_detached_tap_allows_in_place_writes() -> None:
    tensor, slot = torch.ones(3), torch.zeros(1, requires_grad=True)
    tapped = tap_gradient(tensor, slot, lambda gradient: gradient.sum()[None], detach=True)
    tapped.mul_(3)
    tapped.sum().backward()
    assert_same_bits((tapped, slot.grad), (torch.full((3,), 3.0), torch.tensor([9.0])))


def test_stored_elements() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    assert stored_elements(dense) is dense
    assert_same_bits(stored_elements(dense.to_sparse()), torch.tensor([2.0, 3.0]))
    with torch.sparse.check_sparse_tensor_invariants():
        twice = torch.sparse_coo_tensor([[0, 0]], torch.tensor([1.0, 2.0]), (4,))
    assert_same_bits(stored_elements(twice), torch.tensor([3.0]))
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    assert stored_elements(jagged).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_record_has_zeros_for_missing_gradients() -> None:
    rows = torch.ones(2, 3)
    assert_same_bits(CallRecord.of_rows(rows).backward, torch.zeros(2, 3))
    assert_same_bits(CallRecord.of_rows(rows, 2 * rows).backward, 2 * rows)

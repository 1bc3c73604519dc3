"""Measure tensors of captured graphs and their gradients.

An interpreted graph is measured from outside, node by node. A compiled graph returns its
measurements, without hooks or mutation. Forward rows are one more output. Backward rows are the
"gradient" of a leaf tensor with one slot per row: an autograd function that takes a slot may return
any value that its backward computes as the slot's gradient. The graph stays purely functional, so
eager, AOTAutograd and Inductor run it alike. After ``backward()`` all rows are in one tensor.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.capture.copy_graphs import fake_like, is_checkpoint
from lightning_unitscale.capture.passes import Region, StepGraph
from lightning_unitscale.functional.scale import whole_view
from lightning_unitscale.scales.reduce import row_dtype


class GraphInterpreter(fx.Interpreter):
    """Runs a captured graph and its checkpoints node by node, and recomputes nothing."""

    def __init__(
        self, graph_module: fx.GraphModule, visit: Callable[[GraphInterpreter, fx.Node], Any]
    ) -> None:
        super().__init__(graph_module)
        self._visit = visit

    def run_node(self, n: fx.Node) -> Any:
        """Return the value of a node, as ``visit`` computes it."""
        if is_checkpoint(n):
            body, *values = self.fetch_args_kwargs_from_env(n)[0]
            return GraphInterpreter(body, self._visit).run(*values)
        return self._visit(self, n)

    def evaluate(self, node: fx.Node) -> Any:
        """Compute a node from the values of its arguments."""
        return super().run_node(node)


def tap_gradient(
    tensor: Tensor,
    slot: Tensor | None,
    on_gradient: Callable[[Tensor], Tensor | None],
    *,
    detach: bool = False,
) -> Tensor:
    """Return ``tensor`` itself, and call ``on_gradient`` with its gradient, which is unchanged."""
    return _GradientTap.apply(tensor, slot, on_gradient, detach)


class _GradientTap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        slot: Tensor | None,
        on_gradient: Callable[[Tensor], Tensor | None],
        detach: bool,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        # This is stored on the context, because saved_tensors are freed after one backward pass.
        # Two losses that share only an input have separate backward passes.
        ctx.on_gradient = on_gradient
        # Autograd forbids writes into a view that a function made, but not into a detached tensor.
        return tensor.detach() if detach else whole_view(tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return None, None, None, None
        return grad_output, ctx.on_gradient(grad_output), None, None


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor, or any other tensor unchanged."""
    if not _is_distributed(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def _is_distributed(tensor: Tensor) -> bool:
    # A user who has distributed tensors has imported them.
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def stored_elements(tensor: Tensor) -> Tensor:
    """Return the elements that a tensor stores, as a dense tensor."""
    # For a distributed tensor these are this rank's elements. Partial sums are added up, which all
    # ranks must do together.
    if _is_distributed(tensor) and any(p.is_partial() for p in tensor.placements):  # type: ignore[attr-defined]
        with torch.inference_mode(False), torch.no_grad():
            tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    tensor = local_part(tensor)
    if tensor.is_sparse:
        tensor = tensor.coalesce()
    return tensor.values() if tensor.layout in {torch.sparse_coo, torch.jagged} else tensor


@dataclass(frozen=True)
class CallRecord:
    """Record of one call of a graph, as rows of shape ``(rows, columns)``."""

    forward: Tensor
    slots: Tensor  # a leaf whose gradient has the rows of the backward pass after it has run

    @property
    def backward(self) -> Tensor:
        """Return the rows of the backward pass, with zeros where no gradient has arrived (yet)."""
        return torch.zeros_like(self.slots) if self.slots.grad is None else self.slots.grad

    @staticmethod
    def of_rows(forward: Tensor, backward: Tensor | None = None) -> CallRecord:
        """Return the record of rows that were made outside of a graph."""
        slots = torch.zeros_like(forward)
        slots.grad = backward
        return CallRecord(forward, slots)


class CallRecorder:
    """Slots of a graph for a number of rows. ``on_record`` gets every call's record."""

    def __init__(
        self,
        graph: StepGraph,
        num_rows: int,
        num_columns: int,
        on_record: Callable[[CallRecord], None],
    ) -> None:
        self._graph = graph
        self._shape = (num_rows, num_columns)
        self._dtype = row_dtype(graph.device)
        self._on_record = on_record
        self._slots: Tensor | None = None
        slots = self._fresh_slots()
        self._vector = graph.add_state("slots", self._fresh_slots, slots)
        self._example = fake_like(graph.graph, slots.detach()[0])
        with graph.graph.inserting_after(self._vector):
            # Unbound once, since the backward of one select per row would fill the whole tensor
            # each.
            self._unbound = graph.graph.call_function(torch.unbind, (self._vector,))

    def slot(self, row: int, region: Region | None = None) -> fx.Node:
        """Return the slot of a row, for the autograd function that fills it in ``region``."""
        with self._graph.graph.inserting_after(self._unbound):
            slot = self._graph.graph.call_function(operator.getitem, (self._unbound, row))
        return slot if region is None else region.thread(slot, self._example)

    def finish(self, rows: Sequence[fx.Node]) -> None:
        """Make the forward rows, in their order, an output of the graph."""
        graph = self._graph.graph
        with graph.inserting_before(graph.output_node()):
            stacked = graph.call_function(torch.stack, (list(rows),))
        self._graph.add_result(stacked, self._receive)

    def _fresh_slots(self) -> Tensor:
        self._slots = torch.zeros(
            self._shape, dtype=self._dtype, device=self._graph.device, requires_grad=True
        )
        return self._slots

    def _receive(self, rows: Tensor) -> None:
        assert self._slots is not None
        self._on_record(CallRecord(rows.detach(), self._slots))
        self._slots = None

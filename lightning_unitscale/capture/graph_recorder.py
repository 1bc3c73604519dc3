"""Measure tensors of captured graphs and their gradients: one interpreter, one tap, one recorder.

A graph that is interpreted is measured from outside, node by node. A graph that is compiled brings
its numbers out by itself, without hooks and without mutation. Forward rows leave it as one more
output. Backward rows leave it as the "gradient" of a leaf tensor with one slot per row: an autograd
function that takes a slot may return, as the slot's gradient, anything that its backward computes.
Everything stays purely functional, so eager, AOTAutograd and Inductor run it alike, and after
``backward()`` all rows are in one tensor.
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
    """Runs a captured graph and its activation checkpoints, node by node; recomputes nothing."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        visit: Callable[[GraphInterpreter, fx.Node], Any],
    ) -> None:
        super().__init__(graph_module)
        self._visit = visit

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, as ``visit`` has it."""
        if is_checkpoint(n):
            body, *values = self.fetch_args_kwargs_from_env(n)[0]
            return GraphInterpreter(body, self._visit).run(*values)
        return self._visit(self, n)

    def evaluate(self, node: fx.Node) -> Any:
        """What the node computes from the values of its arguments."""
        return super().run_node(node)


def tap_gradient(
    tensor: Tensor,
    slot: Tensor | None,
    on_gradient: Callable[[Tensor], Tensor | None],
    *,
    detach: bool = False,
) -> Tensor:
    """``tensor`` itself; ``on_gradient`` is called with its gradient, which goes on unchanged."""
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
        # On the context, not in saved_tensors, which are gone after one backward pass: two losses
        # may share nothing but an input, and then each has a backward pass of its own.
        ctx.on_gradient = on_gradient
        # Autograd forbids writes into a view that a function made; a detached tensor is none.
        return tensor.detach() if detach else whole_view(tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return None, None, None, None
        return grad_output, ctx.on_gradient(grad_output), None, None


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a distributed tensor; a tensor that is not distributed, as it is."""
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
    """The elements that a tensor stores, as a dense tensor; a dense tensor itself.

    Of a distributed tensor they are those of this rank. Parts that are terms of a sum are added up,
    for which all ranks have to ask.
    """
    if _is_distributed(tensor) and any(p.is_partial() for p in tensor.placements):  # type: ignore[attr-defined]
        with torch.inference_mode(False), torch.no_grad():
            tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    tensor = local_part(tensor)
    if tensor.is_sparse:
        tensor = tensor.coalesce()
    return tensor.values() if tensor.layout in {torch.sparse_coo, torch.jagged} else tensor


@dataclass(frozen=True)
class CallRecord:
    """What one call of a graph recorded, as rows of shape ``(rows, columns)``."""

    forward: Tensor
    slots: Tensor  # a leaf whose gradient holds the rows of the backward pass once it has run

    @property
    def backward(self) -> Tensor:
        """Rows of the backward pass; a row of zeros where no gradient has arrived (yet)."""
        return torch.zeros_like(self.slots) if self.slots.grad is None else self.slots.grad

    @staticmethod
    def of_rows(forward: Tensor, backward: Tensor | None = None) -> CallRecord:
        """The record of rows that were made outside of a graph."""
        slots = torch.zeros_like(forward)
        slots.grad = backward
        return CallRecord(forward, slots)


class CallRecorder:
    """Gives a graph slots for a number of rows, and hands every call's record to ``on_record``."""

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
            # Unbound once: the backward of one select per row would fill the whole tensor each.
            self._unbound = graph.graph.call_function(torch.unbind, (self._vector,))

    def slot(self, row: int, region: Region | None = None) -> fx.Node:
        """The slot of a row, to be given to the autograd function that fills it in ``region``."""
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

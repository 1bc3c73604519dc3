"""Bring numbers out of both directions of a captured graph, without hooks and without mutation.

Forward rows leave the graph as one more output. Backward rows leave it as the "gradient" of a leaf
tensor with one slot per row: an autograd function that takes a slot may return, as the slot's
gradient, anything that its backward computes. Everything stays purely functional, so eager,
AOTAutograd and Inductor run it alike, and after ``backward()`` all rows are in one tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from lightning_unitscale.graph.capture import fake_like
from lightning_unitscale.graph.passes import Region, StepGraph


@dataclass(frozen=True)
class CallRecord:
    """What one call of a graph recorded.

    Attributes:
        forward: Rows of the forward pass, shape ``(rows, columns)``.
        slots: Leaf whose gradient holds the rows of the backward pass once it has run.
    """

    forward: Tensor
    slots: Tensor

    @property
    def backward(self) -> Tensor:
        """Rows of the backward pass; a row of zeros where no gradient has arrived (yet)."""
        return torch.zeros_like(self.slots) if self.slots.grad is None else self.slots.grad


class CallRecorder:
    """Gives a graph slots for a number of rows, and hands every call's record to ``on_record``.

    Args:
        graph: The graph under rewrite.
        num_rows: How many tensors are recorded.
        num_columns: Numbers per tensor.
        on_record: Called after every forward pass of the graph.
    """

    def __init__(
        self,
        graph: StepGraph,
        num_rows: int,
        num_columns: int,
        on_record: Callable[[CallRecord], None],
    ) -> None:
        self._graph = graph
        self._shape = (num_rows, num_columns)
        # FP64 counts exactly beyond 2**24 elements; MPS has none.
        self._dtype = torch.float32 if graph.device.type == "mps" else torch.float64
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

    def no_row(self, region: Region, after: fx.Node) -> fx.Node:
        """A row of zeros, for what is recorded by other rows."""
        with region.graph.inserting_after(after):
            return region.graph.call_function(
                torch.zeros,
                (self._shape[1],),
                {"dtype": self._dtype, "device": self._graph.device},
            )

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

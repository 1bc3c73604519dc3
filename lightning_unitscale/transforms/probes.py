"""Probes: a pass that takes the statistics of tensors and of their gradients, and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.functional.whole_view import whole_view
from lightning_unitscale.graph.aliasing import aliased_by_mutation, returned_alone
from lightning_unitscale.graph.capture import GraphInput
from lightning_unitscale.graph.lowering import REWRITE
from lightning_unitscale.graph.nodes import (
    ELSEWHERE,
    INPUT,
    MODULE,
    first_operation,
    requires_grad,
    tensor_name,
)
from lightning_unitscale.graph.passes import GraphPass, Region, Stage, StepGraph
from lightning_unitscale.graph.recording import CallRecorder
from lightning_unitscale.row_layout import RowLayout
from lightning_unitscale.snapshot import ScaleSnapshot
from lightning_unitscale.statistics import statistics_row
from lightning_unitscale.transforms.gauge import ONE, Factor, FactorTable, Gauge
from lightning_unitscale.transforms.grouped_rows import group_rows
from lightning_unitscale.transforms.probed_calls import CutGraph, ProbedCall, ProbedTensor
from lightning_unitscale.transforms.probed_places import Place, Places
from lightning_unitscale.transforms.probed_snapshot import take_snapshot
from lightning_unitscale.transforms.shared_rows import find_shared_rows
from lightning_unitscale.transforms.units import GAUGE, HELD, FactorNodes, Held

Select = Callable[[fx.Node], bool]
RowOf = Callable[..., Tensor]
_UNIT_GAUGE = Gauge()


class ScaleProbes(GraphPass):
    """Records one row of statistics per tensor and direction in the observed variant of a step.

    Args:
        layout: Columns of a row.
        select: Which nodes to probe; every floating-point tensor by default.
    """

    name = "scale probes"
    stage = Stage.OBSERVE
    out_of_place = True
    observes = True

    def __init__(self, layout: RowLayout, select: Select = lambda _: True) -> None:
        self.layout = layout
        self.select = select
        self._calls: list[ProbedCall] = []
        self._cut: dict[str, CutGraph] = {}

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Insert the probes."""
        self._cut.pop(graph.step, None)
        places = Places(graph)
        return self._insert(graph, places, self._selected(places))

    def before_cut(self, graph: StepGraph) -> frozenset[str]:
        """From now on a snapshot has all tensors of this graph, recorded on this rank or not."""
        places = Places(graph)
        tensors, gauge = self._tensors(graph, places, self._selected(places))
        known = CutGraph(tensors, gauge, self.layout, graph.device)
        if graph.step in self._cut:
            # A step that was captured anew: the graphs of earlier batches may run again.
            known = self._cut[graph.step].joined(known)
        self._cut[graph.step] = known
        return known.names

    def observe_part(self, graph: StepGraph) -> None:
        """Insert the probes of a part."""
        places = Places(graph)
        own = [one for one in self._selected(places) if ELSEWHERE not in one.node.meta]
        self._insert(graph, places, own)

    def see_shared(self, name: str, value: Tensor, gradient: Tensor | None) -> None:
        """Record a parameter with the sum of its parts' gradients."""
        for one in self._cut.values():
            if name in one.names:
                self._calls.append(one.shared(name, value, gradient))

    def _selected(self, places: Places) -> list[Place]:
        return [one for one in places.probeable() if self.select(one.node)]

    def _tensors(
        self, graph: StepGraph, places: Places, selected: Sequence[Place]
    ) -> tuple[tuple[ProbedTensor, ...], Callable[[], Gauge]]:
        held: dict[str, Held] = graph.notes.get(HELD, {})
        gauge_in_force: Callable[[], Gauge] = graph.notes.get(GAUGE, lambda: _UNIT_GAUGE)
        inputs = places.inputs_of(selected)
        tensors = tuple(
            ProbedTensor(
                tensor_name(node),
                str(node.meta.get(MODULE, "")),
                held.get(tensor_name(node), Held()),
                inputs[tensor_name(node)],
            )
            for _, node in selected
        )
        return tensors, gauge_in_force

    def _insert(
        self, graph: StepGraph, places: Places, selected: Sequence[Place]
    ) -> tuple[str, ...]:
        if not selected:
            return ("no tensor to probe",)
        nodes = [one.node for one in selected]
        # Probes of inputs go before it and after the states, which are inputs themselves.
        anchor = first_operation(graph.graph)
        tensors, gauge_in_force = self._tensors(graph, places, selected)
        counted = _CountFactors(graph, tensors, gauge_in_force)
        mutated = set[fx.Node]().union(*(aliased_by_mutation(r.graph) for r in places.regions))
        alone = returned_alone(graph.graph)
        differentiable = [
            requires_grad(node) and node not in mutated and not _is_gathered(node) for node in nodes
        ]
        shared = find_shared_rows(nodes, [one.held for one in tensors], differentiable, mutated)
        recorder = CallRecorder(
            graph,
            len(nodes),
            self.layout.num_columns,
            lambda record: self._calls.append(
                ProbedCall(tensors, record, gauge_in_force(), shared)
            ),
        )
        functions = ProbeFunctions(self.layout)
        rows = []
        for index, (region, node) in enumerate(selected):
            if index in shared.parts:
                rows.append(recorder.no_row(region, node))
                continue
            has_own = differentiable[index] and index not in shared.twins
            slot = recorder.slot(index, region) if has_own else None
            factors = counted.of(index, region)
            row = insert_probe(
                region.graph, node, anchor, slot, functions, factors, alone=node in alone
            )
            rows.append(row)
        recorder.finish(places.bring_out(selected, rows))
        graph.notes[REWRITE] = group_rows
        return (f"{len(nodes)} tensors probed, {sum(differentiable)} of them in both directions",)

    def clear(self) -> None:
        """Forget what was recorded and not taken."""
        self._calls.clear()

    def forget(self) -> None:
        """Forget the graphs as well."""
        self._calls.clear()
        self._cut.clear()

    def take(self, step: int, *, grad_scale: float = 1.0) -> ScaleSnapshot | None:
        """What was recorded since the last call, with one transfer from the device.

        Args:
            step: Optimizer step of the snapshot.
            grad_scale: Factor that the loss carried (a loss scale); gradients are divided by it.

        Returns:
            The snapshot, or ``None`` when nothing was recorded. Rows of a tensor recorded several
            times (micro-batches, repeated calls) are merged.
        """
        calls, self._calls = self._calls, []
        # A rank that recorded nothing has to join in with the others.
        calls = [*(one.absent() for one in self._cut.values() if one.names), *calls]
        if not calls:
            return None
        return take_snapshot(step, calls, self.layout, grad_scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaleProbes:
        new = type(self)(self.layout, self.select)
        memo[id(self)] = new
        return new


def _is_gathered(node: fx.Node) -> bool:
    """Whether the gradients of several readers of an input meet outside of the graph.

    A probe would add up those of this graph first: with a reader in another graph of the step, that
    is another order. The gradient of the whole is measured where the tensor was made.
    """
    given: GraphInput | None = node.meta.get(INPUT)
    return given is not None and given.kind == "input" and len(node.users) > 1


class ProbeFunctions:
    """What the graph calls; a node's arguments cannot hold a layout, so functions close over it.

    Args:
        layout: Columns of a row.
        if_differentiable: Whether a tensor without gradient is left as it is; otherwise its slot
            makes it require one.
    """

    def __init__(self, layout: RowLayout, *, if_differentiable: bool = False) -> None:
        def row_of(tensor: Tensor, factor: Tensor | None = None) -> Tensor:
            return statistics_row(tensor, layout, factor=factor)

        def probe(
            tensor: Tensor,
            slot: Tensor,
            forward: Tensor | None,
            backward: Tensor | None,
            alone: bool,
        ) -> tuple[Tensor, Tensor]:
            if if_differentiable and not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor, row_of(tensor, forward)
            result: tuple[Tensor, Tensor] = _Probe.apply(
                tensor, slot, row_of, forward, backward, alone
            )
            return result

        self.row_of = row_of
        self.probe = probe


class _CountFactors:
    """Powers of two that turn each tensor into what is stored, as a state of the graph.

    Formats are a question about what is stored; a tensor that the graph itself holds in its units
    is counted as it is.
    """

    def __init__(
        self, graph: StepGraph, tensors: Sequence[ProbedTensor], gauge: Callable[[], Gauge]
    ) -> None:
        self._pairs = [
            (ONE, ONE) if held.in_graph else (held.sigma.inverse(), held.gamma.inverse())
            for held in (tensor.held for tensor in tensors)
        ]
        table = FactorTable(graph.device)
        for factor in (one for pair in self._pairs for one in pair if one != ONE):
            table.row(factor)
        self._nodes: FactorNodes | None = None
        if len(table):
            vector = graph.add_state(
                "count_factors", lambda: table.tensor(gauge()), table.tensor(gauge())
            )
            self._nodes = FactorNodes(vector, table.row)

    def of(self, index: int, region: Region) -> tuple[fx.Node | None, fx.Node | None]:
        """Forward and backward factor of a tensor in a region; ``None`` for 1."""
        forward, backward = self._pairs[index]
        return self._node(forward, region), self._node(backward, region)

    def _node(self, factor: Factor, region: Region) -> fx.Node | None:
        if factor == ONE or self._nodes is None:
            return None
        return self._nodes(region, factor)


def insert_probe(
    graph: fx.Graph,
    node: fx.Node,
    anchor: fx.Node,
    slot: fx.Node | None,
    functions: ProbeFunctions,
    factors: tuple[fx.Node | None, fx.Node | None] = (None, None),
    alone: bool = False,
) -> fx.Node:
    """Probe the node's tensor, in both directions where there is a slot; returns the row's node.

    Args:
        graph: Graph or body that the node stands in.
        node: The node.
        anchor: The graph's first operation; probes of inputs go before it.
        slot: Where the row of the gradient goes, if it is to be probed.
        functions: What is called.
        factors: Nodes of the powers of two at which formats are counted.
        alone: Whether the tensor is in ``returned_alone``.
    """
    forward, backward = factors
    is_input = node.op == "placeholder"
    point = graph.inserting_before(anchor) if is_input else graph.inserting_after(node)
    if slot is None:
        with point:
            return graph.call_function(functions.row_of, (node, forward))
    with point:
        probed = graph.call_function(functions.probe, (node, slot, forward, backward, alone))
    with graph.inserting_after(probed):
        value = graph.call_function(operator.getitem, (probed, 0))
        row = graph.call_function(operator.getitem, (probed, 1))
    value.meta.update(node.meta)
    node.replace_all_uses_with(value, delete_user_cb=lambda user: user is not probed)
    return row


class _Probe(torch.autograd.Function):
    """The tensor itself and its row; the row of its gradient becomes the gradient of the slot."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        slot: Tensor,
        row_of: RowOf,
        forward_factor: Tensor | None,
        backward_factor: Tensor | None,
        alone: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.row_of = row_of
        # Not saved_tensors, which are gone after one backward pass: two losses may share nothing
        # but an input, and then each has a backward pass of its own.
        ctx.factor = backward_factor
        row = row_of(tensor, factor=forward_factor)
        ctx.mark_non_differentiable(row)
        # Autograd lets nobody write into a view that a function made; a detached tensor is none.
        return tensor.detach() if alone else whole_view(tensor), row

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 6
        is_dense = grad_output.layout == torch.strided
        dense = grad_output if is_dense else grad_output.coalesce().values()
        return grad_output, ctx.row_of(dense, factor=ctx.factor), None, None, None, None

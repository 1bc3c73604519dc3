"""Measure the tensors of captured steps and their gradients, and make snapshots of the rows."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from lightning_unitscale.capture.aliasing import aliased_by_mutation, returned_alone
from lightning_unitscale.capture.copy_graphs import fake_mode_of
from lightning_unitscale.capture.dynamo_capture import GraphInput
from lightning_unitscale.capture.graph_matmuls import MATMULS, Place, Places
from lightning_unitscale.capture.graph_nodes import (
    ELSEWHERE,
    INPUT,
    MODULE,
    first_operation,
    requires_grad,
    tensor_name,
)
from lightning_unitscale.capture.graph_recorder import (
    CallRecord,
    CallRecorder,
    stored_elements,
    tap_gradient,
)
from lightning_unitscale.capture.passes import GraphPass, Phase, Region, StepGraph
from lightning_unitscale.matmuls.gauge import GAUGE, HELD, ONE, Gauge, TensorUnits, Unit
from lightning_unitscale.scales.layout import FloatArray, RowLayout
from lightning_unitscale.scales.reduce import absent_rows, completed_rows, merge_rows, shift_rows
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.scales.transfer import HostCopy, numbers_on

Select = Callable[[fx.Node], bool]
_UNIT_GAUGE = Gauge()


class ProbedTensor(NamedTuple):
    """One tensor under observation; its name is stable across runs."""

    name: str
    module: str
    held: TensorUnits
    inputs: tuple[str, ...] = ()  # names of the probed tensors that it is computed from
    # True if a matmul reads it, and if a matmul makes it.
    is_operand: bool = False
    is_matmul: bool = False
    # True for a unit that is not measured yet: its own, and that of its gradient.
    lacks_unit: tuple[bool, bool] = (False, False)
    made_by: tuple[str, Any] | None = None  # kind and target of the node of a graph that makes it

    def lacks_unit_in(self, gauge: Gauge) -> tuple[bool, bool]:
        """Check whether a matmul reads it, or its gradient, without a unit."""
        value, gradient = self.lacks_unit
        names = self.held.sigma.operand, self.held.gamma.gradient
        if names == ("", ""):
            return self.lacks_unit
        lacks = [bool(name) and name not in gauge for name in names]
        return value or lacks[0], gradient or lacks[1]


@dataclass(frozen=True)
class ProbedCall:
    """The rows that one call of a graph has recorded, and the units of the call."""

    tensors: tuple[ProbedTensor, ...]
    record: CallRecord
    gauge: Gauge


@dataclass(frozen=True)
class CutGraph:
    """The tensors of a cut graph, by name. Each rank records its own."""

    tensors: dict[str, ProbedTensor]
    gauge: Callable[[], Gauge]
    layout: RowLayout
    device: torch.device

    def absent(self) -> ProbedCall:
        """Return a call in which every tensor is absent. Merged first, it defines their order."""
        rows = absent_rows(len(self.tensors), self.layout.measured, self.device)
        return ProbedCall(tuple(self.tensors.values()), CallRecord.of_rows(rows), self.gauge())

    def shared(self, name: str, value: Tensor, gradient: Tensor | None) -> ProbedCall:
        """Return a call of one tensor whose gradient several parts of the graph contribute to."""
        tensor, gauge, layout = self.tensors[name], self.gauge(), self.layout.measured

        def row(of: Tensor, unit: Unit) -> Tensor:
            exponent = 0 if self.layout.is_sampled else unit.exponent(gauge)
            # As for other tensors, format counts describe the stored value.
            (factor,) = numbers_on(of.device, [2.0**-exponent], torch.float32)
            return statistics_row(of.detach(), layout, factor=factor if exponent else None)

        forward = row(value, tensor.held.sigma)[None]
        backward = None if gradient is None else row(gradient, tensor.held.gamma)[None]
        return ProbedCall((tensor,), CallRecord.of_rows(forward, backward), gauge)


class ScaleProbes(GraphPass):
    """A pass that records one row per tensor and direction in the observed variant of a step."""

    name = "scale probes"
    phase = Phase.OBSERVE
    out_of_place = True

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
        """Make every snapshot list all tensors of this graph, including those of other ranks."""
        places = Places(graph)
        found, gauge = self._tensors(graph, places, self._selected(places))
        tensors = {tensor.name: tensor for tensor in found}
        if (earlier := self._cut.get(graph.step)) is not None:
            # The step was recaptured: the graphs of earlier batches may run again.
            tensors = earlier.tensors | tensors
        self._cut[graph.step] = CutGraph(tensors, gauge, self.layout, graph.device)
        return frozenset(tensors)

    def observe_part(self, graph: StepGraph) -> None:
        """Insert the probes of a part."""
        places = Places(graph)
        own = [place for place in self._selected(places) if ELSEWHERE not in place.node.meta]
        self._insert(graph, places, own)

    def see_shared(self, name: str, value: Tensor, gradient: Tensor | None) -> None:
        """Record a parameter that several parts of a cut graph use."""
        for cut in self._cut.values():
            if name in cut.tensors:
                self._calls.append(cut.shared(name, value, gradient))

    def _selected(self, places: Places) -> list[Place]:
        return [place for place in places.probeable() if self.select(place.node)]

    def _tensors(
        self, graph: StepGraph, places: Places, selected: Sequence[Place]
    ) -> tuple[tuple[ProbedTensor, ...], Callable[[], Gauge]]:
        held: dict[str, TensorUnits] = graph.notes.get(HELD, dict)()
        gauge_in_force: Callable[[], Gauge] = graph.notes.get(GAUGE, lambda: _UNIT_GAUGE)
        inputs = places.inputs_of(selected)
        operands, matmuls = graph.notes.get(MATMULS, (set(), set()))
        tensors = tuple(
            ProbedTensor(
                tensor_name(node),
                str(node.meta.get(MODULE, "")),
                held.get(tensor_name(node), TensorUnits()),
                inputs[tensor_name(node)],
                tensor_name(node) in operands,
                tensor_name(node) in matmuls,
                made_by=(node.op, node.target),
            )
            for _, node in selected
        )
        return tensors, gauge_in_force

    def _insert(
        self, graph: StepGraph, places: Places, selected: Sequence[Place]
    ) -> tuple[str, ...]:
        if not selected:
            return ("no tensor to probe",)
        nodes = [place.node for place in selected]
        tensors, gauge_in_force = self._tensors(graph, places, selected)
        mutated = set[fx.Node]().union(*(aliased_by_mutation(r.graph) for r in places.regions))
        differentiable = [
            requires_grad(node) and node not in mutated and not _is_gathered(node) for node in nodes
        ]
        # Probes of inputs go before it and after the states, which are inputs themselves.
        anchors = {id(region): first_operation(region.graph) for region in places.regions}
        # Counts of a sample are valid for every power of two.
        counted = () if self.layout.is_sampled else tensors
        factor_of = _count_factors(graph, counted, gauge_in_force)
        layout = self.layout.measured

        # A layout cannot be an argument of a node, so functions close over it.
        def row_of(tensor: Tensor, factor: Tensor | None) -> Tensor:
            return statistics_row(stored_elements(tensor), layout, factor=factor)

        def tap(tensor: Tensor, slot: Tensor, factor: Tensor | None, detach: bool) -> Tensor:
            return tap_gradient(
                tensor, slot, lambda gradient: row_of(gradient, factor), detach=detach
            )

        # The graph around a checkpoint may write into its results, so the rule is that of the outer
        # graph.
        alone = returned_alone(graph.graph)
        recorder = CallRecorder(
            graph,
            len(selected),
            layout.num_columns,
            lambda record: self._calls.append(ProbedCall(tensors, record, gauge_in_force())),
        )
        rows: list[fx.Node] = []
        for index, (region, node) in enumerate(selected):
            inner = region.graph
            slot = recorder.slot(index, region) if differentiable[index] else None
            held = tensors[index].held
            forward, backward = factor_of(region, held.sigma), factor_of(region, held.gamma)
            is_input = node.op == "placeholder"
            anchor, readers = anchors[id(region)], list(node.users)
            with inner.inserting_before(anchor) if is_input else inner.inserting_after(node):
                row = inner.call_function(row_of, (node, forward))
            rows.append(row)
            if slot is None:
                continue
            with inner.inserting_after(row):
                value = inner.call_function(tap, (node, slot, backward, node in alone))
            value.meta.update(node.meta)
            for reader in readers:
                reader.replace_input_with(node, value)
        recorder.finish(places.bring_out(selected, rows))
        return (f"{len(nodes)} tensors probed, {sum(differentiable)} of them in both directions",)

    def clear(self) -> None:
        """Forget the records since the last snapshot. Another callback may have made them."""
        self._calls.clear()

    def forget(self) -> None:
        """Forget the graphs as well."""
        self._calls.clear()
        self._cut.clear()

    def take(self, step: int, *, grad_scale: float = 1.0) -> Callable[[], ScaleSnapshot] | None:
        """Start the transfer of the records since the last call; the result waits for it."""
        calls, self._calls = self._calls, []
        # A rank that recorded nothing must still take part in the collective.
        calls = [*(cut.absent() for cut in self._cut.values() if cut.tensors), *calls]
        if not calls:
            return None
        return sent_snapshot(step, calls, self.layout, grad_scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaleProbes:
        new = ScaleProbes(self.layout, self.select)
        memo[id(self)] = new
        return new


def _is_gathered(node: fx.Node) -> bool:
    """Check whether gradients from several readers of an input are summed outside the graph."""
    # A probe would first sum the gradients of this graph. With a reader in another graph, this
    # changes the order of the sum. The total gradient is measured where the tensor was computed.
    described: GraphInput | None = node.meta.get(INPUT)
    return described is not None and described.kind == "input" and len(node.users) > 1


def _count_factors(
    graph: StepGraph, tensors: Sequence[ProbedTensor], gauge: Callable[[], Gauge]
) -> Callable[[Region, Unit], fx.Node | None]:
    """Return a function that gives a unit's inverse in a region, for exact format counts."""
    held = [unit for tensor in tensors for unit in (tensor.held.sigma, tensor.held.gamma)]
    units = list(dict.fromkeys(unit for unit in held if unit != ONE))
    if not units:
        return lambda region, unit: None

    def supply() -> Tensor:
        powers = [2.0 ** -unit.exponent(gauge()) for unit in units]
        # An evaluation may come first, and training cannot save inference tensors.
        with torch.inference_mode(False):
            return numbers_on(graph.device, powers, torch.float32)

    vector = graph.add_state("count_factors", supply, supply())
    with fake_mode_of(graph.graph):
        example = vector.meta["example_value"][0]
    with graph.graph.inserting_before(first_operation(graph.graph)):
        nodes = {
            unit: graph.graph.call_function(operator.getitem, (vector, row))
            for row, unit in enumerate(units)
        }

    def factor_of(region: Region, unit: Unit) -> fx.Node | None:
        # A checkpoint gets each factor as an argument.
        return region.thread(nodes[unit], example) if unit in nodes else None

    return factor_of


def sent_snapshot(
    step: int, calls: Sequence[ProbedCall], layout: RowLayout, grad_scale: float
) -> Callable[[], ScaleSnapshot]:
    """Start one transfer of the rows of several calls; the result waits for their snapshot."""
    device = calls[0].record.forward.device
    rows = [call.record.forward.to(device) for call in calls]
    rows += [call.record.backward.to(device) for call in calls]
    copy = HostCopy(torch.cat(rows))
    tensors = [(tensor, call.gauge) for call in calls for tensor in call.tensors]

    def arrived() -> ScaleSnapshot:
        return snapshot_of(step, tensors, layout, grad_scale, copy.numbers().double())

    return arrived


def snapshot_of(
    step: int,
    described: Sequence[tuple[ProbedTensor, Gauge]],
    layout: RowLayout,
    grad_scale: float,
    rows: Tensor,
    blocks: FloatArray | None = None,
) -> ScaleSnapshot:
    """Return the snapshot of measured rows on the host. Rows of the same tensor are merged."""
    # The rows of the values come first, then those of the gradients, and likewise for
    # blocks. The rows are changed in place.
    measured = layout.measured
    forward, backward = rows.chunk(2)
    # A slot that no gradient reached contains zeros. A real row counts elements.
    numbers = backward.numpy()
    numbers[~(numbers[:, 0] > 0)] = math.nan
    tensors = [tensor for tensor, _ in described]
    sigmas = np.array([tensor.held.sigma.exponent(gauge) for tensor, gauge in described])
    gammas = np.array([tensor.held.gamma.exponent(gauge) for tensor, gauge in described])
    log2_loss_scale = round(math.log2(grad_scale))
    # A loss scale is a power of two, so dividing by it is a shift.
    if log2_loss_scale:
        backward = shift_rows(backward, np.full(len(tensors), -log2_loss_scale), measured)
        rows = torch.cat([forward, backward])
    positions: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        positions.setdefault(tensor.name, []).append(index)
    kept = [indices[0] for indices in positions.values()]
    if len(kept) < len(tensors):
        merge = functools.partial(merge_rows, layout=measured)
        forward, backward = (
            torch.stack([functools.reduce(merge, rows[indices]) for indices in positions.values()])
            for rows in (forward, backward)
        )
        rows = torch.cat([forward, backward])
    log2_sigma, log2_gamma = sigmas[kept], gammas[kept]
    if layout.is_sampled:
        divisors = np.concatenate([log2_sigma, log2_gamma - log2_loss_scale])
        rows = completed_rows(rows, layout, divisors)
    if layout.block_formats:
        merged = np.zeros((2, len(kept), len(layout.block_columns)))
        if blocks is not None:
            halves = blocks.reshape(2, len(tensors), -1)
            for position, indices in enumerate(positions.values()):
                merged[:, position] = halves[:, indices].sum(axis=1)
        rows = torch.cat([rows, torch.from_numpy(merged.reshape(2 * len(kept), -1))], dim=1)
    forward, backward = rows.chunk(2)
    return ScaleSnapshot(
        step=step,
        names=tuple(positions),
        forward=forward.numpy(),
        backward=backward.numpy(),
        layout=layout,
        modules=tuple(tensors[index].module for index in kept),
        log2_sigma=log2_sigma,
        log2_gamma=log2_gamma,
        inputs=tuple(tensors[index].inputs for index in kept),
        operands=tuple(tensors[index].is_operand for index in kept),
        matmuls=tuple(tensors[index].is_matmul for index in kept),
        lacking_units=tuple(tensors[index].lacks_unit_in(described[index][1]) for index in kept),
        log2_loss_scale=log2_loss_scale,
    )

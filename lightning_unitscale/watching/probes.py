"""A pass that measures the tensors of a step and their gradients, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from lightning_unitscale.dynamo.capture import GraphInput
from lightning_unitscale.graph.aliasing import aliased_by_mutation, returned_alone
from lightning_unitscale.graph.nodes import (
    ELSEWHERE,
    INPUT,
    MODULE,
    first_operation,
    requires_grad,
    tensor_name,
)
from lightning_unitscale.graph.passes import GraphPass, Phase, Region, StepGraph
from lightning_unitscale.graph.recorder import (
    CallRecorder,
    stored_elements,
    tap_gradient,
)
from lightning_unitscale.graph.regions import PRODUCTS, Place, Places
from lightning_unitscale.lossless.gauge import ONE, Gauge
from lightning_unitscale.lossless.held import GAUGE, HELD, FactorNodes, Held
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.watching.records import CutGraph, ProbedCall, ProbedTensor, sent_snapshot

Select = Callable[[fx.Node], bool]
# Gives a position among the probed tensors, and the region of the tensor, its two factors.
FactorsOf = Callable[[int, Region], tuple[fx.Node | None, fx.Node | None]]
_UNIT_GAUGE = Gauge()


class ScaleProbes(GraphPass):
    """Records one row of statistics per tensor and direction in the observed variant of a step."""

    name = "scale probes"
    phase = Phase.OBSERVE
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
        """Have every snapshot list all tensors of this graph, recorded on this rank or not."""
        places = Places(graph)
        tensors, gauge = self._tensors(graph, places, self._selected(places))
        cut = CutGraph(tensors, gauge, self.layout, graph.device)
        if graph.step in self._cut:
            # The step was recaptured: the graphs of earlier batches may run again.
            cut = self._cut[graph.step].joined(cut)
        self._cut[graph.step] = cut
        return cut.names

    def observe_part(self, graph: StepGraph) -> None:
        """Insert the probes of a part."""
        places = Places(graph)
        own = [place for place in self._selected(places) if ELSEWHERE not in place.node.meta]
        self._insert(graph, places, own)

    def see_shared(self, name: str, value: Tensor, gradient: Tensor | None) -> None:
        """Record a parameter that several parts of a cut graph use."""
        for cut in self._cut.values():
            if name in cut.names:
                self._calls.append(cut.shared(name, value, gradient))

    def _selected(self, places: Places) -> list[Place]:
        return [place for place in places.probeable() if self.select(place.node)]

    def _tensors(
        self, graph: StepGraph, places: Places, selected: Sequence[Place]
    ) -> tuple[tuple[ProbedTensor, ...], Callable[[], Gauge]]:
        held: dict[str, Held] = graph.notes.get(HELD, dict)()
        gauge_in_force: Callable[[], Gauge] = graph.notes.get(GAUGE, lambda: _UNIT_GAUGE)
        inputs = places.inputs_of(selected)
        operands, products = graph.notes.get(PRODUCTS, (set(), set()))
        tensors = tuple(
            ProbedTensor(
                tensor_name(node),
                str(node.meta.get(MODULE, "")),
                held.get(tensor_name(node), Held()),
                inputs[tensor_name(node)],
                tensor_name(node) in operands,
                tensor_name(node) in products,
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
        factors_of = (
            _no_factors
            if self.layout.is_sampled
            else _count_factors(graph, tensors, gauge_in_force)
        )
        layout = self.layout.measured

        # A node's arguments cannot hold a layout, so functions close over it.
        def row_of(tensor: Tensor, factor: Tensor | None) -> Tensor:
            return statistics_row(stored_elements(tensor), layout, factor=factor)

        def tap(tensor: Tensor, slot: Tensor, factor: Tensor | None, detach: bool) -> Tensor:
            return tap_gradient(
                tensor, slot, lambda gradient: row_of(gradient, factor), detach=detach
            )

        # Probes of inputs go before it and after the states, which are inputs themselves.
        anchors = {id(region): first_operation(region.graph) for region in places.regions}
        # What a checkpoint returns, the graph around it may write into: the rule is for that graph.
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
            forward, backward = factors_of(index, region)
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
        """Forget what was recorded and not taken."""
        self._calls.clear()

    def forget(self) -> None:
        """Forget the graphs as well."""
        self._calls.clear()
        self._cut.clear()

    def take(self, step: int, *, grad_scale: float = 1.0) -> Callable[[], ScaleSnapshot] | None:
        """Send for what was recorded since the last call; what is returned waits for it."""
        calls, self._calls = self._calls, []
        # A rank that recorded nothing has to join in with the others.
        calls = [*(cut.absent() for cut in self._cut.values() if cut.names), *calls]
        if not calls:
            return None
        return sent_snapshot(step, calls, self.layout, grad_scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaleProbes:
        new = type(self)(self.layout, self.select)
        memo[id(self)] = new
        return new


def _is_gathered(node: fx.Node) -> bool:
    """Whether the gradients of several readers of an input meet outside of the graph.

    A probe would add up those of this graph first: with a reader in another graph of the step, that
    is another order. The gradient of the whole is measured where the tensor was made.
    """
    described: GraphInput | None = node.meta.get(INPUT)
    return described is not None and described.kind == "input" and len(node.users) > 1


def _no_factors(index: int, region: Region) -> tuple[fx.Node | None, fx.Node | None]:
    return None, None


def _count_factors(
    graph: StepGraph, tensors: Sequence[ProbedTensor], gauge: Callable[[], Gauge]
) -> FactorsOf:
    """Powers of two that turn each tensor into what is stored, as a state of the graph.

    For exact counts only: those of a sample hold for every power of two.

    Formats are counted of what matmuls read.
    """
    pairs = [(tensor.held.sigma, tensor.held.gamma) for tensor in tensors]
    units = [unit for pair in pairs for unit in pair if unit != ONE]
    if not units:
        return _no_factors
    nodes = FactorNodes(graph, "count_factors", units, gauge)

    def factors_of(index: int, region: Region) -> tuple[fx.Node | None, fx.Node | None]:
        forward, backward = pairs[index]
        return (
            None if forward == ONE else nodes(region, forward),
            None if backward == ONE else nodes(region, backward),
        )

    return factors_of

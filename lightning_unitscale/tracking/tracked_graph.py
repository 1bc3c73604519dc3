"""Make the graph that people see: without what measures it, and joined with a step's others."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.dynamo.capture import GraphInput
from lightning_unitscale.graph.aliasing import WRITTEN_AS, aliased_by_mutation, same_tensor
from lightning_unitscale.graph.nodes import INPUT, INTERNAL, NAME, requires_grad
from lightning_unitscale.graph.recorder import TAP, CallRecord, stored_elements
from lightning_unitscale.graph.regions import Places, returned_by
from lightning_unitscale.scales.layout import MOMENTS
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.tracking.scales_graph import (
    CLEAN_NAME,
    FLOAT_TENSOR,
    METRICS,
    TRAINED,
    Metrics,
    ScalesGraph,
)

# Metadata that is useless outside of the capture, or keeps tensors alive.
_DROPPED = (INPUT, INTERNAL, WRITTEN_AS, "grapharg", "tensor_dict")
# What Dynamo puts around the name of an input: ``L_x_``, on old versions ``l__self___weight``.
_AROUND_NAME = re.compile(r"^_*(?:[lL]_+(?:self___)?)?|_+$")


class TrackedGraph:
    """One captured graph as it ran, without what was inserted to measure it.

    The bodies of activation checkpoints stand in line with the rest.

    Attributes:
        graph: What is shown, without metrics.
        inputs: Its placeholders, in the order of the captured graph's inputs.
        rows: Row of each of its nodes that has one.
        outputs: Its nodes that are returned.
        output_gradients: For each output whether it takes part in the plain module's backward pass.
        written: Positions of inputs that the graph writes into.
    """

    def __init__(self, places: Places, rows: Mapping[fx.Node, int]) -> None:
        self.graph = ScalesGraph()
        self.inputs: list[fx.Node] = []
        self.rows: dict[fx.Node, int] = {}
        graph = places.regions[0].graph
        returned = returned_by(graph.output_node())
        copies = self._copy(places, rows)
        self.outputs: tuple[Any, ...] = fx.map_arg(returned, copies.__getitem__)
        self.output_gradients = tuple(map(requires_grad, returned))
        aliased = aliased_by_mutation(graph)
        placeholders = graph.find_nodes(op="placeholder")
        inputs = [node for node in placeholders if INPUT in node.meta]
        self.written = {position for position, node in enumerate(inputs) if node in aliased}

    def _copy(self, places: Places, rows: Mapping[fx.Node, int]) -> dict[fx.Node, fx.Node | None]:
        """The copies of all nodes; ``None`` for what is no part of the step."""
        copies: dict[fx.Node, fx.Node | None] = {}
        for region, node in places.in_order():
            origin = places.origin(region, node)
            if TAP in node.meta:
                origin = node.args[0]  # type: ignore[assignment]
            if origin is not node:
                copies[node] = copies[origin]
            elif node.op == "output" or node in places.bodies or _is_plumbing(node, places.bodies):
                copies[node] = None
            else:
                copies[node] = copy = self._copy_node(node, copies)
                source = same_tensor(node)
                row = rows.get(node) if source is None else self.rows.get(copies[source])  # type: ignore[arg-type]
                if row is not None:
                    self.rows[copy] = row
        return copies

    def _copy_node(self, node: fx.Node, copies: Mapping[fx.Node, Any]) -> fx.Node:
        op, target = node.meta.get(WRITTEN_AS, (node.op, node.target))
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        new = self.graph.create_node(op, target, args, kwargs, node.name)
        described: GraphInput | None = node.meta.get(INPUT)
        new.meta.update({key: value for key, value in node.meta.items() if key not in _DROPPED})
        new.meta.setdefault(NAME, node.name)
        is_parameter = described is not None and described.kind == "parameter"
        new.meta[TRAINED] = is_parameter and requires_grad(node)
        if described is not None:
            self.inputs.append(new)
        return new


class TrackedCall:
    """One call of a graph: its rows, and which of its inputs earlier calls of the step made."""

    def __init__(
        self,
        graph: TrackedGraph,
        record: CallRecord | None,
        links: Mapping[int, tuple[int, int]],
    ) -> None:
        self.graph = graph
        self.links = links
        self._forward = None if record is None else record.forward
        # A list, since the hook must not hold the call: the two would keep each other alive.
        self._arrived: list[Tensor] = []
        self._watched: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        if record is not None and record.slots.requires_grad and not record.slots.is_inference():
            record.slots.register_hook(functools.partial(_keep, self._arrived))

    def watch(self, tensor: Tensor, row: int) -> None:
        """Measure the whole gradient of an input from now on, as its row."""
        self._handles.append(tensor.register_hook(functools.partial(_measure, self._watched, row)))

    def release(self) -> None:
        """Leave the inputs as they were."""
        for handle in self._handles:
            handle.remove()

    def metrics(self) -> dict[fx.Node, Metrics]:
        """Metrics of the graph's nodes; one transfer from the device."""
        if self._forward is None:
            return {}
        arrived = self._arrived[0] if self._arrived else torch.zeros_like(self._forward)
        if self._watched:
            arrived = arrived.index_copy(
                0,
                torch.tensor([*self._watched], device=arrived.device),
                torch.stack([*self._watched.values()]).to(arrived),
            )
        forward, backward = torch.stack([self._forward, arrived]).tolist()
        return {
            node: Metrics(
                Metrics.from_row(forward[row]),
                Metrics.from_row(backward[row]) if backward[row][0] else None,
            )
            for node, row in self.graph.rows.items()
        }


def _measure(watched: dict[int, Tensor], row: int, gradient: Tensor) -> None:
    watched[row] = statistics_row(stored_elements(gradient), MOMENTS)


def _keep(arrived: list[Tensor], rows: Tensor | None) -> None:
    """Keep the newest row of each gradient, from the backward pass that last reached it."""
    if rows is None:  # no gradient has come to the graph
        return
    rows = rows.detach()
    if arrived:
        rows = torch.where(rows[:, :1] > 0, rows, arrived[0])
    # A copy: autograd goes on to accumulate into the very tensor that it shows to its hooks.
    arrived[:] = [rows.clone()]


def assemble(calls: Sequence[TrackedCall]) -> ScalesGraph:
    """The graphs of a step's calls as one, an edge wherever a graph reads what another made."""
    merged = ScalesGraph()
    outputs_of: list[tuple[Any, ...]] = []
    read: set[tuple[int, int]] = set()
    for call in calls:
        metrics = call.metrics()
        linked = {call.graph.inputs[position]: output for position, output in call.links.items()}
        copies: dict[fx.Node, Any] = {}
        for node in call.graph.graph.nodes:
            if node in linked:
                index, position = linked[node]
                copies[node] = outputs_of[index][position]
                read.add(linked[node])
                continue
            copies[node] = merged.node_copy(node, copies.__getitem__)
            _describe(copies[node], metrics.get(node))
        outputs_of.append(fx.map_arg(call.graph.outputs, copies.__getitem__))
    if calls:
        rest = [
            node
            for index, outputs in enumerate(outputs_of)
            for position, node in enumerate(outputs)
            if (index, position) not in read
        ]
        output = merged.output(tuple(rest))
        output.meta.update({TRAINED: False, NAME: "output"})
        _describe(output, None)
    return merged


def _describe(node: fx.Node, metrics: Metrics | None) -> None:
    node.meta[METRICS] = metrics
    node.meta[FLOAT_TENSOR] = metrics is not None
    node.meta[CLEAN_NAME] = _AROUND_NAME.sub("", node.name) or node.name


def _is_plumbing(node: fx.Node, checkpoints: Mapping[fx.Node, Any]) -> bool:
    """Whether the node is no part of the step: factors and slots, measurements, bodies."""
    if node.op == "placeholder":
        return INPUT not in node.meta
    if node.op == "get_attr" and node.users and all(user in checkpoints for user in node.users):
        return True
    return NAME not in node.meta and "example_value" not in node.meta

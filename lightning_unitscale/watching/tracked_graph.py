"""Make the graph that people see of a tracked call."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from lightning_unitscale.dynamo.graphs import rename_node
from lightning_unitscale.graph.nodes import MODULE, NAME
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.watching.probes import ProbedCall
from lightning_unitscale.watching.rows import TensorRow
from lightning_unitscale.watching.scales_graph import (
    CLEAN_NAME,
    FLOAT_TENSOR,
    METRICS,
    TRAINED,
    Metrics,
    ScalesGraph,
)
from lightning_unitscale.watching.tracked_call import Made, State, TrackedCall


def graph_of_call(call: TrackedCall) -> ScalesGraph:
    """Return the graph of a call that was watched, with the gradients that have arrived."""
    graph = ScalesGraph()
    metrics = _metrics(call, (*call.given, *call.made))
    nodes: dict[Any, fx.Node] = {}
    for row in call.given:
        nodes[row] = _add_input(graph, row.name, row.module, metrics[row], call.state)
    for row in call.made:
        made = call.how_made.get(row) or Made(
            "call_method", row.name.rpartition(".")[2], row.inputs, {}
        )
        if row in call.in_units:
            node = _add_in_units(graph, nodes, call, made, row, metrics)
        else:
            node = _add_call(graph, nodes, made, row.module)
        nodes[row] = node
        _describe(node, row.name, row.module, metrics[row])
    _finish(graph, [nodes[row] for row in call.outputs])
    return graph


def graph_of_probes(
    snapshot: ScaleSnapshot, state: State, calls: Iterable[ProbedCall]
) -> ScalesGraph:
    """Return the graph of a captured step: the tensors that its probes have seen."""
    graph = ScalesGraph()
    made_by = {tensor.name: tensor.made_by for call in calls for tensor in call.tensors}
    nodes: dict[str, fx.Node] = {}
    for index, name in enumerate(snapshot.names):
        # A gradient that has not arrived has no numbers.
        rows = (snapshot.forward[index], snapshot.backward[index])
        forward, backward = (Metrics.from_row(row) if row[0] >= 0 else None for row in rows)
        metrics = None if forward is None else _metrics_of(forward, backward)
        op, target = made_by[name] or ("placeholder", name)
        if op in {"placeholder", "get_attr"}:
            node = _add_input(graph, name, snapshot.modules[index], metrics, state)
        else:
            sources = tuple(nodes[one] for one in snapshot.inputs[index] if one in nodes)
            node = graph.create_node(op, target, sources)
            _describe(node, name, snapshot.modules[index], metrics)
        nodes[name] = node
    _finish(graph, [node for node in nodes.values() if not node.users])
    return graph


def _metrics(call: TrackedCall, rows: Iterable[TensorRow]) -> dict[TensorRow, Metrics | None]:
    """Metrics of tensors, with one transfer from each device."""
    pairs = {row: call.rows_of(row) for row in rows}
    taken: dict[int, Tensor] = {
        id(one): one for pair in pairs.values() for one in pair if one is not None
    }
    data: dict[int, Metrics.Data] = {}
    for device in {one.device for one in taken.values()}:
        there = {key: one for key, one in taken.items() if one.device == device}
        numbers = torch.stack([*there.values()]).tolist()
        data |= dict(zip(there, map(Metrics.from_row, numbers), strict=True))
    return {
        row: None if forward is None else _metrics_of(data[id(forward)], data.get(id(backward)))
        for row, (forward, backward) in pairs.items()
    }


def _metrics_of(forward: Metrics.Data, backward: Metrics.Data | None) -> Metrics:
    """Return metrics without the gradient of an empty tensor, which has no numbers."""
    return Metrics(forward, backward if backward is not None and backward.numel else None)


def _add_call(graph: ScalesGraph, nodes: dict[Any, fx.Node], made: Made, module: str) -> fx.Node:
    """Add the node of a call, and of one that returns several tensors the node of one of them."""

    def argument(value: Any) -> Any:
        if isinstance(value, slice):
            return slice(*map(argument, (value.start, value.stop, value.step)))
        return nodes.get(value) if isinstance(value, TensorRow) else value

    key = id(made.kwargs)
    node = nodes.get(key) if made.index is not None else None
    if node is None:
        args, kwargs = (tree_map(argument, each) for each in (made.args, made.kwargs))
        node = graph.create_node(made.op, made.target, args, kwargs)
        if made.index is not None:
            nodes[key] = node
            _describe(node, f"{module}.{made.name}" if module else made.name, module, None)
    if made.index is not None:
        node = graph.call_function(operator.getitem, (node, made.index))
    if (made.index or 0) < len(made.variables):
        rename_node(node, made.variables[made.index or 0])
    return node


def _add_in_units(
    graph: ScalesGraph,
    nodes: dict[Any, fx.Node],
    call: TrackedCall,
    made: Made,
    row: TensorRow,
    metrics: dict[TensorRow, Metrics | None],
) -> fx.Node:
    """Add the nodes of a matmul that ran on scaled operands, and the changes of units around it."""

    def scale(node: fx.Node, log2_factor: int) -> fx.Node:
        return graph.call_function(torch.mul, (node, 2.0**log2_factor))

    matmul = call.in_units[row]
    total, gamma = sum(matmul.log2_units), matmul.log2_gamma
    scaled = dict(nodes)
    for (name, operand), unit in zip(matmul.operands.items(), matmul.log2_units, strict=True):
        scaled[operand] = scale(nodes[operand], -unit)
        # If others read the operand too, only the whole gradient is known.
        backward = unit - total - gamma if call.num_readers(operand) == 1 else None
        _describe(scaled[operand], name, row.module, _scaled(metrics[operand], -unit, backward))
    stored = _add_call(graph, scaled, made, row.module)
    _describe(stored, f"{matmul.name}:stored", row.module, _scaled(metrics[row], -total, -gamma))
    return scale(stored, total)


def _scaled(metrics: Metrics | None, forward: int, backward: int | None) -> Metrics | None:
    """Metrics of a tensor times a power of two, and of its gradient if that has one."""
    if metrics is None:
        return None
    no_gradient = backward is None or metrics.bwd is None
    return Metrics(
        _times(metrics.fwd, forward), None if no_gradient else _times(metrics.bwd, backward)
    )


def _times(data: Any, log2_factor: Any) -> Metrics.Data:
    scaled: dict[str, Any] = {
        name: value if name == "numel" else math.ldexp(value, log2_factor)
        for name, value in vars(data).items()
    }
    return Metrics.Data(**scaled)


def _add_input(
    graph: ScalesGraph, name: str, module: str, metrics: Metrics | None, state: State
) -> fx.Node:
    """Add what a step starts from, named as Dynamo does, which puts its own signs around it."""
    clean = name.removeprefix("input.")
    if name in state.kinds:
        *modules, own = name.split(".")
        clean = "_".join(("self", *(f"modules_{one}" for one in modules), state.kinds[name], own))
    node = graph.placeholder(f"l_{clean}_")
    node.target = f"L_{clean}_"
    _describe(node, name, module, metrics, clean, name in state.trained)
    return node


def _describe(
    node: fx.Node,
    name: str,
    module: str,
    metrics: Metrics | None,
    clean: str = "",
    trained: bool = False,
) -> None:
    node.meta.update(
        {
            METRICS: metrics,
            FLOAT_TENSOR: metrics is not None,
            CLEAN_NAME: clean or node.name.strip("_"),
            TRAINED: trained,
            NAME: name,
            MODULE: module,
        }
    )


def _finish(graph: ScalesGraph, outputs: Iterable[fx.Node]) -> None:
    _describe(graph.output(tuple(outputs)), "output", "", None)

"""Build the stage modules of a program; what crosses a cut is handed from stage to stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.graph.nodes import ELSEWHERE, tensor_name
from lightning_unitscale.pipeline.cuts import assign_stages, is_mark
from lightning_unitscale.pipeline.dataflow import (
    MultiUseParameterConfig,
    StageReads,
    can_have_gradient,
    close,
    find_gradients,
    find_reads,
    is_switch,
    open_switches,
    respect_callers_grad_mode,
)
from lightning_unitscale.pipeline.program import Program, TensorInfo
from lightning_unitscale.pipeline.stage import Passed, StageInfo, StageModule
from lightning_unitscale.profiler.api import COSTS


def build_stages(
    program: Program,
    multi_use: Callable[[str], MultiUseParameterConfig],
    persistent: frozenset[str],
) -> list[StageModule]:
    """Cut a program at its marks.

    Args:
        program: The graph; only the order of tuple items is changed in it.
        multi_use: How several stages use a parameter, by its name.
        persistent: Names of buffers that belong into a state dict.
    """
    graph_module = program.graph_module
    stages, num_stages = assign_stages(graph_module)
    reads = find_reads(graph_module, stages, num_stages, multi_use)
    loss = program.outputs[program.loss] if program.loss is not None else None
    gradients = find_gradients(graph_module, loss)
    opened = open_switches(graph_module.graph)
    # The regions that reach over the edges of the stages.
    edges = [opened[stage_reads.operations[0]] for stage_reads in reads]
    edges.append(opened[graph_module.graph.output_node()])
    built = []
    for index, stage_reads in enumerate(reads):
        is_last = index == num_stages - 1
        graph = _stage_graph(program, stage_reads, edges[index], edges[index + 1], is_last=is_last)
        info = _info(program, stage_reads, gradients, index, num_stages)
        attributes = {
            str(node.target): attrgetter(str(node.target))(graph_module)
            for node in stage_reads.attributes
        }
        built.append(StageModule(attributes, graph, info, persistent))
    return built


def _stage_graph(
    program: Program,
    reads: StageReads,
    entered: Sequence[fx.Node],
    left: Sequence[fx.Node],
    *,
    is_last: bool,
) -> fx.Graph:
    """One stage's operations in a graph of their own.

    Args:
        program: The whole graph.
        reads: What the stage takes, does and hands on.
        entered: Switches of the regions that it begins in.
        left: Switches of the regions that it ends in.
        is_last: Whether it returns the program's outputs.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    received = [graph.placeholder(node.name) for node in reads.received]
    for node in reads.inputs:
        new[node] = graph.node_copy(node)
    for node, value in zip(reads.received, received, strict=True):
        value.meta[ELSEWHERE] = True
        order = _memory_order(_example(node, program))
        if order is not None:
            back = tuple(order.index(dim) for dim in range(len(order)))
            value = graph.call_method("permute", (value, back))
        # Its costs are those of the stage that makes it.
        value.meta.update({**node.meta, ELSEWHERE: True})
        value.meta.pop(COSTS, None)
        new[node] = value
    for node in (*reads.attributes, *reads.recomputed, *entered, *reads.operations):
        if not is_mark(node):
            new[node] = graph.node_copy(node, new.__getitem__)
    for node in reads.recomputed:
        new[node].meta[ELSEWHERE] = True
    for switch in reversed(left):
        close(graph, new[switch])
    outputs: Any
    if is_last:
        outputs = fx.map_arg(program.outputs, new.__getitem__)
    else:
        outputs = tuple(_sent(graph, new[node], _example(node, program)) for node in reads.sent)
    graph.output(outputs)
    respect_callers_grad_mode(graph)
    graph.lint()
    return graph


def _sent(graph: fx.Graph, value: fx.Node, example: Tensor) -> fx.Node:
    """A copy: the engine cuts what is sent out of the graph, and refuses to do so to views."""
    order = _memory_order(example)
    if order is not None:
        value = graph.call_method("permute", (value, order))
    options: dict[str, Any] = {"memory_format": torch.contiguous_format}
    return graph.call_method("clone", (value,), options)


def _info(
    program: Program,
    reads: StageReads,
    gradients: frozenset[fx.Node],
    index: int,
    num_stages: int,
) -> StageInfo:
    graph_module = program.graph_module
    names = {str(node.target) for node in reads.attributes}
    parameters = dict(graph_module.named_parameters(remove_duplicate=False))
    buffers = dict(graph_module.named_buffers(remove_duplicate=False))
    placeholders = list(graph_module.graph.find_nodes(op="placeholder"))
    inputs = tuple(map(placeholders.index, reads.inputs))

    def passed(node: fx.Node) -> Passed:
        example = _example(node, program)
        order = _memory_order(example) or range(example.ndim)
        sent = torch.empty([example.shape[d] for d in order], dtype=example.dtype, device="meta")
        feeds_loss = can_have_gradient(example) and node in gradients
        return Passed(tensor_name(node), TensorInfo.of(sent), feeds_loss)

    return StageInfo(
        index=index,
        num_stages=num_stages,
        received=tuple(map(passed, reads.received)),
        inputs=inputs,
        input_names=tuple(program.inputs[position].name for position in inputs),
        sent=tuple(map(passed, reads.sent)),
        parameters=tuple(sorted(names & parameters.keys())),
        buffers=tuple(sorted(names & buffers.keys())),
        recomputed=tuple(map(tensor_name, reads.recomputed)),
        num_operations=sum(not is_switch(node) for node in reads.operations),
        separable=_is_separable(program, reads, gradients, is_last=index == num_stages - 1),
    )


def _is_separable(
    program: Program, reads: StageReads, gradients: frozenset[fx.Node], *, is_last: bool
) -> bool:
    """Whether each parameter's gradient passes through an operation on what was received."""
    downstream = set(reads.received) & gradients
    free = set(reads.attributes) & gradients
    for node in filter(gradients.__contains__, reads.operations):
        if not downstream.isdisjoint(node.all_input_nodes):
            downstream.add(node)
        elif not free.isdisjoint(node.all_input_nodes):
            free.add(node)
    outputs = program.graph_module.graph.output_node().all_input_nodes
    return free.isdisjoint(outputs if is_last else reads.sent)


def _example(node: fx.Node, program: Program) -> Tensor:
    if node.op == "get_attr":
        return program.graph_module.get_parameter(str(node.target))
    example: Tensor = node.meta["example_value"]
    return example


def _memory_order(example: Tensor) -> tuple[int, ...] | None:
    """The dimensions in the order of memory, for a dense tensor of which that is not the own one.

    A transposed tensor arrives transposed: products of another layout have other last bits.
    """
    if example.is_contiguous():
        return None
    stride = TensorInfo.of(example).stride
    order = tuple(sorted(range(example.ndim), key=lambda d: -stride[d]))
    dense = torch.empty(example.shape, device="meta").permute(order).contiguous()
    return order if dense.stride() == tuple(stride[d] for d in order) else None

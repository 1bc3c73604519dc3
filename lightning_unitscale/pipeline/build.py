"""Build the stage modules of a program; what crosses a cut is handed from stage to stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.graph.nodes import ELSEWHERE, tensor_name
from lightning_unitscale.pipeline.cuts import assign_stages, is_mark
from lightning_unitscale.pipeline.dataflow import (
    MultiUseParameterConfig,
    StageReads,
    find_gradients,
    find_reads,
)
from lightning_unitscale.pipeline.modes import (
    Modes,
    enter,
    is_switch,
    leave,
    respect_outer_grad_mode,
)
from lightning_unitscale.pipeline.program import Program, TensorInfo
from lightning_unitscale.pipeline.stage import Passed, StageInfo, StageModule, make_stage
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
    stages, num_stages = assign_stages(program.graph_module)
    reads = find_reads(program.graph_module, stages, num_stages, multi_use)
    outputs = program.outputs
    loss = outputs[program.loss] if program.loss is not None else None
    gradients = find_gradients(program.graph_module, loss)
    modes = _modes_at_starts(program.graph_module.graph, stages)
    return [
        _Builder(program, index, reads, gradients, modes, persistent).build()
        for index in range(num_stages)
    ]


def _modes_at_starts(graph: fx.Graph, stages: Mapping[fx.Node, int]) -> list[Modes]:
    """The modes at the start of each stage, and those at the end of the last."""
    starts: list[Modes] = []
    modes = Modes()
    for node in graph.nodes:
        while node in stages and len(starts) <= stages[node]:
            starts.append(modes)
        modes = modes.after(node)
    return [*starts, modes]


class _Builder:
    """Copies one stage's operations into a graph of their own."""

    def __init__(
        self,
        program: Program,
        index: int,
        reads: list[StageReads],
        gradients: frozenset[fx.Node],
        modes: list[Modes],
        persistent: frozenset[str],
    ) -> None:
        self._program = program
        self._index = index
        self._num_stages = len(reads)
        self._reads = reads[index]
        self._gradients = gradients
        self._before, self._after = modes[index], modes[index + 1]
        self._persistent = persistent
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}

    def build(self) -> StageModule:
        reads = self._reads
        self._take_received()
        for node in (*reads.inputs, *reads.attributes, *reads.recomputed):
            self._copy(node)
        for node in reads.recomputed:
            self._new[node].meta[ELSEWHERE] = True
        self._new.update(enter(self._graph, self._before))
        for node in reads.operations:
            self._copy(node)
        respect_outer_grad_mode(self._graph)
        # The regions that are open at the end, entered here or above.
        leave(self._graph, self._after, self._new)
        if self._index == self._num_stages - 1:
            self._graph.output(fx.map_arg(self._program.outputs, self._new.__getitem__))
        else:
            self._graph.output(tuple(self._send(node) for node in reads.sent))
        self._graph.lint()
        source = self._program.graph_module
        return make_stage(source, self._graph, self._info(), self._persistent)

    def _copy(self, node: fx.Node) -> None:
        if not is_mark(node):
            self._new[node] = self._graph.node_copy(node, self._new.__getitem__)

    def _take_received(self) -> None:
        taken = [(node, self._graph.placeholder(node.name)) for node in self._reads.received]
        for node in self._reads.inputs:
            self._new[node] = self._graph.placeholder(str(node.target))
            self._new[node].meta.update(node.meta)
        self._reads.inputs = [node for node in self._reads.inputs if node not in self._new]
        for node, value in taken:
            value.meta[ELSEWHERE] = True
            order = _memory_order(_example(node, self._program))
            if order is not None:
                back = tuple(order.index(dim) for dim in range(len(order)))
                value = self._graph.call_method("permute", (value, back))
            value.meta.update(node.meta)
            value.meta[ELSEWHERE] = True
            # Its costs are those of the stage that makes it.
            value.meta.pop(COSTS, None)
            self._new[node] = value

    def _send(self, node: fx.Node) -> fx.Node:
        """A copy: the engine cuts what is sent out of the graph, and refuses to do so to views."""
        value = self._new[node]
        order = _memory_order(_example(node, self._program))
        if order is not None:
            value = self._graph.call_method("permute", (value, order))
        options: dict[str, Any] = {"memory_format": torch.contiguous_format}
        return self._graph.call_method("clone", (value,), options)

    def _info(self) -> StageInfo:
        graph_module = self._program.graph_module
        reads = self._reads
        parameters = dict(graph_module.named_parameters(remove_duplicate=False))
        read = {str(node.target) for node in reads.attributes}
        buffers = {name for name, _ in graph_module.named_buffers(remove_duplicate=False)}
        positions = {
            node: i for i, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))
        }
        inputs = [node for node in positions if node in self._new]
        return StageInfo(
            index=self._index,
            num_stages=self._num_stages,
            received=tuple(map(self._passed, reads.received)),
            inputs=tuple(positions[node] for node in inputs),
            input_names=tuple(self._program.inputs[positions[node]].name for node in inputs),
            sent=tuple(map(self._passed, reads.sent)),
            parameters=tuple(sorted(read & parameters.keys())),
            buffers=tuple(sorted(read & buffers)),
            recomputed=tuple(map(tensor_name, reads.recomputed)),
            num_operations=sum(not is_switch(node) for node in reads.operations),
        )

    def _passed(self, node: fx.Node) -> Passed:
        example = _example(node, self._program)
        order = _memory_order(example)
        shape = tuple(example.shape) if order is None else tuple(example.shape[i] for i in order)
        sent = torch.empty(shape, dtype=example.dtype, device="meta")
        floating = example.is_floating_point() or example.is_complex()
        return Passed(
            tensor_name(node),
            TensorInfo.of(sent),
            floating and node in self._gradients,
        )


def _example(node: fx.Node, program: Program) -> Tensor:
    if node.op == "get_attr":
        return dict(program.graph_module.named_parameters(remove_duplicate=False))[str(node.target)]
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

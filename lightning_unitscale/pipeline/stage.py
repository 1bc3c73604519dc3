"""Build the stages of a program as graph modules with their own parameters."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from typing_extensions import override

from lightning_unitscale.capture.copy_graphs import compiled_forward
from lightning_unitscale.capture.executors import execute_with
from lightning_unitscale.capture.graph_nodes import ELSEWHERE, tensor_name
from lightning_unitscale.memory.profile_step import COSTS
from lightning_unitscale.pipeline import dataflow
from lightning_unitscale.pipeline.cuts import assign_stages, is_mark
from lightning_unitscale.pipeline.program import Program, TensorInfo


@dataclass(frozen=True)
class Passed:
    """A tensor that one stage sends to the next."""

    name: str  # the module path and operation that made it
    tensor: TensorInfo  # its form when it is sent: contiguous, with its dimensions in memory order
    feeds_loss: bool  # true if it gets a gradient from the loss


@dataclass(frozen=True)
class StageInfo:
    """Inputs, parameters and outputs of a stage.

    Attributes:
        index: Position of the stage in the pipeline.
        num_stages: Stages of the pipeline.
        received: Tensors from the previous stage, in the order of the stage's first arguments.
        inputs: Indices of the call's arguments that it reads, in the order of its last arguments.
        input_names: Their names.
        sent: Tensors for the next stage. The last stage returns the module's outputs instead.
        parameters: Names of its parameters.
        buffers: Names of its buffers.
        written: Names of the buffers that it changes.
        recomputed: Values that it recomputes instead of receiving them.
        num_operations: Number of its own operations, without recomputed ones.
    """

    index: int
    num_stages: int
    received: tuple[Passed, ...]
    inputs: tuple[int, ...]
    input_names: tuple[str, ...]
    sent: tuple[Passed, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    written: tuple[str, ...]
    recomputed: tuple[str, ...]
    num_operations: int

    @property
    def is_last(self) -> bool:
        """Check whether it returns the module's outputs."""
        return self.index == self.num_stages - 1

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that it sends forward for each microbatch."""
        return sum(passed.tensor.num_bytes for passed in self.sent)


class StageModule(fx.GraphModule):
    """The graph of a stage: ``stage(*received, *inputs)`` returns a flat tuple.

    Its parameters are the original module's own objects, until it is pickled, copied or moved.
    Pickling keeps the graph as data, so it can be sent to another process.

    Args:
        attributes: Parameters, buffers and constants of the graph, by name.
        graph: The stage's operations.
        info: Their inputs and outputs.
        persistent: Names of buffers that belong in a state dict.
    """

    def __init__(
        self,
        attributes: Mapping[str, Any],
        graph: fx.Graph,
        info: StageInfo,
        persistent: Container[str],
    ) -> None:
        super().__init__(dict(attributes), graph, "StageModule")
        self.info = info
        for path, buffer in list(self.named_buffers(remove_duplicate=False)):
            owner, _, name = path.rpartition(".")
            self.get_submodule(owner).register_buffer(name, buffer, path in persistent)
        # Dynamo's checkpoint regions only mark operations. From here on they run as checkpoints.
        execute_with("eager", self, ())

    def on_device(self, device: torch.device | str) -> StageModule:
        """Move this stage to another device in place, with the devices that its operations name."""
        device = torch.device(device)
        for graph_module in (self, *self.children()):
            if isinstance(graph_module, fx.GraphModule):
                retarget(graph_module.graph, device)
                compiled_forward(graph_module)
        self.to(device)
        return self

    @override
    def __reduce__(self) -> Any:
        return _restored, (_as_data(self), self.info, set(self.state_dict()), self.training)

    def __deepcopy__(self, memo: Any) -> StageModule:
        restore, data = self.__reduce__()
        memo[id(self)] = stage = restore(*copy.deepcopy(data, memo))
        return stage


def retarget(graph: fx.Graph, device: torch.device) -> None:
    """Change the device that operations (``arange``, ``zeros``, ``rand``, ``to``) name."""
    for node in graph.nodes:
        node.args, node.kwargs = map_aggregate(
            (node.args, node.kwargs),
            lambda value: device if isinstance(value, torch.device) else value,
        )
        if isinstance(node.kwargs.get("device"), str):
            node.kwargs = {**node.kwargs, "device": str(device)}
        if node.op != "call_method":
            continue
        if node.target in {"cpu", "cuda"}:
            node.target, node.args, node.kwargs = "to", (node.args[0], device), {}
        elif node.target == "to" and any(isinstance(value, str) for value in node.args[1:2]):
            node.args = (node.args[0], device, *node.args[2:])


class _Reference(str):
    """The name of a node, in the arguments of another."""


# The operations of a graph in order, and its attributes. Nested graphs have the same form.
_Data = tuple[list[tuple[Any, ...]], dict[str, Any]]


def _as_data(graph_module: fx.GraphModule) -> _Data:
    operations, attributes = [], {}
    for node in graph_module.graph.nodes:
        arguments = map_aggregate(
            (node.args, node.kwargs),
            lambda value: _Reference(value.name) if isinstance(value, fx.Node) else value,
        )
        operations.append((node.op, node.target, *arguments, node.name))
        if node.op == "get_attr":
            value = attrgetter(node.target)(graph_module)
            is_graph = isinstance(value, fx.GraphModule)
            attributes[node.target] = _as_data(value) if is_graph else value
    return operations, attributes


def _graph_of(data: _Data) -> tuple[fx.Graph, dict[str, Any]]:
    operations, attributes = data
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    for op, target, *arguments, name in operations:
        args, kwargs = map_aggregate(
            arguments, lambda value: nodes[value] if isinstance(value, _Reference) else value
        )
        nodes[name] = graph.create_node(op, target, args, kwargs, name)
    for name, value in attributes.items():
        if isinstance(value, tuple):
            body, of_body = _graph_of(value)
            attributes[name] = fx.GraphModule(of_body, body)
    return graph, attributes


def _restored(data: _Data, info: StageInfo, persistent: set[str], training: bool) -> StageModule:
    graph, attributes = _graph_of(data)
    stage = StageModule(attributes, graph, info, persistent)
    stage.train(training)
    return stage


def build_stages(program: Program, persistent: Container[str]) -> list[StageModule]:
    """Cut a program at its marks."""
    graph_module = program.graph_module
    stages, num_stages = assign_stages(graph_module)
    reads = dataflow.find_reads(graph_module, stages, num_stages)
    loss = program.outputs[program.loss] if program.loss is not None else None
    gradients = dataflow.find_gradients(graph_module, loss)
    opened = dataflow.open_switches(graph_module.graph)
    # The regions that extend over the edges of the stages.
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
    reads: dataflow.StageReads,
    entered: Sequence[fx.Node],
    left: Sequence[fx.Node],
    *,
    is_last: bool,
) -> fx.Graph:
    """Copy a stage's operations into a new graph, and enter regions that begin before it."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    received = [graph.placeholder(node.name) for node in reads.received]
    for node in reads.inputs:
        new[node] = graph.node_copy(node)
    for node, value in zip(reads.received, received, strict=True):
        value.meta[ELSEWHERE] = True
        order = _memory_order(node.meta["example_value"])
        if order is not None:
            back = tuple(order.index(dim) for dim in range(len(order)))
            value = graph.call_method("permute", (value, back))
        # Its costs belong to the stage that makes it.
        value.meta.update({**node.meta, ELSEWHERE: True})
        value.meta.pop(COSTS, None)
        new[node] = value
    for node in (*reads.attributes, *reads.recomputed, *entered, *reads.operations):
        if not is_mark(node):
            new[node] = graph.node_copy(node, new.__getitem__)
    for node in reads.recomputed:
        new[node].meta[ELSEWHERE] = True
    for switch in reversed(left):
        dataflow.close(graph, new[switch])
    outputs: Any
    if is_last:
        outputs = fx.map_arg(program.outputs, new.__getitem__)
    else:
        outputs = tuple(_sent(graph, new[node], node.meta["example_value"]) for node in reads.sent)
    graph.output(outputs)
    dataflow.respect_callers_grad_mode(graph)
    graph.lint()
    return graph


def _sent(graph: fx.Graph, value: fx.Node, example: Tensor) -> fx.Node:
    """Copy a sent tensor. The engine detaches it in place, which autograd refuses for views."""
    order = _memory_order(example)
    if order is not None:
        value = graph.call_method("permute", (value, order))
    options: dict[str, Any] = {"memory_format": torch.contiguous_format}
    return graph.call_method("clone", (value,), options)


def _info(
    program: Program,
    reads: dataflow.StageReads,
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
        example = node.meta["example_value"]
        order = _memory_order(example) or range(example.ndim)
        sent = torch.empty([example.shape[d] for d in order], dtype=example.dtype, device="meta")
        feeds_loss = dataflow.can_have_gradient(example) and node in gradients
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
        written=tuple(sorted(reads.written & buffers.keys())),
        recomputed=tuple(map(tensor_name, reads.recomputed)),
        num_operations=sum(not dataflow.is_switch(node) for node in reads.operations),
    )


def _memory_order(example: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a dense, transposed tensor in memory order."""
    # A transposed tensor stays transposed, because matmuls of another layout have other last bits.
    if example.is_contiguous():
        return None
    stride = tuple(map(int, example.stride()))
    order = tuple(sorted(range(example.ndim), key=lambda d: -stride[d]))
    dense = torch.empty(example.shape, device="meta").permute(order).contiguous()
    return order if dense.stride() == tuple(stride[d] for d in order) else None

"""One stage: a graph module with the parameters that it owns, under their original names."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from typing_extensions import override

from lightning_unitscale.dynamo.capture import execute_with
from lightning_unitscale.pipeline.program import TensorInfo, add_attribute


@dataclass(frozen=True)
class Passed:
    """A tensor that one stage hands to the next.

    Attributes:
        name: Module path and operation that made it.
        tensor: As it is sent: contiguous, its dimensions in the order of its memory.
        feeds_loss: Whether the loss's gradient flows back to it.
    """

    name: str
    tensor: TensorInfo
    feeds_loss: bool


@dataclass(frozen=True)
class StageInfo:
    """Inputs, parameters and outputs of a stage.

    Attributes:
        index: Its position in the pipeline.
        num_stages: Stages of the pipeline.
        received: Tensors from the stage before, in the order of the stage's first arguments.
        inputs: Positions of the call's arguments that it reads, in the order of its last arguments.
        input_names: Their names.
        sent: Tensors for the next stage; the last stage returns the module's outputs instead.
        parameters: Names of its parameters.
        buffers: Names of its buffers.
        recomputed: Values that it makes again rather than receive them.
        num_operations: Operations of its own.
        separable: Whether gradients of inputs and of weights may be computed one after the other:
            every gradient of a parameter passes through an operation on a received tensor.
    """

    index: int
    num_stages: int
    received: tuple[Passed, ...]
    inputs: tuple[int, ...]
    input_names: tuple[str, ...]
    sent: tuple[Passed, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    recomputed: tuple[str, ...]
    num_operations: int
    separable: bool

    @property
    def is_first(self) -> bool:
        """Whether no stage is before it."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns the module's outputs."""
        return self.index == self.num_stages - 1

    @property
    def sent_bytes(self) -> int:
        """Bytes that it sends forward for each microbatch."""
        return sum(passed.tensor.num_bytes for passed in self.sent)


class StageModule(fx.GraphModule):
    """A stage's graph: ``stage(*received, *inputs)`` returns a flat tuple.

    Its parameters are those of the original module, the same objects, until it is pickled, copied
    or moved. Pickling keeps the graph as data, so that it can be sent to another process.

    Args:
        attributes: What the graph reads, by name.
        graph: The stage's operations.
        info: What they take and hand on.
        persistent: Names of buffers that belong into a state dict.
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
        for name, buffer in list(self.named_buffers(remove_duplicate=False)):
            add_attribute(self, name, buffer, persistent=name in persistent)
        # Dynamo's checkpoint regions only tag; from here on they are run.
        execute_with("eager", self, ())

    def on_device(self, device: torch.device | str) -> StageModule:
        """This stage on another device, operations that name a device included. In place."""
        device = torch.device(device)
        for graph_module in (self, *self.children()):
            if isinstance(graph_module, fx.GraphModule):
                retarget(graph_module.graph, device)
                graph_module.recompile()
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
    """Let operations that name a device (``arange``, ``zeros``, ``rand``, ``to``) name this one."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in graph.nodes:
        node.args = map_aggregate(node.args, moved)
        node.kwargs = map_aggregate(node.kwargs, moved)
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


# The operations of a graph in their order, and what they read; nested graphs in the same form.
_Data = tuple[list[tuple[Any, ...]], dict[str, Any]]


def _as_data(graph_module: fx.GraphModule) -> _Data:
    def referred(value: Any) -> Any:
        return _Reference(value.name) if isinstance(value, fx.Node) else value

    operations, attributes = [], {}
    for node in graph_module.graph.nodes:
        args, kwargs = map_aggregate(node.args, referred), map_aggregate(node.kwargs, referred)
        operations.append((node.op, node.target, tuple(args), dict(kwargs), node.name))
        if node.op == "get_attr":
            value = attrgetter(node.target)(graph_module)
            is_graph = isinstance(value, fx.GraphModule)
            attributes[node.target] = _as_data(value) if is_graph else value
    return operations, attributes


def _graph_of(data: _Data) -> tuple[fx.Graph, dict[str, Any]]:
    operations, attributes = data
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def resolved(value: Any) -> Any:
        return nodes[value] if isinstance(value, _Reference) else value

    for op, target, args, kwargs, name in operations:
        args, kwargs = map_aggregate(args, resolved), map_aggregate(kwargs, resolved)
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

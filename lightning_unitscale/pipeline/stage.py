"""One stage: a graph module with the parameters that it owns, under their original names."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_unitscale.dynamo.capture import execute_with
from lightning_unitscale.pipeline.modes import outer_grad_mode
from lightning_unitscale.pipeline.program import TensorInfo, add_attribute

_INFO = "stage_info"


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
    """

    def __init__(
        self, root: Any, graph: fx.Graph, info: StageInfo, class_name: str = "StageModule"
    ) -> None:
        super().__init__(root, graph, class_name)
        self.meta[_INFO] = info

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the stage; the caller's gradient mode is the same afterwards."""
        with outer_grad_mode():
            return super().__call__(*args, **kwargs)

    def on_device(self, device: torch.device | str) -> StageModule:
        """This stage on another device, operations that name a device included. In place."""
        device = torch.device(device)
        retarget(self.graph, device)
        for child in self.children():
            if isinstance(child, fx.GraphModule):
                retarget(child.graph, device)
                child.recompile()
        self.recompile()
        self.to(device)
        return self

    @override
    def __reduce__(self) -> Any:
        return _restore, (_Payload.of(self),)

    def __deepcopy__(self, memo: Any) -> StageModule:
        copy = _restore(_Payload.of(self, copy=True))
        memo[id(self)] = copy
        return copy


def stage_info(stage: StageModule) -> StageInfo:
    """Inputs, parameters and outputs of a stage."""
    info: StageInfo = stage.meta[_INFO]
    return info


def make_stage(
    source: nn.Module, graph: fx.Graph, info: StageInfo, persistent: frozenset[str]
) -> StageModule:
    """A stage whose attributes are those of ``source`` that the graph reads.

    Args:
        source: Has the parameters, buffers and nested graphs under the graph's names.
        graph: The stage's operations.
        info: What they take and hand on.
        persistent: Names of buffers that belong into a state dict.
    """
    root = nn.Module()
    for node in graph.find_nodes(op="get_attr"):
        fqn = str(node.target)
        value = operator.attrgetter(fqn)(source)
        add_attribute(root, fqn, value, persistent=fqn in persistent)
    return _finish(root, graph, info)


def retarget(graph: fx.Graph, device: torch.device) -> None:
    """Let operations that name a device (``arange``, ``zeros``, ``rand``, ``to``) name this one."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
        if isinstance(node.kwargs.get("device"), str):
            node.kwargs = {**node.kwargs, "device": str(device)}
        if node.op != "call_method":
            continue
        if node.target in {"cpu", "cuda"}:
            node.target, node.args, node.kwargs = "to", (node.args[0], device), {}
        elif node.target == "to" and any(isinstance(value, str) for value in node.args[1:2]):
            node.args = (node.args[0], device, *node.args[2:])


def _finish(root: nn.Module, graph: fx.Graph, info: StageInfo) -> StageModule:
    stage = StageModule(root, graph, info)
    # ``GraphModule`` takes over what the graph reads, and buffers only as it would register them.
    for fqn, buffer in root.named_buffers(remove_duplicate=False):
        owner = root.get_submodule(fqn.rpartition(".")[0])
        kept = fqn.rpartition(".")[2] not in owner._non_persistent_buffers_set
        add_attribute(stage, fqn, buffer, persistent=kept)
    # Dynamo's checkpoint regions only tag; from here on they are run.
    execute_with("eager", stage, ())
    return stage


@dataclass
class _Reference:
    """Stands for a node in a pickled argument."""

    name: str


@dataclass
class _Payload:
    """A stage as plain data: the operations in their order, and what they read."""

    nodes: list[tuple[str, str, Any, Any, Any]]
    attributes: dict[str, tuple[Any, bool]]
    info: StageInfo | None
    training: bool

    @classmethod
    def of(cls, module: fx.GraphModule, *, copy: bool = False) -> _Payload:
        nodes = [
            (node.name, node.op, node.target, _referred(node.args), _referred(node.kwargs))
            for node in module.graph.nodes
        ]
        attributes: dict[str, tuple[Any, bool]] = {}
        for node in module.graph.find_nodes(op="get_attr"):
            fqn = str(node.target)
            owner = module.get_submodule(fqn.rpartition(".")[0])
            name = fqn.rpartition(".")[2]
            value = getattr(owner, name)
            persistent = name not in owner._non_persistent_buffers_set
            if isinstance(value, fx.GraphModule):
                value = cls.of(value, copy=copy)
            elif copy and isinstance(value, nn.Parameter):
                value = nn.Parameter(value.detach().clone(), value.requires_grad)
            elif copy and isinstance(value, Tensor):
                value = value.clone()
            attributes[fqn] = (value, persistent)
        return cls(nodes, attributes, module.meta.get(_INFO), module.training)


def _referred(value: Any) -> Any:
    return tree_map(
        lambda leaf: _Reference(leaf.name) if isinstance(leaf, fx.Node) else leaf, value
    )


def _restore(payload: _Payload) -> Any:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def resolved(value: Any) -> Any:
        return tree_map(
            lambda leaf: nodes[leaf.name] if isinstance(leaf, _Reference) else leaf,
            value,
            is_leaf=lambda leaf: isinstance(leaf, _Reference),
        )

    for name, op, target, args, kwargs in payload.nodes:
        nodes[name] = graph.create_node(op, target, resolved(args), resolved(kwargs), name)
    root = nn.Module()
    for fqn, (value, persistent) in payload.attributes.items():
        attribute = _restore(value) if isinstance(value, _Payload) else value
        add_attribute(root, fqn, attribute, persistent=persistent)
    if payload.info is None:
        module = fx.GraphModule(root, graph)
    else:
        module = _finish(root, graph, payload.info)
    return module.train(payload.training)

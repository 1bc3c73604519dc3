"""What each stage reads: from the stage before it, from the call's arguments, from the module."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from lightning_unitscale.graph.aliasing import memory_roots, written_arguments
from lightning_unitscale.graph.nodes import MODULE, op_name, tensor_name
from lightning_unitscale.pipeline.modes import is_switch
from lightning_unitscale.pipeline.recompute import Recomputable


class MultiUseParameterConfig(enum.Enum):
    """What becomes of a parameter that several stages use.

    ``REPLICATE``: each of them has it, and their gradients are summed before the optimizer's step.
    ``TRANSMIT``: the first of them has it and sends it along with its other results, in every
    microbatch; the gradients come back the same way.
    """

    TRANSMIT = "transmit"
    REPLICATE = "replicate"


@dataclass
class StageReads:
    """What one stage reads and hands on; nodes of the whole graph, in its order.

    Attributes:
        received: Values that the stage before hands over, those that it only passes on included.
        sent: Values that it hands to the next stage.
        inputs: Arguments of the call.
        attributes: Parameters, buffers, constants and nested graphs.
        recomputed: Cheap operations of earlier stages that it runs again.
        operations: Its own operations.
    """

    received: list[fx.Node] = field(default_factory=list)
    sent: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    attributes: list[fx.Node] = field(default_factory=list)
    recomputed: list[fx.Node] = field(default_factory=list)
    operations: list[fx.Node] = field(default_factory=list)


def find_reads(
    graph_module: fx.GraphModule,
    stages: Mapping[fx.Node, int],
    num_stages: int,
    multi_use: Callable[[str], MultiUseParameterConfig],
) -> list[StageReads]:
    """What every stage reads, values for later stages relayed through those in between.

    Args:
        graph_module: The whole graph.
        stages: Stage of each operation.
        num_stages: How many.
        multi_use: What becomes of a parameter, by its name, if several stages use it.

    Raises:
        ValueError: If a buffer is written by one stage and used by another.
        RuntimeError: If a value that is no tensor would have to be handed on.
    """
    graph = graph_module.graph
    order = {node: place for place, node in enumerate(graph.nodes)}
    finder = _Finder(graph_module, stages, num_stages, multi_use)
    for node in graph.nodes:
        if node.op == "output":
            finder.read_by(node, num_stages - 1)
        elif node in stages:
            finder.reads[stages[node]].operations.append(node)
            finder.read_by(node, stages[node])
    _refuse_shared_writes(graph_module, stages, finder.reads)
    for value, (first, last) in finder.spans().items():
        for index in range(first, last):
            finder.reads[index].sent.append(value)
            finder.reads[index + 1].received.append(value)
    for one in finder.reads:
        for nodes in (one.received, one.sent, one.inputs, one.attributes, one.recomputed):
            nodes.sort(key=order.__getitem__)
    return finder.reads


class _Finder:
    def __init__(
        self,
        graph_module: fx.GraphModule,
        stages: Mapping[fx.Node, int],
        num_stages: int,
        multi_use: Callable[[str], MultiUseParameterConfig],
    ) -> None:
        self.reads = [StageReads() for _ in range(num_stages)]
        self._stages = stages
        self._recomputable = Recomputable(graph_module)
        self._crossing: dict[fx.Node, set[int]] = {}
        parameters = dict(graph_module.named_parameters(remove_duplicate=False))
        self._home: dict[fx.Node, int] = {}
        for node in graph_module.graph.find_nodes(op="get_attr"):
            fqn = str(node.target)
            users = [stages[user] for user in node.users if user in stages]
            if fqn in parameters and multi_use(fqn) is MultiUseParameterConfig.TRANSMIT and users:
                self._home[node] = min(users)

    def read_by(self, reader: fx.Node, stage: int) -> None:
        """Note what ``reader`` needs in its stage."""
        if is_switch(reader):
            return  # a region is entered anew in every stage that it reaches into
        for node in reader.all_input_nodes:
            self._need(node, stage)

    def spans(self) -> dict[fx.Node, tuple[int, int]]:
        """First and last stage of each value that is handed on."""
        return {node: (self._made_in(node), max(users)) for node, users in self._crossing.items()}

    def _made_in(self, node: fx.Node) -> int:
        return self._home.get(node, self._stages.get(node, 0))

    def _need(self, node: fx.Node, stage: int) -> None:
        reads = self.reads[stage]
        if node.op == "placeholder":
            _add(reads.inputs, node)
        elif node.op == "get_attr" and self._home.get(node, stage) == stage:
            _add(reads.attributes, node)
        elif self._made_in(node) == stage:
            return
        elif node.op != "get_attr" and self._recomputable(node):
            if node not in reads.recomputed:
                reads.recomputed.append(node)
                self.read_by(node, stage)
        else:
            if node.op == "get_attr":
                _add(self.reads[self._home[node]].attributes, node)
            elif not isinstance(node.meta.get("example_value"), Tensor):
                raise RuntimeError(
                    f"{tensor_name(node)} of {node.meta.get(MODULE)!r} is no tensor "
                    f"({op_name(node)}) and is needed after a cut; expected tensors there; move "
                    "the cut."
                )
            self._crossing.setdefault(node, set()).add(stage)


def _add(nodes: list[fx.Node], node: fx.Node) -> None:
    if node not in nodes:
        nodes.append(node)


def _refuse_shared_writes(
    graph_module: fx.GraphModule, stages: Mapping[fx.Node, int], reads: list[StageReads]
) -> None:
    roots = memory_roots(graph_module.graph)
    written = {}
    for node in graph_module.graph.nodes:
        for target in written_arguments(node):
            if roots[target].op == "get_attr" and node in stages:
                written[str(roots[target].target)] = stages[node]
    for fqn, stage in written.items():
        users = [i for i, one in enumerate(reads) if fqn in {str(n.target) for n in one.attributes}]
        if users != [stage]:
            raise ValueError(
                f"buffer {fqn}: stage {stage} writes into it and stages {users} use it; expected "
                "one stage; move the cuts so that its uses lie together."
            )


@dataclass(frozen=True)
class Gradients:
    """Which nodes a gradient flows back to.

    Attributes:
        of_outputs: From any result.
        of_loss: From the loss; the same where no loss is known.
    """

    of_outputs: frozenset[fx.Node]
    of_loss: frozenset[fx.Node]


def find_gradients(graph_module: fx.GraphModule, loss: fx.Node | None) -> Gradients:
    """Which nodes a gradient flows back to. In doubt it does."""
    graph = graph_module.graph
    returned = [one for one in graph.output_node().all_input_nodes if _differentiable(one)]
    outputs = _reached(graph_module, returned)
    return Gradients(outputs, outputs if loss is None else _reached(graph_module, [loss]))


def _reached(graph_module: fx.GraphModule, targets: list[fx.Node]) -> frozenset[fx.Node]:
    graph = graph_module.graph
    written: dict[fx.Node, list[fx.Node]] = {}
    roots = memory_roots(graph)
    for node in graph.nodes:
        for target in written_arguments(node):
            written.setdefault(roots[target], []).append(node)
    trainable = {name for name, one in graph_module.named_parameters(remove_duplicate=False)
                 if one.requires_grad}  # fmt: skip
    reached = set(targets)
    count = -1
    # A second round where a tensor is written into after it was made: the writer comes later.
    while count != len(reached):
        count = len(reached)
        for node in reversed(list(graph.nodes)):
            if node not in reached and not any(user in reached for user in node.users):
                continue
            if node.op == "get_attr":
                if str(node.target) in trainable:
                    reached.add(node)
                continue
            writers = written.get(roots[node], []) if node.op != "placeholder" else []
            if node in reached or writers or _differentiable(node):
                reached.add(node)
                reached.update(writers)
    return frozenset(reached)


def _differentiable(node: fx.Node) -> bool:
    if node.op == "placeholder" and "example_value" not in node.meta:
        return False
    tensors = [one for one in tree_flatten(node.meta.get("example_value"))[0]
               if isinstance(one, Tensor)]  # fmt: skip
    return not tensors or any(one.requires_grad for one in tensors)

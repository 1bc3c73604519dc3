"""The inputs of each stage: from the stage before it, the call's arguments and the module.

A later stage recomputes masks, positions and rotary tables rather than receive them: they depend on
nothing but the call's arguments and constant buffers, and the operations cost next to nothing and
give the same bits again.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx

from lightning_unitscale.dynamo.graphs import autocast_dtypes
from lightning_unitscale.graph.aliasing import memory_roots, written_arguments
from lightning_unitscale.graph.nodes import MODULE, TRANSFORMED, op_name, tensor_name, tensors_in
from lightning_unitscale.pipeline.modes import Modes, is_switch


class MultiUseParameterConfig(enum.Enum):
    """How several stages use one parameter.

    ``REPLICATE``: each of them has it, and their gradients are summed before the optimizer's step.
    ``TRANSMIT``: the first of them has it and sends it along with its other results, in every
    microbatch; the gradients come back the same way.
    """

    TRANSMIT = "transmit"
    REPLICATE = "replicate"


@dataclass
class StageReads:
    """Inputs and outputs of one stage; nodes of the whole graph, in its order.

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
    """The inputs of every stage; values for later stages are relayed through those in between.

    Args:
        graph_module: The whole graph.
        stages: Stage of each operation.
        num_stages: How many.
        multi_use: How several stages use a parameter, by its name.

    Raises:
        ValueError: If a buffer is written by one stage and used by another.
        RuntimeError: If a value that is no tensor would have to be handed on.
    """
    graph = graph_module.graph
    order = {node: position for position, node in enumerate(graph.nodes)}
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
    for stage_reads in finder.reads:
        for nodes in (
            stage_reads.received,
            stage_reads.sent,
            stage_reads.inputs,
            stage_reads.attributes,
            stage_reads.recomputed,
        ):
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
            return  # every stage that a region reaches into enters it again
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
        users = [
            i
            for i, stage_reads in enumerate(reads)
            if fqn in {str(n.target) for n in stage_reads.attributes}
        ]
        if users != [stage]:
            raise ValueError(
                f"buffer {fqn}: stage {stage} writes into it and stages {users} use it; expected "
                "one stage; move the cuts so that its uses lie together."
            )


def find_gradients(graph_module: fx.GraphModule, loss: fx.Node | None) -> frozenset[fx.Node]:
    """Nodes that the loss's gradient flows back to; without a known loss that of any result.

    In doubt a gradient flows.
    """
    if loss is not None:
        return _reached(graph_module, [loss])
    returned = graph_module.graph.output_node().all_input_nodes
    return _reached(graph_module, [node for node in returned if _differentiable(node)])


def _reached(graph_module: fx.GraphModule, targets: list[fx.Node]) -> frozenset[fx.Node]:
    graph = graph_module.graph
    written: dict[fx.Node, list[fx.Node]] = {}
    roots = memory_roots(graph)
    for node in graph.nodes:
        for target in written_arguments(node):
            written.setdefault(roots[target], []).append(node)
    trainable = {name for name, param in graph_module.named_parameters(remove_duplicate=False)
                 if param.requires_grad}  # fmt: skip
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
    tensors = tensors_in(node.meta.get("example_value"))
    return not tensors or any(tensor.requires_grad for tensor in tensors)


# Chains of more operations are relayed: their kernels' launches would cost more than the transfer.
_LONGEST_CHAIN = 48

_CHEAP = frozenset(
    {"abs", "add", "and", "arange", "bitwise_and", "bitwise_not", "bitwise_or", "bool",
     "broadcast_to", "cat", "ceil", "chunk", "clamp", "clone", "contiguous", "cos", "cumsum",
     "detach", "div", "einsum", "eq", "exp", "expand", "expand_as", "eye", "flatten", "float",
     "floor", "floordiv", "full", "full_like", "ge", "getattr", "getitem", "gt", "int", "invert",
     "le", "log", "log2", "logical_and", "logical_not", "logical_or", "logical_xor", "long",
     "lt", "masked_fill", "matmul", "max", "maximum", "min", "minimum", "mod", "mul", "narrow",
     "ne", "neg", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "or", "outer",
     "permute", "pow", "reciprocal", "remainder", "repeat", "reshape", "rsqrt", "rsub", "select",
     "sign", "sin", "size", "split", "sqrt", "squeeze", "stack", "sub", "sum", "t", "to",
     "transpose", "tril", "triu", "truediv", "type", "type_as", "unbind", "unsqueeze", "view",
     "where", "xor", "zeros", "zeros_like"}
)  # fmt: skip


class Recomputable:
    """Decides which nodes a later stage recomputes rather than receives.

    Args:
        graph_module: The whole graph.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        graph = graph_module.graph
        self._buffers = {name for name, _ in graph_module.named_buffers(remove_duplicate=False)}
        self._autocast = autocast_dtypes(graph)
        roots = memory_roots(graph)
        dirty = {roots[target] for node in graph.nodes for target in written_arguments(node)}
        self._written = {node for node, root in roots.items() if root in dirty}
        modes = Modes()
        self._in_region: set[fx.Node] = set()
        for node in graph.nodes:
            modes = modes.after(node)
            if modes.autocasts:
                self._in_region.add(node)
        self._chains: dict[fx.Node, frozenset[fx.Node] | None] = {}

    def __call__(self, node: fx.Node) -> bool:
        """Whether the node is recomputed, with all that it needs."""
        chain = self._chain(node)
        return chain is not None and len(chain) <= _LONGEST_CHAIN

    def _chain(self, node: fx.Node) -> frozenset[fx.Node] | None:
        """The operations that compute it, or ``None`` if one of them must not run again."""
        if node not in self._chains:
            self._chains[node] = self._find(node)
        return self._chains[node]

    def _find(self, node: fx.Node) -> frozenset[fx.Node] | None:
        if node.op == "placeholder":
            return frozenset()
        if node in self._written:
            return None
        if node.op == "get_attr":
            return frozenset() if str(node.target) in self._buffers else None
        example = node.meta.get("example_value")
        # At the start of a stage the caller's autocast is on, and none of the graph's regions.
        if (
            node in self._autocast
            or node in self._in_region
            or node.meta.get(TRANSFORMED)
            or not _is_plain(node)
        ):
            return None
        if isinstance(example, Tensor) and example.requires_grad:
            return None
        chains = [self._chain(operand) for operand in node.all_input_nodes]
        nodes: set[fx.Node] = {node}
        for chain in chains:
            if chain is None or len(chain) > _LONGEST_CHAIN:
                return None
            nodes |= chain
        return frozenset(nodes)


def _is_plain(node: fx.Node) -> bool:
    if node.op not in {"call_function", "call_method"}:
        return False
    return node.target is operator.getitem or op_name(node) in _CHEAP

"""Read AOTAutograd's joint graph into a :class:`RematProblem`."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from lightning_unitscale.capture.aliasing import is_view
from lightning_unitscale.capture.copy_graphs import is_higher_order
from lightning_unitscale.capture.graph_nodes import is_seeded, tensors_in
from lightning_unitscale.memory.costs import (
    CostModel,
    OperatorCosts,
    aten_node_costs,
    concrete,
    size_hint,
)
from lightning_unitscale.memory.problem import NodeRegion, RematNode, RematProblem, leading_to

Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)

# Bytes of a generator's state, from which a replayed operation starts: a CPU's Mersenne twister.
_RNG_STATE_BYTES = 5056
# A smaller result is saved instead of its generator's state.
_REPLAY_FROM_BYTES = 16 * _RNG_STATE_BYTES
# Part of the names of placeholders that only the backward pass reads.
_BACKWARD_INPUTS = ("tangents", "bwd_seed", "bwd_base_offset")
# Operators that depend only on their arguments, unlike collectives. Our own operators that must not
# run again are marked in their nodes' ``recompute``.
_PURE_NAMESPACES = ("aten", "prims", "prim", "lightning_unitscale")
# Threads add to one element atomically, so the order of the sum differs from run to run.
_ATOMIC = ("index_add", "scatter_add", "scatter_reduce", "index_put", "cumsum", "histc", "bincount")


def changing_sizes(graph: fx.Graph) -> tuple[torch.SymInt, ...]:
    """Return the sizes that are inputs of a graph because they change from call to call."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return tuple(
        size for size in values if isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)
    )


def is_mutable(node: fx.Node) -> bool:
    """Check whether a node writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def must_recompute(node: fx.Node) -> bool:
    """Check whether the user's checkpoint recomputes a node."""
    return node.meta.get("recompute") in (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    )


def kind_of(node: fx.Node) -> str:
    """Return the name of a node's operator for reports."""
    if node.op != "call_function":
        return node.op
    if hasattr(node.target, "overloadpacket"):
        return str(node.target.overloadpacket)
    return getattr(node.target, "__name__", str(node.target))


@dataclass(eq=False)
class JointGraphReader:
    """Reader of a joint graph, whose ``nodes`` are in the problem's order."""

    graph: fx.Graph
    num_fwd_outputs: int
    cost_model: CostModel
    mutated_inputs: Collection[fx.Node] = ()
    replay_random: bool = True

    def __post_init__(self) -> None:
        graph = self.graph
        self.nodes = tuple(node for node in graph.nodes if node.op != "output")
        self.index = {node: i for i, node in enumerate(self.nodes)}
        outputs = tree_leaves(graph.output_node().args)
        self.outputs = [self.index.get(output) for output in outputs]
        self.sizes = changing_sizes(graph)
        self.inputs = [[self.index[i] for i in node.all_input_nodes] for node in self.nodes]
        self.storages = [_storages(node.meta.get("val")) for node in self.nodes]
        written = [node.args[0] for node in self.nodes if is_mutable(node) and node.args]
        mutated = [*self.mutated_inputs, *written]
        self.mutated = {self.index[node] for node in mutated if isinstance(node, fx.Node)}
        self.regions: list[NodeRegion] = []
        # Node whose storage each node's tensor lies in, and the node that allocates it.
        self.bases: list[tuple[int, int]] = []
        first_with: dict[frozenset[int], int] = {}
        for i, node in enumerate(self.nodes):
            self.regions.append(self._region(node))
            own = (i, i)
            if self.regions[i] is NodeRegion.INPUT:
                first = first_with.setdefault(self.storages[i] or frozenset({-1 - i}), i)
                own = (first, first)
            elif (viewed := self._viewed(i)) is not None:
                own = self.bases[viewed]
            elif node.target is operator.getitem:
                own = (i, self.inputs[i][0])
            self.bases.append(own)

    def read(self) -> RematProblem:
        """Return the problem, with the numbers that are assumed now for symbolic sizes."""
        forward_outputs, backward_outputs = (
            tuple(dict.fromkeys(i for i in outputs if i is not None))
            for outputs in (
                self.outputs[: self.num_fwd_outputs],
                self.outputs[self.num_fwd_outputs :],
            )
        )
        in_forward = self._in_forward(forward_outputs)
        read: list[RematNode] = []
        for i, node in enumerate(self.nodes):
            base, owner = self.bases[i]
            # A view computes nothing, and another operator has made its memory.
            costs = aten_node_costs(node) if base == i else OperatorCosts()
            can_save, can_recompute = self._choices(i)
            read.append(
                RematNode(
                    name=node.name,
                    kind=kind_of(node),
                    inputs=tuple(sorted(self.inputs[i])),
                    region=self.regions[i],
                    base=base,
                    owner=owner,
                    num_bytes=self._bytes(node) if base == i else 0,
                    workspace_bytes=costs.workspace_bytes + _untaken_bytes(node),
                    seconds=self._seconds(node, costs) if base == i else 0.0,
                    flops=costs.flops,
                    can_save=can_save,
                    can_recompute=can_recompute,
                    in_forward=in_forward[i],
                    replay_bytes=_RNG_STATE_BYTES if is_seeded(node) else 0,
                    can_offload=can_save and base == i and _is_dense(node),
                )
            )
        sizes = tuple(map(size_hint, self.sizes))
        return RematProblem(tuple(read), forward_outputs, backward_outputs, sizes)

    def _region(self, node: fx.Node) -> NodeRegion:
        if node.op in ("placeholder", "get_attr"):
            is_state = type(node.meta.get("val")).__name__ == "BackwardState"
            is_tangent = any(part in str(node.target) for part in _BACKWARD_INPUTS)
            is_input = node.op == "get_attr" or not (is_state or is_tangent)
            return NodeRegion.INPUT if is_input else NodeRegion.BACKWARD
        tag = node.meta.get("partitioner_tag")
        acts = is_mutable(node) or is_seeded(node) or is_higher_order(node)
        reads = (self.regions[self.index[read]] for read in node.all_input_nodes)
        if tag == "must_be_in_backward" or (tag == "is_backward" and acts):
            return NodeRegion.BACKWARD
        return NodeRegion.BACKWARD if NodeRegion.BACKWARD in reads else NodeRegion.FORWARD

    def _in_forward(self, outputs: Sequence[int]) -> list[bool]:
        forward = [i for i, region in enumerate(self.regions) if region is NodeRegion.FORWARD]
        acts = [i for i in forward if is_mutable(self.nodes[i]) or is_seeded(self.nodes[i])]
        nothing = np.zeros(len(self.nodes), dtype=np.bool_)
        in_forward: list[bool] = leading_to([*outputs, *acts], self.inputs, nothing).tolist()
        for i in forward:
            # An operator makes all of its outputs, even those that are not read.
            if self.nodes[i].target is operator.getitem:
                in_forward[i] |= in_forward[self.inputs[i][0]]
        return in_forward

    def _viewed(self, i: int) -> int | None:
        node, mine = self.nodes[i], self.storages[i]
        if not mine:
            return None
        is_item = node.target is operator.getitem
        for j in self.inputs[i]:
            if self.bases[j][0] != j if is_item else mine <= self.storages[j]:
                return j
        # In a rewritten graph, possibly no node has the storage of an example any more.
        if is_view(node) and node.args and isinstance(node.args[0], fx.Node):
            return self.index[node.args[0]]
        return None

    def _bytes(self, node: fx.Node) -> int:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return 0
        if self.cost_model.fused and node.users and all(map(is_fusible, (node, *node.users))):
            return 0  # the value stays in registers
        try:
            return size_hint(value.untyped_storage().nbytes())
        except (NotImplementedError, RuntimeError):
            return _element_bytes(value)  # sparse, or a subclass without storage

    def _seconds(self, node: fx.Node, costs: OperatorCosts) -> float:
        value = node.meta.get("val")
        if node.op != "call_function" or node.target is operator.getitem or not tensors_in(value):
            return 0.0
        seconds = self.cost_model.seconds(
            node.name, costs.flops, costs.bytes_moved, fusible=is_fusible(node)
        )
        if is_seeded(node):
            elements = sum(tensor.numel() for tensor in tensors_in(concrete(value)))
            seconds += elements * self.cost_model.random_seconds
        return seconds

    def _choices(self, i: int) -> tuple[bool, bool]:
        """Return whether a node's value can be saved, and whether it may run again."""
        node, is_view = self.nodes[i], self.bases[i][0] != i
        value = node.meta.get("val")
        if isinstance(value, Symbolic):
            # Autograd keeps integers, and other symbols are recomputed from them.
            return isinstance(value, torch.SymInt), not isinstance(value, torch.SymInt)
        can_save = not is_view and not isinstance(value, (tuple, list))
        if must_recompute(node) and self.regions[i] is NodeRegion.FORWARD:
            return False, True
        is_part = is_view or node.target is operator.getitem
        if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
            # Several outputs are saved one by one, and a view by saving its base.
            return can_save, not can_save and is_part
        if is_part:
            return can_save, not is_mutable(node)
        return can_save, self._may_run_again(node)

    def _may_run_again(self, node: fx.Node) -> bool:
        if not hasattr(node.target, "overloadpacket"):
            # Arithmetic on symbolic sizes.
            is_number = isinstance(node.meta.get("val"), (*Symbolic, int, float, bool))
            return node.op == "call_function" and is_number
        if getattr(node.target, "namespace", None) not in _PURE_NAMESPACES or is_mutable(node):
            return False
        tensors = tensors_in(node.meta.get("val"))
        is_on_cpu = not tensors or tensors[0].device.type == "cpu"
        if not is_on_cpu and node.target.overloadpacket.__name__.startswith(_ATOMIC):
            return False
        if is_seeded(node):
            return self.replay_random and sum(map(_element_bytes, tensors)) >= _REPLAY_FROM_BYTES
        # By the time of the backward pass a mutated input has its new value.
        return not any(self.bases[j][0] in self.mutated for j in self.inputs[self.index[node]])


def is_fusible(node: fx.Node) -> bool:
    """Check whether a compiler computes the node inside a loop with its neighbors."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise in tags or node.target is operator.getitem:
        return True
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    return name in _FUSIBLE


_FUSIBLE = frozenset(
    {"_to_copy", "clone", "expand", "full", "full_like", "zeros_like", "ones_like",
     "scalar_tensor", "where", "var_mean", "mean", "sum", "amax", "any", "convert_element_type",
     "broadcast_in_dim", "native_layer_norm", "_softmax", "_log_softmax", "inductor_random",
     "inductor_lookup_seed", "iota", "arange", "embedding", "gather", "slice", "select", "view",
     "permute", "t", "transpose", "unsqueeze", "squeeze", "reshape", "alias", "detach",
     "as_strided", "_unsafe_view"}
)  # fmt: skip


def _element_bytes(tensor: Tensor) -> int:
    example: Tensor = concrete(tensor)
    return example.numel() * example.element_size()


def _is_dense(node: fx.Node) -> bool:
    """Check whether a node's value is a tensor that fills its storage."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    try:
        storage = size_hint(value.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return False
    return storage == _element_bytes(value) and size_hint(value.storage_offset()) == 0


def _storages(value: Any) -> frozenset[int]:
    """Return the identities of a value's storages, never their addresses."""
    try:
        return frozenset(tensor.untyped_storage()._cdata for tensor in tensors_in(value))
    except (NotImplementedError, RuntimeError):
        return frozenset()


def _untaken_bytes(node: fx.Node) -> int:
    """Return the bytes of the unread outputs of an operator with several."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, (tuple, list)):
        return 0
    read = {storage for i in node.all_input_nodes for storage in _storages(i.meta.get("val"))}
    taken = {user.args[1] for user in node.users if user.target is operator.getitem}
    return sum(
        size_hint(output.untyped_storage().nbytes())
        for position, output in enumerate(value)
        if isinstance(output, Tensor) and position not in taken and not read & _storages(output)
    )

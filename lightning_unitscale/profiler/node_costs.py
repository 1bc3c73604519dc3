"""Costs of every node and of every module, computed from the record of a step. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from lightning_unitscale.profiler.record import (
    OUTSIDE,
    Event,
    Phase,
    StepRecord,
    peak_of,
)

# What is there, or gathered anew, with or without the backward pass.
ALWAYS_THERE = ("parameter", "buffer", "unsharded")


@dataclass(frozen=True)
class NodeCosts:
    """What one node of the forward graph costs; bytes of whole storages.

    Attributes:
        name: Unique within the step, and made of module path and function.
        op: Name of the function.
        module: Path of the module that called it; empty for the root.
        inputs: Names of the nodes, parameters, buffers and inputs that it reads.
        shape: Shape of its first result.
        dtype: Type of its first result.
        fwd_mem_in: Bytes of its inputs that autograd saves because of it: each storage at the first
            node that has it saved, parameters and buffers apart.
        fwd_mem_tmp: The most bytes at once inside it that are neither inputs nor results: what it
            saves besides them (a dropout's mask), intermediates, and its kernels' workspaces.
        fwd_mem_out: Bytes of its results; 0 for a view and for an in-place operation.
        save_fwd_in: Which of ``inputs`` are saved for the backward pass, parameters included.
        saved_bytes: Bytes that autograd saves because of it: inputs, as in ``fwd_mem_in``, results
            and intermediates. The sum over all nodes is what the backward pass waits for.
        bwd_mem_tmp: The most bytes of temporaries at once inside its backward.
        bwd_mem_out: Bytes of the gradients that its backward hands on.
        param_grad_bytes: Bytes of gradients of parameters that its backward makes.
        fwd_flops: Floating-point operations of products, forward; a multiply-add is two.
        bwd_flops: The same, backward, with what a checkpoint runs again.
        fwd_bytes_moved: Bytes that its operators read and write.
        bwd_bytes_moved: The same, backward.
    """

    name: str
    op: str
    module: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    fwd_mem_in: int = 0
    fwd_mem_tmp: int = 0
    fwd_mem_out: int = 0
    save_fwd_in: tuple[str, ...] = ()
    saved_bytes: int = 0
    bwd_mem_tmp: int = 0
    bwd_mem_out: int = 0
    param_grad_bytes: int = 0
    fwd_flops: int = 0
    bwd_flops: int = 0
    fwd_bytes_moved: int = 0
    bwd_bytes_moved: int = 0


# Costs that add up over the nodes of a module.
ADDITIVE = (
    "saved_bytes", "fwd_mem_out", "param_grad_bytes", "fwd_flops", "bwd_flops",
    "fwd_bytes_moved", "bwd_bytes_moved",
)  # fmt: skip


@dataclass(frozen=True)
class ModuleCosts:
    """What a module costs together with the modules in it.

    Attributes:
        path: Path of the module; empty for the root.
        kind: Name of its class.
        num_nodes: Nodes of the forward graph.
        parameter_bytes: Bytes of its parameters, shared ones once.
        saved_bytes: Bytes that autograd saves because of it.
        fwd_mem_out: Bytes of all results of its nodes.
        param_grad_bytes: Bytes of gradients of parameters that its backward makes.
        fwd_flops: Floating-point operations of products, forward.
        bwd_flops: The same, backward.
        fwd_bytes_moved: Bytes that its operators read and write.
        bwd_bytes_moved: The same, backward.
    """

    path: str
    kind: str
    num_nodes: int = 0
    parameter_bytes: int = 0
    saved_bytes: int = 0
    fwd_mem_out: int = 0
    param_grad_bytes: int = 0
    fwd_flops: int = 0
    bwd_flops: int = 0
    fwd_bytes_moved: int = 0
    bwd_bytes_moved: int = 0


def node_costs(record: StepRecord) -> tuple[NodeCosts, ...]:
    """Costs of every node of the forward graph, in its order."""
    calls: dict[tuple[Phase, int], list[int]] = defaultdict(list)
    for index, call in enumerate(record.operators):
        calls[call.phase, call.node].append(index)
    lives = _Lives(record)
    return tuple(
        _costs_of(lives, index, calls["forward", index], calls["backward", index])
        for index in range(len(record.nodes))
    )


def module_costs(
    nodes: Iterable[NodeCosts], kinds: Mapping[str, str], parameter_bytes: Mapping[str, int]
) -> tuple[ModuleCosts, ...]:
    """Costs of every module that has nodes or parameters.

    Args:
        nodes: Costs of the nodes.
        kinds: Name of the class of every module, by its path.
        parameter_bytes: Bytes of the parameters of every module and of those in it.
    """
    totals: dict[str, dict[str, int]] = {path: defaultdict(int) for path in kinds}
    for node in nodes:
        for path in _ancestors(node.module):
            if path in totals:
                totals[path]["num_nodes"] += 1
                for name in ADDITIVE:
                    totals[path][name] += getattr(node, name)
    return tuple(
        ModuleCosts(path, kinds[path], parameter_bytes=parameter_bytes.get(path, 0), **total)
        for path, total in totals.items()
        if total or parameter_bytes.get(path)
    )


class _Lives:
    """Which storage was allocated where, when it was released, and who had it saved first."""

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self.storages = record.storages
        self.born: dict[tuple[Phase, int], list[int]] = defaultdict(list)
        self.events: dict[int, list[tuple[int, Event]]] = defaultdict(list)
        self.released: dict[int, int] = {}
        for index, storage in enumerate(record.storages):
            if storage.born != OUTSIDE:
                phase = record.operators[storage.born].phase
                self.born[phase, storage.node].append(index)
        for order, event in enumerate(record.events):
            self.events[event.storage].append((order, event))
            if event.change < 0:
                self.released[event.storage] = event.operator
        self.first_saver: dict[int, int] = {}
        self.saved_by: dict[int, set[int]] = defaultdict(set)
        for saved in record.saved:
            self.first_saver.setdefault(saved.storage, saved.node)
            self.saved_by[saved.node].add(saved.storage)

    def size(self, storages: Iterable[int]) -> int:
        """Bytes of all of them."""
        return sum(self.storages[index].num_bytes for index in storages)

    def temporary_bytes(self, storages: Iterable[int], calls: Sequence[int]) -> int:
        """The most bytes at once within calls of operators: their storages and a workspace.

        Args:
            storages: What the calls allocate for themselves.
            calls: Indices of the operators, ascending.
        """
        last = calls[-1] if calls else OUTSIDE
        events = sorted(
            (order, event)
            for index in storages
            for order, event in self.events[index]
            if event.operator <= last
        )
        costs = [self.record.operators[index].costs for index in calls]
        workspace = max((cost.workspace_bytes for cost in costs), default=0)
        return peak_of(event for _, event in events) + workspace


def _costs_of(
    lives: _Lives, index: int, forward: Sequence[int], backward: Sequence[int]
) -> NodeCosts:
    node, operators = lives.record.nodes[index], lives.record.operators
    inputs, outputs = set(node.input_storages), set(node.output_storages)
    saved = lives.saved_by[index]
    saved_first = {
        storage
        for storage in saved
        if lives.first_saver[storage] == index and lives.storages[storage].kind not in ALWAYS_THERE
    }
    allocated = set(lives.born["forward", index])
    grads = set(lives.born["backward", index])
    last = backward[-1] if backward else OUTSIDE
    # What outlives the node's last operator is handed on; the rest was for its own use.
    handed_on = {grad for grad in grads if lives.released.get(grad, last + 1) > last}
    of_parameters = {grad for grad in grads if lives.storages[grad].kind == "gradient"}
    return NodeCosts(
        node.name,
        node.op,
        node.module,
        node.inputs,
        node.shape,
        node.dtype,
        fwd_mem_in=lives.size(saved_first & inputs),
        fwd_mem_tmp=lives.temporary_bytes(allocated - outputs, forward),
        fwd_mem_out=lives.size(allocated & outputs),
        save_fwd_in=tuple(
            name
            for name, storage in zip(node.inputs, node.input_storages, strict=True)
            if storage in saved
        ),
        saved_bytes=lives.size(saved_first),
        bwd_mem_tmp=lives.temporary_bytes(grads - handed_on - of_parameters, backward),
        bwd_mem_out=lives.size(handed_on - of_parameters),
        param_grad_bytes=lives.size(of_parameters),
        fwd_flops=sum(operators[call].costs.flops for call in forward),
        bwd_flops=sum(operators[call].costs.flops for call in backward),
        fwd_bytes_moved=sum(operators[call].costs.bytes_moved for call in forward),
        bwd_bytes_moved=sum(operators[call].costs.bytes_moved for call in backward),
    )


def _ancestors(path: str) -> list[str]:
    """The path, those of the modules around it, and the root's empty one."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def field_names(costs: type[NodeCosts] | type[ModuleCosts]) -> tuple[str, ...]:
    """Names of the fields that hold numbers."""
    return tuple(field.name for field in fields(costs) if field.type == "int")

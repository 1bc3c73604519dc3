"""Costs of every node and of every module, computed from the record of a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from torch import nn

from lightning_unitscale.profiler.record import (
    OUTSIDE,
    Costs,
    Event,
    NodeCosts,
    Phase,
    StepRecord,
    peak_of,
)
from lightning_unitscale.profiler.sharded import local_tensor

# What is there, or gathered anew, with or without the backward pass.
ALWAYS_THERE = ("parameter", "buffer", "unsharded")


@dataclass(frozen=True)
class ModuleCosts(Costs):
    """What a module costs together with the modules in it, in the fields of :class:`Costs`.

    Attributes:
        path: Path of the module; empty for the root.
        kind: Name of its class.
        num_nodes: Nodes of the forward graph.
        parameter_bytes: Bytes of its parameters, shared ones once.
    """

    path: str
    kind: str
    num_nodes: int = 0
    parameter_bytes: int = 0


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


def module_costs(nodes: Iterable[NodeCosts], module: nn.Module) -> tuple[ModuleCosts, ...]:
    """Costs of every module that has nodes or parameters, from those of all nodes."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for node in nodes:
        for path in _ancestors(node.module):
            totals[path]["num_nodes"] += 1
            for name in field_names(Costs):
                totals[path][name] += getattr(node, name)
    costs = []
    for path, submodule in module.named_modules():
        shards = map(local_tensor, submodule.parameters())
        size = sum(shard.numel() * shard.element_size() for shard in shards)
        if totals[path] or size:
            kind = type(submodule).__name__
            costs.append(ModuleCosts(path, kind, parameter_bytes=size, **totals[path]))
    return tuple(costs)


class _Lives:
    """Which storage was allocated where, when it was released, and who had it saved first."""

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self.storages = record.storages
        self.born: dict[tuple[Phase, int], set[int]] = defaultdict(set)
        self.events: dict[int, list[tuple[int, Event]]] = defaultdict(list)
        self.released: dict[int, int] = {}
        for index, storage in enumerate(record.storages):
            if storage.born != OUTSIDE:
                self.born[record.operators[storage.born].phase, storage.node].add(index)
        for order, event in enumerate(record.events):
            self.events[event.storage].append((order, event))
            if event.change < 0:
                self.released[event.storage] = event.operator
        self.first_saver: dict[int, int] = {}
        self.saved_by: dict[int, set[int]] = defaultdict(set)
        for index, node in record.saved:
            self.first_saver.setdefault(index, node)
            self.saved_by[node].add(index)

    def size(self, storages: Iterable[int]) -> int:
        """Bytes of all of them."""
        return sum(self.storages[index].num_bytes for index in storages)

    def temporary_bytes(self, storages: Iterable[int], calls: Sequence[int]) -> int:
        """The most bytes at once within calls of operators: their storages and a workspace."""
        last = calls[-1] if calls else OUTSIDE
        events = sorted(entry for index in storages for entry in self.events[index])
        costs = [self.record.operators[index].costs for index in calls]
        workspace = max((cost.workspace_bytes for cost in costs), default=0)
        return peak_of(event for _, event in events if event.operator <= last) + workspace


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
    allocated, grads = lives.born["forward", index], lives.born["backward", index]
    last = backward[-1] if backward else OUTSIDE
    # What outlives the node's last operator is handed on; the rest was for its own use.
    handed_on = {grad for grad in grads if lives.released.get(grad, last + 1) > last}
    of_parameters = {grad for grad in grads if lives.storages[grad].kind == "gradient"}
    read = zip(node.names.inputs, node.input_storages, strict=True)
    return replace(
        node.names,
        fwd_mem_in=lives.size(saved_first & inputs),
        fwd_mem_tmp=lives.temporary_bytes(allocated - outputs, forward),
        fwd_mem_out=lives.size(allocated & outputs),
        save_fwd_in=tuple(name for name, storage in read if storage in saved),
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


def field_names(costs: type[Costs]) -> tuple[str, ...]:
    """Names of the fields that hold numbers."""
    return tuple(field.name for field in fields(costs) if field.type == "int")

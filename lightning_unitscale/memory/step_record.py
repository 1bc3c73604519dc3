"""Record a step on fake tensors, and compute its costs and live bytes.

The record is plain data without tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from torch import nn

from lightning_unitscale.capture.absent_ranks import local_tensor
from lightning_unitscale.memory.costs import OperatorCosts
from lightning_unitscale.memory.gpus import GPU

Phase = Literal["forward", "backward", "optimizer"]

# Purpose of a storage. Unsharded are parameters while a layer needs them whole, and the buffers
# that they are gathered in. An activation is saved for the backward pass. A library's are
# workspaces that it keeps.
Kind = Literal[
    "parameter", "buffer", "optimizer", "input", "gradient", "unsharded", "library", "activation",
    "temporary",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
# These exist, or are gathered again, with or without the backward pass.
ALWAYS_THERE = ("parameter", "buffer", "unsharded", "library")

OUTSIDE = -1  # index for no node or no operator


@dataclass
class StorageLife:
    """One storage, from its allocation to its release."""

    num_bytes: int  # of the whole storage, at its largest size
    kind: Kind = "temporary"
    node: int = OUTSIDE  # the forward node that allocated it, in its forward or its backward
    born: int = OUTSIDE  # the operator that allocated it, or OUTSIDE if it existed before
    stream: int = 0  # of the GPU, in which FSDP gathers parameters and reduces gradients


@dataclass(frozen=True)
class OperatorCall:
    """One ATen operator of the step."""

    name: str  # such as ``aten.addmm.default``
    phase: Phase
    node: int  # the forward node that it belongs to
    costs: OperatorCosts = field(default_factory=OperatorCosts)


class Event(NamedTuple):
    """An allocation, a release or a change of size of a storage."""

    storage: int
    change: int  # in bytes
    operator: int  # the last operator that had run


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs that add up over the nodes of a module.

    Attributes:
        saved_bytes: Bytes that autograd saves because of it: inputs, as in ``fwd_mem_in``, results
            and intermediates. Their sum over all nodes waits for the backward pass.
        fwd_mem_out: Bytes of its results, or 0 for a view and for an in-place operator.
        param_grad_bytes: Bytes of gradients of parameters that its backward makes.
        fwd_flops: Floating-point operations of matmuls in the forward. A multiply-add is two.
        bwd_flops: The same in the backward, with the recomputation of checkpoints.
        fwd_bytes_moved: Bytes that its operators read and write.
        bwd_bytes_moved: The same in the backward.
    """

    saved_bytes: int = 0
    fwd_mem_out: int = 0
    param_grad_bytes: int = 0
    fwd_flops: int = 0
    bwd_flops: int = 0
    fwd_bytes_moved: int = 0
    bwd_bytes_moved: int = 0


@dataclass(frozen=True)
class NodeCosts(Costs):
    """Costs of one node of the forward graph, one call of a torch function. Storages are whole.

    It has the fields of :class:`Costs` as well.

    Attributes:
        name: Unique name within the step, made of module path and function.
        op: Name of the function.
        module: Path of the module that called it, empty for the root.
        inputs: Names of the nodes, parameters, buffers and inputs that it reads.
        shape: Shape of its first result.
        dtype: Type of its first result.
        fwd_mem_in: Bytes of its inputs that autograd saves because of it, each storage at the first
            node that has it saved, without parameters and buffers.
        fwd_mem_tmp: The most bytes at once inside it that are neither inputs nor results: other
            saved values (a dropout's mask), intermediates, and its kernels' workspaces.
        save_fwd_in: Names in ``inputs`` that are saved for the backward pass, parameters included.
        bwd_mem_tmp: The most bytes of temporaries at once inside its backward.
        bwd_mem_out: Bytes of the gradients that its backward returns.
    """

    name: str
    op: str
    module: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    fwd_mem_in: int = 0
    fwd_mem_tmp: int = 0
    save_fwd_in: tuple[str, ...] = ()
    bwd_mem_tmp: int = 0
    bwd_mem_out: int = 0


@dataclass(frozen=True)
class ModuleCosts(Costs):
    """Costs of a module together with its submodules, in the fields of :class:`Costs`.

    Attributes:
        path: Path of the module, empty for the root.
        kind: Name of its class.
        num_nodes: Nodes of the forward graph.
        parameter_bytes: Bytes of its parameters, shared ones once.
    """

    path: str
    kind: str
    num_nodes: int = 0
    parameter_bytes: int = 0


class NodeRecord(NamedTuple):
    """Node of the forward graph: its names, and the storages of its inputs and results."""

    names: NodeCosts
    input_storages: tuple[int, ...]
    output_storages: tuple[int, ...]


@dataclass
class StepRecord:
    """Whole step: forward, backward and, if there is one, the optimizer."""

    device: str  # type of the simulated device. Storages elsewhere are not recorded
    nodes: list[NodeRecord] = field(default_factory=list)  # the forward graph
    storages: list[StorageLife] = field(default_factory=list)
    operators: list[OperatorCall] = field(default_factory=list)  # in the order of execution
    # Allocations and releases in their order, those from before the step first.
    events: list[Event] = field(default_factory=list)
    # Each storage that autograd kept, maybe repeatedly, and the node that saved it, in order.
    saved: list[tuple[int, int]] = field(default_factory=list)
    # Operators before which the first step allocated storages that later steps reuse: an
    # optimizer's state and the workspaces of libraries.
    made_at: dict[int, int] = field(default_factory=dict)
    gpu: GPU | None = None  # the simulated GPU, if it is one

    def note_optimizer(self) -> None:
        """Note that the optimizer creates its state at its first operator."""
        states = (index for index, life in enumerate(self.storages) if life.kind == "optimizer")
        phases = [call.phase for call in self.operators]
        if "optimizer" in phases:
            self.made_at.update(dict.fromkeys(states, phases.index("optimizer")))

    def event_ends(self) -> list[int]:
        """Return how many events come before the first operator, and up to each one's end."""
        operators = [event.operator for event in self.events]
        ends = np.searchsorted(operators, np.arange(OUTSIDE, len(self.operators)), "right")
        return [int(end) for end in ends]


@dataclass(frozen=True)
class MemoryTimeline:
    """Live bytes over a step.

    Attributes:
        before_bytes: Bytes before the step.
        after_bytes: Bytes at its end.
        live_bytes: The most bytes alive during each operator, kernel workspaces included.
        live_by_kind: The same by kind once the operator has its results, without workspaces.
    """

    before_bytes: int
    after_bytes: int
    live_bytes: tuple[int, ...] = field(repr=False)
    live_by_kind: dict[Kind, tuple[int, ...]] = field(repr=False)


@dataclass(frozen=True)
class Peak:
    """Moment at which the most bytes are alive.

    Attributes:
        num_bytes: Number of bytes, kernel workspaces included.
        moment: Index of the operator that runs then, or -1 before the first.
        phase: Part of the step.
        node: Name of the forward node that is running, in its forward or its backward. Empty
            outside of all nodes.
        operator: The ATen operator, empty before the first.
        by_kind: Bytes by purpose.
    """

    num_bytes: int
    moment: int
    phase: Phase
    node: str
    operator: str
    by_kind: dict[Kind, int]


class BlockSizes(NamedTuple):
    """Bytes that an allocator hands out for a step, which exceed the requested bytes."""

    changes: tuple[int, ...]  # of each event
    workspaces: tuple[int, ...]  # of each operator

    @staticmethod
    def asked_for(record: StepRecord) -> BlockSizes:
        """Return the bytes that a step requests, rounded to the smallest block of the device."""
        sizes: Counter[int] = Counter()
        changes = []
        for storage, change, _ in record.events:
            before = allocated_bytes(sizes[storage], record.device)
            sizes[storage] += change
            changes.append(allocated_bytes(sizes[storage], record.device) - before)
        workspaces = tuple(call.costs.workspace_bytes for call in record.operators)
        return BlockSizes(tuple(changes), workspaces)


def memory_timeline(
    record: StepRecord, blocks: BlockSizes | None = None
) -> tuple[MemoryTimeline, Peak]:
    """Return the live bytes over the step, each storage once, and their peak."""
    blocks = blocks or BlockSizes.asked_for(record)
    changes = np.zeros((len(record.events) + 1, len(KINDS)), dtype=np.int64)
    for position, (event, change) in enumerate(zip(record.events, blocks.changes, strict=True), 1):
        changes[position, KINDS.index(record.storages[event.storage].kind)] = change
    by_kind = changes.cumsum(axis=0)
    live = by_kind.sum(axis=1)
    ends = record.event_ends()
    # The last moment within each operator at which the most is alive.
    moments = [end - int(live[start : end + 1][::-1].argmax()) for start, end in pairwise(ends)]
    # A kernel's workspace is alive in addition to its results.
    workspaces = blocks.workspaces
    tops = live[moments] + np.array(workspaces, dtype=np.int64)
    timeline = MemoryTimeline(
        int(live[ends[0]]),
        int(live[-1]),
        tuple(tops.tolist()),
        {kind: tuple(by_kind[moments, column].tolist()) for column, kind in enumerate(KINDS)},
    )
    if not len(tops) or tops.max() <= timeline.before_bytes:
        at_peak = dict(zip(KINDS, by_kind[ends[0]].tolist(), strict=True))
        return timeline, Peak(timeline.before_bytes, OUTSIDE, "forward", "", "", at_peak)
    top = int(tops.argmax())
    at_peak = dict(zip(KINDS, by_kind[moments[top]].tolist(), strict=True))
    at_peak["temporary"] += workspaces[top]
    call = record.operators[top]
    node = record.nodes[call.node].names.name if call.node != OUTSIDE else ""
    return timeline, Peak(int(tops[top]), top, call.phase, node, call.name, at_peak)


def peak_of(events: Iterable[Event]) -> int:
    """Return the most bytes that a sequence of allocations and releases holds at once."""
    live = top = 0
    for event in events:
        live += event.change
        top = max(top, live)
    return top


BLOCK_BYTES = 512  # CUDA's caching allocator hands out multiples of this


def allocated_bytes(num_bytes: int, device: str) -> int:
    """Return the bytes that the device's allocator takes for a storage of ``num_bytes``."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES if device == "cuda" else num_bytes


def node_costs(record: StepRecord) -> tuple[NodeCosts, ...]:
    """Return the costs of every node of the forward graph, in its order."""
    storages, operators = record.storages, record.operators
    calls: dict[tuple[Phase, int], list[int]] = defaultdict(list)
    for index, call in enumerate(operators):
        calls[call.phase, call.node].append(index)
    born: dict[tuple[Phase, int], set[int]] = defaultdict(set)
    for index, storage in enumerate(storages):
        if storage.born != OUTSIDE:
            born[operators[storage.born].phase, storage.node].add(index)
    events: dict[int, list[tuple[int, Event]]] = defaultdict(list)
    for order, event in enumerate(record.events):
        events[event.storage].append((order, event))
    released = {event.storage: event.operator for event in record.events if event.change < 0}
    first_saver: dict[int, int] = {}
    saved_by: dict[int, set[int]] = defaultdict(set)
    for index, node in record.saved:
        first_saver.setdefault(index, node)
        saved_by[node].add(index)

    def size(indices: Iterable[int]) -> int:
        return sum(storages[index].num_bytes for index in indices)

    def temporary_bytes(indices: Iterable[int], running: Sequence[int]) -> int:
        """Return the most bytes at once within operators: their storages and a workspace."""
        last = running[-1] if running else OUTSIDE
        ordered = sorted(entry for index in indices for entry in events[index])
        workspaces = (operators[index].costs.workspace_bytes for index in running)
        alive = peak_of(event for _, event in ordered if event.operator <= last)
        return alive + max(workspaces, default=0)

    def costs_of(index: int, node: NodeRecord) -> NodeCosts:
        forward, backward = calls["forward", index], calls["backward", index]
        inputs, outputs, saved = {*node.input_storages}, {*node.output_storages}, saved_by[index]
        first = {storage for storage in saved if first_saver[storage] == index}
        saved_first = {one for one in first if storages[one].kind not in ALWAYS_THERE}
        allocated, grads = born["forward", index], born["backward", index]
        last = backward[-1] if backward else OUTSIDE
        # Storages that outlive the node's last operator are passed on. The rest is temporary.
        handed_on = {grad for grad in grads if released.get(grad, last + 1) > last}
        of_parameters = {grad for grad in grads if storages[grad].kind == "gradient"}
        read = zip(node.names.inputs, node.input_storages, strict=True)
        return replace(
            node.names,
            fwd_mem_in=size(saved_first & inputs),
            fwd_mem_tmp=temporary_bytes(allocated - outputs, forward),
            fwd_mem_out=size(allocated & outputs),
            save_fwd_in=tuple(name for name, storage in read if storage in saved),
            saved_bytes=size(saved_first),
            bwd_mem_tmp=temporary_bytes(grads - handed_on - of_parameters, backward),
            bwd_mem_out=size(handed_on - of_parameters),
            param_grad_bytes=size(of_parameters),
            fwd_flops=sum(operators[call].costs.flops for call in forward),
            bwd_flops=sum(operators[call].costs.flops for call in backward),
            fwd_bytes_moved=sum(operators[call].costs.bytes_moved for call in forward),
            bwd_bytes_moved=sum(operators[call].costs.bytes_moved for call in backward),
        )

    return tuple(costs_of(index, node) for index, node in enumerate(record.nodes))


def module_costs(nodes: Iterable[NodeCosts], module: nn.Module) -> tuple[ModuleCosts, ...]:
    """Return the costs of every module that has nodes or parameters, from those of all nodes."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for node in nodes:
        parts = node.module.split(".") if node.module else []
        for path in (".".join(parts[:count]) for count in range(len(parts) + 1)):
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


def field_names(dataclass: type[Any]) -> tuple[str, ...]:
    """Return the names of the fields that hold numbers."""
    return tuple(each.name for each in fields(dataclass) if each.type == "int")

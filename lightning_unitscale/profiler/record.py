"""What a step on fake tensors left behind, and the bytes alive over it.

Plain data, without a tensor in it. Everything that is said about memory is computed from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np

from lightning_unitscale.profiler.costs import OperatorCosts

Phase = Literal["forward", "backward", "optimizer"]

# What a storage is for. What is unsharded are parameters while a layer needs them whole, with the
# buffers that they are gathered in. An activation is saved for the backward pass; the rest is
# temporary.
Kind = Literal[
    "parameter", "buffer", "optimizer", "input", "gradient", "unsharded", "activation", "temporary"
]
KINDS: tuple[Kind, ...] = get_args(Kind)

OUTSIDE = -1  # instead of the index of a node or of an operator, where there is none


@dataclass
class StorageLife:
    """One storage, from its allocation to its release.

    Attributes:
        num_bytes: Size of the whole storage, whatever part of it a tensor shows; the largest that
            it had.
        kind: What it is for.
        node: Index of the forward node that allocated it, in its forward or its backward.
        born: Index of the operator that allocated it; :data:`OUTSIDE` if it was there before.
    """

    num_bytes: int
    kind: Kind = "temporary"
    node: int = OUTSIDE
    born: int = OUTSIDE


@dataclass(frozen=True)
class OperatorCall:
    """One ATen operator of the step.

    Attributes:
        name: Such as ``aten.addmm.default``.
        phase: Part of the step that it ran in.
        node: Index of the forward node that it belongs to.
        costs: Its products, the bytes it moves, and its kernel's own memory.
    """

    name: str
    phase: Phase
    node: int
    costs: OperatorCosts = field(default_factory=OperatorCosts)


class Event(NamedTuple):
    """An allocation, a release or a change of size: of a storage, by so many bytes.

    ``operator`` is the index of the last operator that had run.
    """

    storage: int
    change: int
    operator: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What adds up over the nodes of a module.

    Attributes:
        saved_bytes: Bytes that autograd saves because of it: inputs, as in ``fwd_mem_in``, results
            and intermediates. The sum over all nodes is what the backward pass waits for.
        fwd_mem_out: Bytes of its results; 0 for a view and for an in-place operation.
        param_grad_bytes: Bytes of gradients of parameters that its backward makes.
        fwd_flops: Floating-point operations of products, forward; a multiply-add is two.
        bwd_flops: The same, backward, with what a checkpoint runs again.
        fwd_bytes_moved: Bytes that its operators read and write.
        bwd_bytes_moved: The same, backward.
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
    """What one node of the forward graph costs, one call of a torch function; whole storages.

    It has the fields of :class:`Costs` as well.

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
        save_fwd_in: Which of ``inputs`` are saved for the backward pass, parameters included.
        bwd_mem_tmp: The most bytes of temporaries at once inside its backward.
        bwd_mem_out: Bytes of the gradients that its backward hands on.
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


class NodeRecord(NamedTuple):
    """A node of the forward graph: its names, and the storages of its inputs and results."""

    names: NodeCosts
    input_storages: tuple[int, ...]
    output_storages: tuple[int, ...]


@dataclass
class StepRecord:
    """A whole step: forward, backward and, if there is one, the optimizer.

    Attributes:
        device: Type of the device that was simulated; storages elsewhere are not in the record.
        nodes: The forward graph.
        storages: Every storage of the device.
        operators: Every operator, in the order of execution.
        events: Allocations and releases in their order; those of what was there before come first.
        saved: What autograd kept, in the order in which it did: a storage, maybe repeatedly, and
            the node that made autograd keep it.
    """

    device: str
    nodes: list[NodeRecord] = field(default_factory=list)
    storages: list[StorageLife] = field(default_factory=list)
    operators: list[OperatorCall] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)

    def event_ends(self) -> list[int]:
        """How many events there are before the first operator, and up to each one's end."""
        operators = [event.operator for event in self.events]
        ends = np.searchsorted(operators, np.arange(OUTSIDE, len(self.operators)), "right")
        return [int(end) for end in ends]


@dataclass(frozen=True)
class MemoryTimeline:
    """Live bytes over a step.

    Attributes:
        before_bytes: What was there before the step.
        after_bytes: What is left at the end.
        live_bytes: The most that is alive during each operator, the kernel's own memory included.
        live_by_kind: The same by kind, once the operator has its results; without workspaces.
    """

    before_bytes: int
    after_bytes: int
    live_bytes: tuple[int, ...] = field(repr=False)
    live_by_kind: dict[Kind, tuple[int, ...]] = field(repr=False)


@dataclass(frozen=True)
class Peak:
    """The moment at which the most bytes are alive.

    Attributes:
        num_bytes: How many, the kernel's own memory included.
        moment: Index of the operator that runs then; :data:`OUTSIDE` before the first.
        phase: Part of the step.
        node: Name of the forward node that is running, in its forward or its backward; empty
            outside of all nodes.
        operator: The ATen operator; empty before the first.
        by_kind: Bytes by what they are for.
    """

    num_bytes: int
    moment: int
    phase: Phase
    node: str
    operator: str
    by_kind: dict[Kind, int]


def memory_timeline(record: StepRecord) -> tuple[MemoryTimeline, Peak]:
    """Live bytes over the step, every storage counted once, from its allocation to its release."""
    changes = np.zeros((len(record.events) + 1, len(KINDS)), dtype=np.int64)
    sizes: Counter[int] = Counter()
    for position, (storage, change, _) in enumerate(record.events, start=1):
        before = allocated_bytes(sizes[storage], record.device)
        sizes[storage] += change
        kind = KINDS.index(record.storages[storage].kind)
        changes[position, kind] = allocated_bytes(sizes[storage], record.device) - before
    by_kind = changes.cumsum(axis=0)
    live = by_kind.sum(axis=1)
    ends = record.event_ends()
    # The moment within each operator at which the most is alive, of several the last.
    moments = [end - int(live[start : end + 1][::-1].argmax()) for start, end in pairwise(ends)]
    # A kernel's own memory comes on top of that of its results.
    workspaces = [call.costs.workspace_bytes for call in record.operators]
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
    """The most bytes that a sequence of allocations and releases holds at once."""
    live = top = 0
    for event in events:
        live += event.change
        top = max(top, live)
    return top


# CUDA's caching allocator hands out multiples of this.
BLOCK_BYTES = 512


def allocated_bytes(num_bytes: int, device: str) -> int:
    """What the device's allocator takes for a storage of ``num_bytes``."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES if device == "cuda" else num_bytes

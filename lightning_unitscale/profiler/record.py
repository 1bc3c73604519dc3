"""What a step on fake tensors left behind, and the bytes alive over it.

Plain data, without a tensor in it. Everything that is said about memory is computed from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from lightning_unitscale.profiler.costs import OperatorCosts

Phase = Literal["forward", "backward", "optimizer"]

# What a storage is for. What is unsharded are parameters while a layer needs them whole, with the
# buffers that they are gathered in. An activation is saved for the backward pass; the rest is
# temporary.
Kind = Literal[
    "parameter", "buffer", "input", "gradient", "optimizer", "unsharded", "activation", "temporary"
]
KINDS: tuple[Kind, ...] = (
    "parameter", "buffer", "optimizer", "input", "gradient", "unsharded", "activation", "temporary",
)  # fmt: skip

OUTSIDE = -1  # instead of the index of a node or of an operator, where there is none


@dataclass(frozen=True)
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
    kind: Kind
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


@dataclass(frozen=True)
class Event:
    """An allocation, a release or a change of size.

    Attributes:
        storage: Index of the storage.
        change: Bytes added; negative for a release.
        operator: Index of the last operator that had run.
    """

    storage: int
    change: int
    operator: int


@dataclass(frozen=True)
class SavedStorage:
    """A storage that autograd kept for the backward pass.

    Attributes:
        storage: Index of the storage.
        node: Index of the forward node that made autograd keep it.
    """

    storage: int
    node: int


@dataclass(frozen=True)
class NodeRecord:
    """One node of the forward graph: one call of a torch function.

    Attributes:
        name: Unique within the step, and made of module path and function.
        op: Name of the function.
        module: Path of the module that called it; empty for the root.
        inputs: Names of the nodes, parameters, buffers and inputs that it reads.
        input_storages: Storage of each of ``inputs``.
        output_storages: Storages of its results.
        shape: Shape of its first result.
        dtype: Type of its first result, such as ``float32``.
    """

    name: str
    op: str
    module: str
    inputs: tuple[str, ...] = ()
    input_storages: tuple[int, ...] = ()
    output_storages: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class StepRecord:
    """A whole step: forward, backward and, if there is one, the optimizer.

    Attributes:
        device: Type of the device that was simulated; storages elsewhere are not in the record.
        nodes: The forward graph.
        storages: Every storage of the device.
        operators: Every operator, in the order of execution.
        events: Allocations and releases in their order.
        saved: What autograd kept, in the order in which it did; a storage may occur repeatedly.
    """

    device: str
    nodes: tuple[NodeRecord, ...] = field(repr=False)
    storages: tuple[StorageLife, ...] = field(repr=False)
    operators: tuple[OperatorCall, ...] = field(repr=False)
    events: tuple[Event, ...] = field(repr=False)
    saved: tuple[SavedStorage, ...] = field(repr=False)


# CUDA's caching allocator hands out multiples of this.
_CUDA_BLOCK_BYTES = 512


@dataclass(frozen=True)
class MemoryTimeline:
    """Live bytes over a step.

    Attributes:
        before_bytes: What was there before the step.
        after_bytes: What is left at the end.
        peak_bytes: The most that is alive at once, the kernel's own memory included.
        peak_operator: Index of the operator that runs then; :data:`OUTSIDE` before the first.
        peak_by_kind: Bytes alive at the peak, by what they are for.
        live_bytes: The most that is alive during each operator.
        live_by_kind: The same by kind, once the operator has its results; without workspaces.
    """

    before_bytes: int
    after_bytes: int
    peak_bytes: int
    peak_operator: int
    peak_by_kind: dict[Kind, int]
    live_bytes: tuple[int, ...] = field(repr=False)
    live_by_kind: dict[Kind, tuple[int, ...]] = field(repr=False)


@dataclass(frozen=True)
class Peak:
    """The moment at which the most bytes are alive.

    Attributes:
        num_bytes: How many.
        phase: Part of the step.
        node: Name of the forward node that is running, in its forward or its backward; empty
            outside of all nodes.
        operator: The ATen operator; empty before the first.
        by_kind: Bytes by what they are for.
    """

    num_bytes: int
    phase: Phase
    node: str
    operator: str
    by_kind: dict[Kind, int]


def allocated_bytes(num_bytes: int, device: str) -> int:
    """What the device's allocator takes for a storage of ``num_bytes``."""
    if device != "cuda":
        return num_bytes
    return -(-num_bytes // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES


def memory_timeline(record: StepRecord) -> MemoryTimeline:
    """Live bytes over the step, every storage counted once, from its allocation to its release."""
    allocator = _Allocator(record)
    before_bytes = peak_bytes = allocator.live_bytes
    peak_operator, peak_by_kind = OUTSIDE, allocator.by_kind()
    live_bytes: list[int] = []
    by_kind: list[dict[Kind, int]] = []
    next_event = 0
    for index, operator in enumerate(record.operators):
        # A kernel's own memory comes on top of that of its results.
        workspace = operator.costs.workspace_bytes
        top, top_by_kind = allocator.live_bytes + workspace, allocator.by_kind()
        while next_event < len(record.events) and record.events[next_event].operator <= index:
            event = record.events[next_event]
            allocator.apply(event)
            if event.change > 0 and allocator.live_bytes + workspace >= top:
                top, top_by_kind = allocator.live_bytes + workspace, allocator.by_kind()
            next_event += 1
        live_bytes.append(top)
        by_kind.append(top_by_kind)
        if top > peak_bytes:
            peak_bytes, peak_operator = top, index
            peak_by_kind = {**top_by_kind, "temporary": top_by_kind["temporary"] + workspace}
    return MemoryTimeline(
        before_bytes,
        allocator.live_bytes,
        peak_bytes,
        peak_operator,
        peak_by_kind,
        tuple(live_bytes),
        {kind: tuple(row[kind] for row in by_kind) for kind in KINDS},
    )


def sizes_before(record: StepRecord) -> dict[int, int]:
    """Bytes of the storages that were there before the step, by their index."""
    now: Counter[int] = Counter()
    growth: Counter[int] = Counter()
    for event in record.events:
        now[event.storage] += event.change
        growth[event.storage] = max(growth[event.storage], now[event.storage])
    return {
        index: storage.num_bytes - growth[index]
        for index, storage in enumerate(record.storages)
        if storage.born == OUTSIDE
    }


class _Allocator:
    """Bytes alive by kind, as events are applied."""

    def __init__(self, record: StepRecord) -> None:
        self._device = record.device
        self._kinds = [storage.kind for storage in record.storages]
        self._sizes: Counter[int] = Counter()
        self._by_kind: Counter[Kind] = Counter()
        self.live_bytes = 0
        for index, size in sizes_before(record).items():
            self.apply(Event(index, size, OUTSIDE))

    def apply(self, event: Event) -> None:
        """Allocate, release or resize."""
        before = self._sizes[event.storage]
        after = before + event.change
        change = allocated_bytes(after, self._device) - allocated_bytes(before, self._device)
        self._sizes[event.storage] = after
        self._by_kind[self._kinds[event.storage]] += change
        self.live_bytes += change

    def by_kind(self) -> dict[Kind, int]:
        """Bytes alive of each kind."""
        return {kind: self._by_kind[kind] for kind in KINDS}


def peak_of(events: Iterable[Event]) -> int:
    """The most bytes that a sequence of allocations and releases holds at once."""
    live = top = 0
    for event in events:
        live += event.change
        top = max(top, live)
    return top

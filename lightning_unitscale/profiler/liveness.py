"""Which bytes are alive when: a simulation of the allocator over the record of a step. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_unitscale.profiler.step_record import (
    KINDS,
    OUTSIDE,
    Event,
    Kind,
    Phase,
    StepRecord,
)

# CUDA's caching allocator hands out multiples of this.
_CUDA_BLOCK_BYTES = 512


@dataclass(frozen=True)
class Moment:
    """A moment of the step.

    Attributes:
        live_bytes: Bytes alive at it, the kernel's own memory included.
        operator: Place of the operator that runs; :data:`OUTSIDE` before the first.
        phase: Part of the step.
        node: Place of the forward node that is running, in its forward or its backward.
    """

    live_bytes: int
    operator: int
    phase: Phase
    node: int


@dataclass(frozen=True)
class Timeline:
    """Live bytes over a step.

    Attributes:
        before_bytes: What was there before the step.
        after_bytes: What is left at the end.
        peak: The moment of the highest.
        peak_by_kind: Bytes alive at the peak, by what they are for.
        live_bytes: The most that is alive during each operator.
        live_by_kind: The same by kind, once the operator has its results; without workspaces.
    """

    before_bytes: int
    after_bytes: int
    peak: Moment
    peak_by_kind: dict[Kind, int]
    live_bytes: tuple[int, ...] = field(repr=False)
    live_by_kind: dict[Kind, tuple[int, ...]] = field(repr=False)


def allocated_bytes(num_bytes: int, device: str) -> int:
    """What the device's allocator takes for a storage of ``num_bytes``."""
    if device != "cuda":
        return num_bytes
    return -(-num_bytes // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES


def simulate(record: StepRecord) -> Timeline:
    """Live bytes over the step, every storage counted once, from its allocation to its release."""
    state = _Allocator(record)
    before = state.live_bytes
    peak, peak_by_kind = Moment(before, OUTSIDE, "forward", OUTSIDE), state.by_kind()
    live_bytes, by_kind = [], []
    at = 0
    for place, operator in enumerate(record.operators):
        # A kernel's own memory comes on top of that of its results.
        workspace = operator.workspace_bytes
        top, top_by_kind = state.live_bytes + workspace, state.by_kind()
        while at < len(record.events) and record.events[at].operator <= place:
            state.apply(record.events[at])
            if record.events[at].change > 0 and state.live_bytes + workspace >= top:
                top, top_by_kind = state.live_bytes + workspace, state.by_kind()
            at += 1
        live_bytes.append(top)
        by_kind.append(top_by_kind)
        if top > peak.live_bytes:
            peak = Moment(top, place, operator.phase, operator.node)
            peak_by_kind = {**top_by_kind}
            peak_by_kind["temporary"] += workspace
    rows = {kind: tuple(one[kind] for one in by_kind) for kind in KINDS}
    return Timeline(before, state.live_bytes, peak, peak_by_kind, tuple(live_bytes), rows)


class _Allocator:
    """Bytes alive by kind, as events are applied."""

    def __init__(self, record: StepRecord) -> None:
        self._device = record.device
        self._kinds = [one.kind for one in record.storages]
        self._sizes: Counter[int] = Counter()
        self._by_kind: Counter[Kind] = Counter()
        self.live_bytes = 0
        changes: Counter[int] = Counter()
        for event in record.events:
            changes[event.storage] += event.change if event.change > 0 else 0
        for place, one in enumerate(record.storages):
            if one.born == OUTSIDE:
                self.apply(Event(place, one.num_bytes - changes[place], OUTSIDE))

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

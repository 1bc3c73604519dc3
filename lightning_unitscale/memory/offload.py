"""Choose saved values that wait in host memory, and when their copies start and end.

A value is idle from its last reader in the forward pass to its first one in the backward pass. Its
copy to the host starts when it becomes idle, and it is fetched before it is read again. Copies run
while the device computes, one after the other in each direction. The plan fixes the operations at
which they start and are waited for, so the bytes on the device do not depend on their speed.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from lightning_unitscale.arguments import shown
from lightning_unitscale.memory.budgets import Budget
from lightning_unitscale.memory.costs import CostModel, default_cost_model
from lightning_unitscale.memory.gpus import GPU, GPUS, present_gpu
from lightning_unitscale.memory.problem import Ints, Mask, NodeRegion, RematProblem
from lightning_unitscale.memory.schedule import BackwardOrder, PlanTimeline

# Copies in one direction that have started and that computing has not yet waited for.
MAX_IN_FLIGHT = 16
# A copy that is planned as if it ran this many times as fast frees memory earlier, and computing
# may wait for it. The last one is waited for at once. The second numbers limit copies in flight:
# with one, values that would queue for the link stay on the device.
_HASTES = ((1.0, MAX_IN_FLIGHT), (1.0, 1), (2.0, MAX_IN_FLIGHT), (2.0, 1), (1e9, MAX_IN_FLIGHT))
_NUM_SHARES = 12  # numbers of values that are tried, as shares of all bytes that can be moved
_LEAST_SHARE = 1 / 4096  # a smaller share of all bytes that can be moved is not worth a copy


@dataclass(frozen=True)
class HostLink:
    """The connection between a device and the host's memory.

    Attributes:
        bytes_per_second: Rate of a large copy in one direction.
        latency_seconds: Additional time of each copy.
    """

    bytes_per_second: float
    latency_seconds: float = 1e-5

    def seconds(self, num_bytes: int, haste: float = 1.0) -> float:
        """Return the time of one copy."""
        return (num_bytes / self.bytes_per_second + self.latency_seconds) / haste


Offload = Literal["host"] | HostLink | None
"""``"host"`` for the link of the device that runs the step, or a link to assume."""
OP_BY_OP = (
    "Inductor may reorder operations, so copies to the host would not end where the plan expects "
    "it. Leave compile=True out, or leave offload out."
)
# Of the link's rate, after the headers of its packets (24 bytes for 128 to 256 of data).
_LINK_SHARE = 0.8
# A CPU copies at the rate at which it moves bytes: each is read and written.
_CPU_LINK = HostLink(4e9)
_MEASURED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class IdleValue:
    """A saved value between its readers. Places are those of operations in the timeline."""

    node: int
    num_bytes: int
    start: int  # its last reader in the forward pass, or itself
    use: int  # its first reader in the backward pass


@dataclass(frozen=True)
class Move:
    """One saved value that waits in host memory. Places are those of operations in the timeline."""

    node: int
    start: int  # the copy to the host starts after this operation
    release: int  # after this operation computing waits for it, and the device's memory is free
    fetch: int  # the copy back starts before this operation
    use: int  # before this operation computing waits for it


@dataclass(frozen=True, eq=False)
class ChosenMoves:
    """A choice of moves for one plan, with its costs."""

    moves: tuple[Move, ...]
    exposed_seconds: float  # in which computing waits for copies
    timeline: PlanTimeline = field(repr=False)  # the plan's, without the moved values


def without_moved(
    problem: RematProblem, timeline: PlanTimeline, moves: Sequence[Move]
) -> PlanTimeline:
    """Return the timeline of a plan whose values are moved, from that without moves."""
    changes = np.zeros(len(timeline.nodes) + 1, dtype=np.int64)
    sizes = problem.num_bytes[[move.node for move in moves]] if moves else np.zeros(0, np.int64)
    np.add.at(changes, [move.release + 1 for move in moves], sizes)
    np.add.at(changes, [move.fetch for move in moves], -sizes)
    live = timeline.live_bytes - np.cumsum(changes)[:-1]
    return PlanTimeline(timeline.nodes, live, timeline.num_forward)


def idle_values(
    problem: RematProblem, saved: Mask, order: BackwardOrder, timeline: PlanTimeline
) -> list[IdleValue]:
    """Return the saved values that can be moved, in the order in which they become idle."""
    base, num_forward = problem.base, timeline.num_forward
    can_move = saved & problem.can_offload & (problem.region == NodeRegion.FORWARD)
    can_move &= base == np.arange(len(problem))
    # Values that the caller gets stay in the device's memory anyway.
    can_move[base[[*problem.forward_outputs, *problem.backward_outputs]]] = False
    nodes = timeline.nodes
    readers, read = problem.reads(nodes)
    last = np.full(len(problem), -1, dtype=np.int64)
    # A view counts as a reader of its base: autograd may make it in either pass.
    np.maximum.at(last, base[nodes[:num_forward]], np.arange(num_forward))
    in_forward = readers < num_forward
    np.maximum.at(last, base[read[in_forward]], readers[in_forward])
    first = np.full(len(problem), len(nodes), dtype=np.int64)
    np.minimum.at(first, base[read[~in_forward]], readers[~in_forward])
    can_move &= (last >= 0) & (first < len(nodes))
    sizes = np.where(can_move, problem.num_bytes, 0)
    can_move &= sizes > sizes.sum() * _LEAST_SHARE
    values = [
        IdleValue(i, int(sizes[i]), int(last[i]), int(first[i]))
        for i in np.flatnonzero(can_move).tolist()
    ]
    return sorted(values, key=lambda value: (value.start, value.node))


def start_times(problem: RematProblem, timeline: PlanTimeline) -> list[float]:
    """Return the time at which each operation starts without copies, and that of the end."""
    return [0.0, *np.cumsum(problem.seconds[timeline.nodes]).tolist()]


def scheduled(
    values: Sequence[IdleValue],
    starts: Sequence[float],
    num_forward: int,
    link: HostLink,
    haste: float = 1.0,
    max_in_flight: int = MAX_IN_FLIGHT,
) -> tuple[Move, ...]:
    """Return moves that no operation waits for if copies are ``haste`` times as fast as the link.

    Each value leaves the device as early as possible, and returns as late as possible. A value is
    left out if there is no time for its copies. ``values`` are in the order in which they become
    idle. ``starts`` has the start of each operation, and the end of the last one.
    """
    leaving: list[tuple[IdleValue, int]] = []
    pending: deque[int] = deque()
    free_at = 0.0
    for value in values:
        while pending and pending[0] <= value.start:
            pending.popleft()
        begin = max(free_at, starts[value.start + 1])
        end = begin + link.seconds(value.num_bytes, haste)
        release = max(bisect_left(starts, end) - 1, value.start)
        # The memory must be free when the backward pass, another graph, begins.
        if release < num_forward and len(pending) < max_in_flight:
            leaving.append((value, release))
            pending.append(release)
            free_at = end
    moves: list[Move] = []
    fetches: deque[int] = deque()
    busy_from = starts[-1]
    for value, release in sorted(leaving, key=lambda pair: (-pair[0].use, -pair[0].node)):
        while fetches and fetches[0] >= value.use:
            fetches.popleft()
        begin = min(busy_from, starts[value.use]) - link.seconds(value.num_bytes, haste)
        fetch = min(bisect_right(starts, begin) - 1, value.use)
        if fetch >= num_forward and len(fetches) < max_in_flight:
            moves.append(Move(value.node, value.start, release, fetch, value.use))
            fetches.append(fetch)
            busy_from = begin
    return tuple(sorted(moves, key=lambda move: (move.start, move.node)))


def exposed_seconds(
    problem: RematProblem, moves: Sequence[Move], starts: Sequence[float], link: HostLink
) -> float:
    """Simulate copies in both directions during the operations, and sum the time of waiting."""
    sizes: list[int] = problem.num_bytes[[move.node for move in moves]].tolist() if moves else []
    copies = {move.node: link.seconds(size) for move, size in zip(moves, sizes, strict=True)}
    delay = leaves_at = returns_at = 0.0
    left: dict[int, float] = {}
    returned: dict[int, float] = {}
    for place, kind, _, node in _events(moves):
        now = starts[place] + delay
        if kind == _LEAVE:
            leaves_at = left[node] = max(now, leaves_at) + copies[node]
        elif kind == _RETURN:
            returns_at = returned[node] = max(now, returns_at) + copies[node]
        else:
            delay += max(0.0, (left if kind == _LEFT else returned)[node] - now)
    return delay


# Kinds of events, in their order before an operation: a copy starts, or computing waits for it.
_LEAVE, _LEFT, _RETURN, _RETURNED = range(4)


def _events(moves: Sequence[Move]) -> list[tuple[int, int, int, int]]:
    """Return (operation before which it happens, kind, order within the kind, node) in order."""
    events = []
    for order, move in enumerate(sorted(moves, key=lambda move: (move.start, move.node))):
        events.append((move.start + 1, _LEAVE, order, move.node))
        events.append((move.release + 1, _LEFT, order, move.node))
    for order, move in enumerate(sorted(moves, key=lambda move: (move.fetch, move.use, move.node))):
        events.append((move.fetch, _RETURN, order, move.node))
        events.append((move.use, _RETURNED, order, move.node))
    return sorted(events)


def offloads(
    problem: RematProblem, saved: Mask, order: BackwardOrder, timeline: PlanTimeline, link: HostLink
) -> list[ChosenMoves]:
    """Return choices of moves for one plan, from few to many and from hidden to exposed copies."""
    # The values that are idle longest are moved first.
    values = idle_values(problem, saved, order, timeline)
    starts = start_times(problem, timeline)
    found: list[ChosenMoves] = []
    known: set[tuple[Move, ...]] = {()}
    for chosen in _shares(values, starts):
        for haste, in_flight in _HASTES:
            moves = scheduled(chosen, starts, timeline.num_forward, link, haste, in_flight)
            if moves not in known:
                known.add(moves)
                exposed = exposed_seconds(problem, moves, starts, link)
                found.append(ChosenMoves(moves, exposed, without_moved(problem, timeline, moves)))
    return found


def _shares(values: Sequence[IdleValue], starts: Sequence[float]) -> Iterator[list[IdleValue]]:
    """Yield the values that are idle longest, for growing shares of all bytes."""
    if not values:
        return
    idle = [starts[value.use] - starts[value.start + 1] for value in values]
    by_length: Ints = np.argsort(-np.array(idle), kind="stable")
    sizes = np.cumsum([values[i].num_bytes for i in by_length.tolist()])
    aims = sizes[-1] * np.arange(1, _NUM_SHARES + 1) / _NUM_SHARES
    for count in np.unique(np.searchsorted(sizes, aims * (1 - 1e-12)) + 1).tolist():
        yield [values[i] for i in sorted(by_length[:count].tolist())]


def check_offload(offload: Offload, budget: Budget) -> Offload:
    """Return a checked ``offload``, which needs a budget that limits bytes."""
    if offload is not None and offload != "host" and not isinstance(offload, HostLink):
        raise ValueError(
            f"offload={shown(offload)}: not a place for saved tensors. Expected 'host', for pinned "
            "host memory, or None. Pass offload='host'."
        )
    if offload is not None and budget in ("min_cut", "default"):
        raise ValueError(
            f"offload={shown(offload)}: budget={budget!r} limits no bytes, so nothing would be "
            "moved. Pass a budget in bytes or a float such as budget=0.5, or leave offload out."
        )
    return offload


def described_link(gpu: GPU) -> HostLink:
    """Return the link of a GPU that need not exist here."""
    return HostLink(_LINK_SHARE * gpu.host_bytes_per_second)


def gpu_cost_model(gpu: GPU) -> CostModel:
    """Return the speed of one GPU, at the rates of its data sheet."""
    # No step is faster, so in a real one copies have more time than planned.
    default = default_cost_model("cuda")
    return CostModel(
        gpu.flops_per_second, gpu.bytes_per_second, default.overhead_seconds, default.random_seconds
    )


def link_of(device: str) -> HostLink:
    """Return the link of a device: a named GPU's as described, this machine's as measured."""
    kind, _, name = device.partition(":")
    if kind != "cuda":
        return _CPU_LINK
    if name in GPUS:
        return described_link(GPUS[name])
    if not torch.cuda.is_available():
        return described_link(present_gpu())
    return measured_link(torch.cuda.current_device())


@functools.cache
def measured_link(device: int) -> HostLink:
    """Return the link of a GPU from pinned copies, at the rate of the slower direction."""
    on_device = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
    on_host = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, pin_memory=True)
    return HostLink(min(_rate(on_host, on_device), _rate(on_device, on_host)))


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    device = next(tensor.device for tensor in (target, source) if tensor.is_cuda)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    milliseconds = []
    with torch.cuda.device(device):
        for _ in range(3):
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            milliseconds.append(begin.elapsed_time(end))
    return source.numel() / (1e-3 * min(milliseconds))

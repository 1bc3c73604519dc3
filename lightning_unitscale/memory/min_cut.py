"""Cut a joint graph: into blocks, and by minimum cuts from the least time to the least memory.

A block begins where the forward pass has only one tensor alive.

References:
    Chen, Moreau, Jiang et al., "TVM", and Jain et al., "Checkmate" (arXiv 1910.02653), on
    rematerialization as optimization. The two-terminal cut with split nodes is the classic
    project-selection construction (Picard 1976).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from lightning_unitscale.memory.problem import (
    Floats,
    Ints,
    Mask,
    NodeRegion,
    RematProblem,
    recomputed,
)

# Share of a separator's bytes that may be alive besides its tensor: statistics, scalars.
_BESIDE = 1 / 16
# Values alive for more of the forward pass than this are tables and masks that blocks share.
_SHARED = 1 / 4
# Operations of a block. A chain that can be cut everywhere is left to cuts within its blocks.
_LEAST_OPERATIONS = 4
# Fields that are equal for the nodes of structurally identical blocks.
_ALIKE = ("kind", "num_bytes", "workspace_bytes", "flops", "region", "can_save", "can_recompute",
          "in_forward")  # fmt: skip
_MAX_BLOCKS = 100  # small blocks are joined to their successors until there are fewer


@dataclass(frozen=True)
class Blocks:
    """Joint graph as a chain of blocks."""

    problem: RematProblem
    separators: tuple[int, ...]  # base of the tensor that leads from each block to the next
    block: Ints  # block of each node; -1 for inputs

    def __len__(self) -> int:
        return len(self.separators) + 1

    @cached_property
    def members(self) -> tuple[Ints, ...]:
        """Return the nodes of each block, forward and backward, in ascending order."""
        by_block = np.argsort(self.block, kind="stable")
        ends = np.searchsorted(self.block[by_block], np.arange(len(self) + 1))
        return tuple(np.split(by_block, ends)[1:-1])

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Number the blocks so that blocks that differ only in their place get the same number."""
        numbers: dict[object, int] = {}
        return tuple(numbers.setdefault(self._signature(i), len(numbers)) for i in range(len(self)))

    @cached_property
    def read_later(self) -> Mask:
        """Mark the forward values that a later block or another block's backward pass reads."""
        problem, block = self.problem, self.block
        producers, users = problem.edges
        crosses = (block[producers] >= 0) & (block[producers] != block[users])
        is_read = np.zeros(len(problem), dtype=np.bool_)
        is_read[producers[crosses & (problem.region[producers] == NodeRegion.FORWARD)]] = True
        return is_read

    def gradient_bytes(self) -> Ints:
        """Return the bytes of the gradients that the backward pass of each block returns."""
        bases = np.unique(self.problem.base[list(self.problem.backward_outputs)])
        bases = bases[self.block[bases] >= 0]
        num_bytes = np.zeros(len(self), dtype=np.int64)
        np.add.at(num_bytes, self.block[bases], self.problem.num_bytes[bases])
        return num_bytes

    def _signature(self, index: int) -> object:
        nodes = self.problem.nodes
        members: list[int] = self.members[index].tolist()
        position = {node: i for i, node in enumerate(members)}
        boundary = self.separators[index - 1] if index else -1
        end = self.separators[index] if index < len(self.separators) else -1
        returned = set(self.problem.backward_outputs)
        rows: list[object] = [index == 0, index == len(self) - 1, position.get(end, -1)]
        for member in members:
            node = nodes[member]
            reads = tuple(
                (position[i], 0)
                if i in position
                else (-2 if i == boundary else -1, nodes[i].num_bytes, int(nodes[i].region))
                for i in node.inputs
            )
            alike = tuple(getattr(node, name) for name in _ALIKE)
            seconds, is_read = round(node.seconds, 9), bool(self.read_later[member])
            rows.append((alike, seconds, member in returned, is_read, reads))
        return tuple(rows)


def find_blocks(problem: RematProblem) -> Blocks:
    """Cut at every tensor that is alone between the operations before and after it."""
    forward = np.flatnonzero((problem.region == NodeRegion.FORWARD) & problem.in_forward)
    time = np.full(len(problem), -1, dtype=np.int64)
    time[forward] = np.arange(len(forward))
    work = np.cumsum((problem.seconds[forward] > 0).astype(np.int64))
    separators = _thinned(_separators(problem, forward, time), work)
    block = np.full(len(problem), -1, dtype=np.int64)
    ends = [end for end, _ in separators]
    block[forward] = np.searchsorted(np.array(ends, dtype=np.int64), time[forward], side="left")
    _place_others(problem, block, len(separators))
    return Blocks(problem, tuple(base for _, base in separators), block)


def _separators(problem: RematProblem, forward: Ints, time: Ints) -> list[tuple[int, int]]:
    """Return (last operation before the cut, the tensor alive there) of every possible cut."""
    count = len(forward)
    first = np.full(len(problem), -1, dtype=np.int64)
    last = np.full(len(problem), -1, dtype=np.int64)
    bases = np.unique(problem.base[forward])
    bases = bases[(problem.region[bases] == NodeRegion.FORWARD) & (problem.num_bytes[bases] > 0)]
    first[bases] = time[problem.owner[bases]]
    producers, users = problem.edges
    runs = (time[users] >= 0) & (time[producers] >= 0)
    np.maximum.at(last, problem.base[producers[runs]], time[users[runs]])
    spans = last[bases] - first[bases]
    alive = bases[(spans > 0) & (spans <= max(8, _SHARED * count))]
    starting: list[list[int]] = [[] for _ in range(count)]
    for base in alive.tolist():
        starting[first[base]].append(base)
    sizes, ends = problem.num_bytes.tolist(), last.tolist()
    live: list[int] = []
    separators: list[tuple[int, int]] = []
    # An operation with several outputs stays together with these.
    is_whole = np.ones(count, dtype=np.bool_)
    of_tuple = runs & problem.is_tuple[producers]
    for producer, user in zip(producers[of_tuple], users[of_tuple], strict=True):
        is_whole[time[producer] : time[user]] = False
    seen: set[int] = set()
    for now in range(count - 1):
        live = [base for base in live if ends[base] > now] + starting[now]
        if not live:
            continue
        largest = max(live, key=lambda base: sizes[base])
        beside = sum(sizes[base] for base in live) - sizes[largest]
        allowed = problem.nodes[largest].can_save and time[largest] <= now and is_whole[now]
        if beside <= _BESIDE * sizes[largest] and allowed and largest not in seen:
            seen.add(largest)
            separators.append((now, largest))
    return separators


def _thinned(separators: list[tuple[int, int]], work: Ints) -> list[tuple[int, int]]:
    """Return separators with enough operations between them, which ``work`` counts."""
    least = _LEAST_OPERATIONS
    while True:
        kept: list[tuple[int, int]] = []
        done = 0
        for end, base in separators:
            if work[end] - done >= least and work[-1] - work[end] >= least:
                kept.append((end, base))
                done = int(work[end])
        if len(kept) < _MAX_BLOCKS:
            return kept
        least *= 2


def _place_others(problem: RematProblem, block: Ints, last_block: int) -> None:
    """Assign blocks to the nodes that run only in the backward pass."""
    # These loops use lists, because each step is too small for numpy.
    inputs = problem.inputs_of
    placed: list[int] = block.tolist()
    is_forward: list[bool] = (problem.region == NodeRegion.FORWARD).tolist()
    others = np.flatnonzero((problem.region == NodeRegion.FORWARD) & (block < 0)).tolist()
    for i in others:
        # Constants of the backward pass are placed with their readers, below.
        placed[i] = max((placed[j] for j in inputs[i]), default=-1)
    shared = _shared(problem, np.array(placed, dtype=np.int64)).tolist()
    highest = -1
    # The backward pass goes through the blocks in reverse. A predecessor of a block's operation
    # belongs to the block or to a later one.
    for i in np.flatnonzero(problem.region == NodeRegion.BACKWARD)[::-1].tolist():
        for j in inputs[i]:
            if is_forward[j] and not shared[j] and placed[j] > highest:
                highest = placed[j]
        placed[i] = max(highest, 0)
    for i in reversed(others):
        if placed[i] < 0:
            placed[i] = max((placed[j] for j in problem.users[i]), default=last_block)
    block[:] = placed


def _shared(problem: RematProblem, block: Ints) -> Mask:
    """Mark the forward values that more than two blocks read."""
    producers, users = problem.edges
    counts = problem.in_forward & (problem.region == NodeRegion.FORWARD)
    reads = (block[users] >= 0) & counts[producers]
    pairs = np.unique(np.stack([producers[reads], block[users[reads]]]), axis=1)
    return np.bincount(pairs[0], minlength=len(problem)) > 2


def segment_members(blocks: Blocks, start: int, stop: int) -> Ints:
    """Return the nodes of a segment of blocks, ascending."""
    return np.sort(np.concatenate(blocks.members[start:stop]))


T = TypeVar("T")
# scipy's maximum_flow computes in 32-bit integers and wraps silently. So all finite capacities
# together stay below this, and an infinite one is one more than their sum.
_FINITE_SUM = 2**29


def source_side(
    num_nodes: int, tails: Ints, heads: Ints, capacities: Floats, source: int, sink: int
) -> Mask:
    """Return the source side of the minimum cut that is nearest to the sink.

    References:
        Ford, Fulkerson (1956): every maximum flow gives this cut, the nodes that cannot reach the
        sink in the residual graph.
    """
    infinite = np.isinf(capacities)
    finite = capacities[~infinite]
    total = float(finite.sum())
    scale = (_FINITE_SUM - len(capacities) - 2) / total if total > 0 else 1.0
    scaled = np.zeros(len(capacities) + 1, dtype=np.int32)
    # A positive capacity stays positive, or cutting there would be free.
    scaled[:-1][~infinite] = np.where(finite > 0, np.maximum(np.floor(finite * scale), 1), 0)
    bound = int(scaled.sum()) + 1
    scaled[:-1][infinite] = bound
    # All flow comes through one more edge, so that it cannot wrap either.
    scaled[-1] = bound
    tails, heads = np.append(tails, num_nodes), np.append(heads, source)
    network = csr_matrix((scaled, (tails, heads)), shape=(num_nodes + 1, num_nodes + 1))
    flow = maximum_flow(network, num_nodes, sink)
    if flow.flow_value == bound:
        raise ValueError("capacities: no finite cut separates the source from the sink")
    # Backwards from the sink along edges with capacity left.
    residual = (network - flow.flow).T.tocsr()
    residual.eliminate_zeros()
    side = np.ones(num_nodes + 1, dtype=np.bool_)
    side[breadth_first_order(residual, sink, return_predecessors=False)] = False
    return side[:-1]


@dataclass(frozen=True)
class Cut:
    """One split of a problem."""

    saved: Mask  # nodes whose values are kept for the backward pass
    seconds: float  # of the recomputation
    saved_bytes: int  # each storage once


@dataclass(frozen=True, eq=False)
class CutNetwork:
    """Flow network of a problem. Its capacities depend on the price of a byte.

    Every forward node is split in two. The arc from the source to its first half costs its time: if
    cut, the node is recomputed. The arc between the halves costs its bytes: if cut, the node is
    saved. Arcs to its users' first halves cannot be cut, since recomputation needs its inputs.
    Nodes that the backward pass reads are tied to the sink.
    """

    problem: RematProblem
    again: Floats | None = None  # cost of recomputing each node, or ``None`` for its seconds

    @cached_property
    def _seconds(self) -> Floats:
        problem = self.problem
        again = problem.seconds if self.again is None else self.again
        # A node that the forward pass does not need runs once in any case.
        again = np.where(problem.in_forward, again, 0.0)
        runs_once = (problem.region != NodeRegion.FORWARD) | ~problem.can_recompute
        return np.where(runs_once, math.inf, again)

    @cached_property
    def _bytes(self) -> Floats:
        problem = self.problem
        is_input = problem.region == NodeRegion.INPUT
        size = problem.num_bytes[problem.base].astype(np.float64)
        is_output = np.isin(np.arange(len(problem)), problem.base[list(problem.forward_outputs)])
        return np.where(
            problem.can_save | is_input, np.where(is_output | is_input, 0.0, size), math.inf
        )

    @cached_property
    def _kept(self) -> Ints:
        """Return the nodes that are in the network."""
        return np.flatnonzero(self.problem.needed & (self.problem.region != NodeRegion.BACKWARD))

    @cached_property
    def _edges(self) -> tuple[Ints, Ints, int]:
        """Return the starts and ends of the edges, and the number of edges that cannot be cut."""
        problem, kept = self.problem, self._kept
        number = np.full(len(problem), -1, dtype=np.int64)
        number[kept] = np.arange(len(kept))
        producers, users = problem.edges
        inner = (number[producers] >= 0) & (number[users] >= 0)
        inner &= problem.region[users] == NodeRegion.FORWARD
        count = len(kept)
        source, sink = 2 * count, 2 * count + 1
        firsts = 2 * np.arange(count)
        pairs = np.unique(number[producers[inner]] * count + number[users[inner]])
        roots = np.flatnonzero(problem.read_in_backward[kept])
        sources, sinks = np.full(count, source), np.full(len(roots), sink)
        tails = np.concatenate([sources, firsts, 2 * (pairs // count) + 1, 2 * roots + 1])
        heads = np.concatenate([firsts, firsts + 1, 2 * (pairs % count), sinks])
        return tails, heads, len(pairs) + len(roots)

    def cut(self, seconds_per_byte: float) -> Cut:
        """Return the plan with the least time plus ``seconds_per_byte`` for each byte saved."""
        kept = self._kept
        tails, heads, num_others = self._edges
        others = np.full(num_others, math.inf)
        capacities = [self._seconds[kept], seconds_per_byte * self._bytes[kept], others]
        source, sink = 2 * len(kept), 2 * len(kept) + 1
        side = source_side(sink + 1, tails, heads, np.concatenate(capacities), source, sink)
        firsts = 2 * np.arange(len(kept))
        saved = np.zeros(len(self.problem), dtype=np.bool_)
        saved[kept] = side[firsts] & ~side[firsts + 1]
        return self.priced(saved)

    def priced(self, saved: Mask) -> Cut:
        """Return a plan with its cost."""
        again = self._seconds[recomputed(self.problem, saved)]
        return Cut(saved, _finite_sum(again), self.problem.saved_bytes(saved))

    def hull(self, max_cuts: int = 40) -> list[Cut]:
        """Return the lower convex hull of all plans, from the least time to the fewest bytes."""
        # It contains every plan that is best for some price of a byte. It is found by bisection:
        # the price at which two neighbors cost the same either gives a plan between them or shows
        # there is none.
        price = max(_finite_sum(self._seconds), 1e-12) / max(_finite_sum(self._bytes), 1.0)
        first, last = self.cut(price * 1e-5), self.cut(price * 1e5)
        cuts = [first, last]
        pending = [(first, last)]
        while pending and len(cuts) < max_cuts:
            pending.sort(key=lambda pair: pair[0].saved_bytes - pair[1].saved_bytes)
            left, right = pending.pop()
            num_bytes = left.saved_bytes - right.saved_bytes
            seconds = right.seconds - left.seconds
            if num_bytes <= 0 or seconds <= 0:
                continue
            price = seconds / num_bytes
            middle = self.cut(price)
            gain = left.seconds + price * left.saved_bytes
            cost = middle.seconds + price * middle.saved_bytes
            costs = [(cut.saved_bytes, cut.seconds) for cut in (left, right)]
            is_new = (middle.saved_bytes, middle.seconds) not in costs
            if cost < gain * (1 - 1e-6) and is_new:
                cuts.append(middle)
                pending += [(left, middle), (middle, right)]
        return non_dominated(cuts, lambda cut: (cut.seconds, cut.saved_bytes))


def _finite_sum(costs: Floats) -> float:
    return float(costs[np.isfinite(costs)].sum())


def non_dominated(plans: Iterable[T], costs: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the plans that no other beats in both costs, in ascending order of the first."""
    kept: list[T] = []
    for plan in sorted(plans, key=costs):
        if not kept or costs(plan)[1] < costs(kept[-1])[1]:
            kept.append(plan)
    return kept

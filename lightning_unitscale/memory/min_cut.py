"""Find minimum cuts of a problem, from the least time to the least memory.

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

"""Minimum cuts, and all cuts between least time and least memory. Pure: numbers in, masks out.

References:
    Chen, Moreau, Jiang et al., "TVM", and Jain et al., "Checkmate" (arXiv 1910.02653), on
    rematerialization as an optimization problem; the two-terminal cut with split nodes is the
    classic project-selection construction (Picard 1976).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from lightning_unitscale.remat.problem import (
    Floats,
    Ints,
    Mask,
    NodeRegion,
    RematProblem,
    recomputed,
)

# scipy's maximum_flow computes in 32-bit integers and wraps silently: all finite capacities
# together stay below this, and an infinite one is one more than all of them.
_FINITE_SUM = 2**29


class FlowNetwork:
    """Nodes and edges, to be cut again and again at different capacities.

    Args:
        num_nodes: Number of nodes; edges join nodes ``0 .. num_nodes - 1``.
        tails: Start of every edge; no edge is given twice.
        heads: End of every edge.
        source: Node on the source side.
        sink: Node on the sink side.
    """

    def __init__(self, num_nodes: int, tails: Ints, heads: Ints, source: int, sink: int) -> None:
        self._num_nodes, self._source, self._sink = num_nodes, source, sink
        # Every edge and its reverse, by tail, then head: the rows of scipy's flow.
        forth, back = tails * num_nodes + heads, heads * num_nodes + tails
        codes = np.unique(np.concatenate([forth, back]))
        self._tails, self._heads = codes // num_nodes, codes % num_nodes
        self._starts = np.searchsorted(self._tails, np.arange(num_nodes + 1))
        self._edge = np.searchsorted(codes, forth)
        self._reverse = np.searchsorted(codes, self._heads * num_nodes + self._tails)
        # Which edges were infinite when a cut was last known to exist.
        self._uncut: Mask | None = None

    def source_side(self, capacities: Floats) -> Mask:
        """The larger source side of a minimum cut: the cut lies as near to the sink as it can.

        Args:
            capacities: Non-negative capacity of every edge, ``inf`` where it must not be cut.

        Returns:
            A mask of the nodes on the source side.

        Raises:
            ValueError: If no cut of finite capacity exists.

        References:
            Ford, Fulkerson (1956): every maximum flow gives the cut nearest to the sink as the
            nodes that cannot reach it in the residual graph.
        """
        infinite = np.isinf(capacities)
        self._check_finite(infinite)
        finite = capacities[~infinite]
        total = float(finite.sum())
        scale = (_FINITE_SUM - len(capacities) - 2) / total if total > 0 else 1.0
        scaled = np.zeros(len(capacities), dtype=np.int64)
        # A positive capacity stays positive, or cutting there would be free.
        scaled[~infinite] = np.where(finite > 0, np.maximum(np.floor(finite * scale), 1), 0)
        scaled[infinite] = int(scaled.sum()) + 1
        limits = np.zeros(len(self._heads), dtype=np.int32)
        limits[self._edge] = scaled
        # Backwards from the sink along edges with capacity left.
        is_left = (limits - self._flow(limits) > 0)[self._reverse]
        return ~self._reached(is_left, self._sink)

    def _check_finite(self, infinite: Mask) -> None:
        if self._uncut is not None and np.array_equal(infinite, self._uncut):
            return
        uncut = np.zeros(len(self._heads), dtype=np.bool_)
        uncut[self._edge[infinite]] = True
        if self._reached(uncut, self._source)[self._sink]:
            raise ValueError("capacities: no finite cut separates the source from the sink")
        self._uncut = infinite

    def _flow(self, limits: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """A maximum flow along every edge of :attr:`_heads`."""
        graph = self._matrix(limits, self._heads, self._starts)
        flow = maximum_flow(graph, self._source, self._sink).flow
        if len(flow.data) == len(limits):  # every edge has its reverse: nothing was added
            return np.asarray(flow.data)
        return np.asarray(flow[self._tails, self._heads]).ravel()  # pragma: no cover

    def _reached(self, is_open: Mask, start: int) -> Mask:
        """Nodes that open edges lead to from ``start``."""
        starts = np.concatenate([[0], np.cumsum(is_open)])[self._starts]
        heads = self._heads[is_open]
        graph = self._matrix(np.ones(len(heads)), heads, starts)
        reached = np.zeros(self._num_nodes, dtype=np.bool_)
        reached[breadth_first_order(graph, start, return_predecessors=False)] = True
        return reached

    def _matrix(self, values: Any, heads: Ints, starts: Ints) -> csr_matrix:
        return csr_matrix((values, heads, starts), shape=(self._num_nodes, self._num_nodes))


@dataclass(frozen=True)
class Cut:
    """One way to split a problem.

    Attributes:
        saved: Nodes whose values are kept for the backward pass.
        seconds: Time of what runs a second time.
        saved_bytes: Bytes kept, each storage once.
    """

    saved: Mask
    seconds: float
    saved_bytes: int


class CutNetwork:
    """The flow network of a problem; its capacities depend on what a byte is worth.

    Every forward node is two: an arc from the source to the first costs the node's time (it is on
    the sink's side and runs again), the arc between them costs its bytes (it is saved), and arcs to
    its users' first halves cannot be cut: what runs again needs its inputs. Nodes that the backward
    pass reads are tied to the sink.

    Args:
        problem: The joint graph.
        seconds: Time of running each node again, ``inf`` where it must not run; by default the
            problem's own.
    """

    def __init__(self, problem: RematProblem, seconds: Floats | None = None) -> None:
        self.problem = problem
        runs_once = problem.region != NodeRegion.FORWARD
        again = problem.seconds if seconds is None else seconds
        # What the forward pass does not need runs once wherever it is put.
        again = np.where(problem.in_forward, again, 0.0)
        self._seconds = np.where(runs_once | ~problem.can_recompute, math.inf, again)
        saves = problem.can_save | (problem.region == NodeRegion.INPUT)
        free = np.zeros(len(problem), dtype=np.bool_)
        free[problem.base[list(problem.forward_outputs)]] = True
        free |= problem.region == NodeRegion.INPUT
        size = problem.num_bytes[problem.base].astype(np.float64)
        self._bytes = np.where(saves, np.where(free, 0.0, size), math.inf)

    @cached_property
    def _kept(self) -> Ints:
        """Nodes that are in the network."""
        problem = self.problem
        return np.flatnonzero(problem.needed & (problem.region != NodeRegion.BACKWARD))

    @cached_property
    def _network(self) -> tuple[FlowNetwork, int]:
        """The network, and how many of its edges come after those that cost time or bytes."""
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
        roots = np.flatnonzero((problem.wanted | _read_inputs(problem))[kept])
        sources, sinks = np.full(count, source), np.full(len(roots), sink)
        tails = np.concatenate([sources, firsts, 2 * (pairs // count) + 1, 2 * roots + 1])
        heads = np.concatenate([firsts, firsts + 1, 2 * (pairs % count), sinks])
        network = FlowNetwork(2 * count + 2, tails, heads, source, sink)
        return network, len(pairs) + len(roots)

    def cut(self, seconds_per_byte: float) -> Cut:
        """The plan with the least time plus ``seconds_per_byte`` for each byte saved.

        Raises:
            ValueError: If something may neither be saved nor run again.
        """
        kept = self._kept
        network, num_others = self._network
        size = self._bytes[kept]
        bounded = np.isfinite(size)
        weights = np.full(len(kept), math.inf)
        weights[bounded] = seconds_per_byte * size[bounded]
        others = np.full(num_others, math.inf)
        side = network.source_side(np.concatenate([self._seconds[kept], weights, others]))
        firsts = 2 * np.arange(len(kept))
        saved = np.zeros(len(self.problem), dtype=np.bool_)
        saved[kept] = side[firsts] & ~side[firsts + 1]
        return self.priced(saved)

    def priced(self, saved: Mask) -> Cut:
        """A plan with what it costs."""
        problem = self.problem
        runs = recomputed(problem, saved)
        again = self._seconds[runs]
        seconds = float(again[np.isfinite(again)].sum())
        return Cut(saved, seconds, problem.saved_bytes(saved, runs))

    def hull(self, max_cuts: int = 40) -> list[Cut]:
        """The lower convex hull of all plans, from the least time to the fewest bytes.

        Every plan that is best for some price of a byte is on it. Found by bisection: the price at
        which two neighbours cost the same either gives a plan between them or shows there is none.

        Args:
            max_cuts: Cuts to stop after.
        """
        total_bytes = max(float(self._bytes[np.isfinite(self._bytes)].sum()), 1.0)
        finite = self._seconds[np.isfinite(self._seconds)]
        total_seconds = max(float(finite.sum()), 1e-12)
        price = total_seconds / total_bytes
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
        return non_dominated(cuts)


def _read_inputs(problem: RematProblem) -> Mask:
    """Inputs that the backward pass reads itself."""
    read = np.zeros(len(problem), dtype=np.bool_)
    producers, users = problem.edges
    by_backward = problem.region[users] == NodeRegion.BACKWARD
    read[producers[by_backward]] = True
    return read & (problem.region == NodeRegion.INPUT)


def non_dominated(cuts: Sequence[Cut]) -> list[Cut]:
    """The cuts that no other beats in time and bytes, the fastest first."""
    kept: list[Cut] = []
    for cut in sorted(cuts, key=lambda cut: (cut.seconds, cut.saved_bytes)):
        if not kept or cut.saved_bytes < kept[-1].saved_bytes:
            kept.append(cut)
    return kept

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

import numpy as np

from lightning_unitscale.remat.problem import (
    Floats,
    Ints,
    Mask,
    Region,
    RematProblem,
    recomputed,
)

try:
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    HAS_SCIPY = True
except ImportError:  # pragma: no cover - scipy is a dependency, but may be broken on a platform
    HAS_SCIPY = False

# scipy's maximum_flow computes in 32-bit integers and wraps silently: all finite capacities
# together stay below this, and an infinite one is one more than all of them.
_FINITE_SUM = 2**29


def source_side(
    num_nodes: int,
    tails: Ints,
    heads: Ints,
    capacities: Floats,
    source: int,
    sink: int,
    *,
    use_scipy: bool = HAS_SCIPY,
) -> Mask:
    """The larger source side of a minimum cut: the cut lies as near to the sink as it can.

    Args:
        num_nodes: Number of nodes; edges join nodes ``0 .. num_nodes - 1``.
        tails: Start of every edge; no edge is given twice.
        heads: End of every edge.
        capacities: Non-negative capacity of every edge, ``inf`` where it must not be cut.
        source: Node on the source side.
        sink: Node on the sink side.
        use_scipy: Whether scipy's flow is used, else networkx's.

    Returns:
        A mask of the nodes on the source side.

    Raises:
        ValueError: If no cut of finite capacity exists.

    References:
        Ford, Fulkerson (1956): every maximum flow gives the cut nearest to the sink as the nodes
        that cannot reach it in the residual graph.
    """
    infinite = np.isinf(capacities)
    if _reaches(num_nodes, tails[infinite], heads[infinite], source)[sink]:
        raise ValueError("capacities: no finite cut separates the source from the sink")
    total = float(capacities[~infinite].sum())
    scale = (_FINITE_SUM - len(capacities) - 2) / total if total > 0 else 1.0
    scaled = np.zeros(len(capacities), dtype=np.int64)
    # A positive capacity stays positive, or cutting there would be free.
    finite = capacities[~infinite]
    scaled[~infinite] = np.where(finite > 0, np.maximum(np.floor(finite * scale), 1), 0)
    scaled[infinite] = int(scaled.sum()) + 1
    find = _residual_by_scipy if use_scipy else _residual_by_networkx
    from_tails, from_heads = find(num_nodes, tails, heads, scaled, source, sink)
    # Backwards from the sink along edges with capacity left.
    return ~_reaches(num_nodes, from_heads, from_tails, sink)


def _reaches(num_nodes: int, tails: Ints, heads: Ints, start: int) -> Mask:
    reached = np.zeros(num_nodes, dtype=np.bool_)
    if HAS_SCIPY:
        graph = csr_matrix(
            (np.ones(len(tails), dtype=np.int8), (tails, heads)), shape=(num_nodes, num_nodes)
        )
        reached[breadth_first_order(graph, start, return_predecessors=False)] = True
        return reached
    following: list[list[int]] = [[] for _ in range(num_nodes)]
    for tail, head in zip(tails.tolist(), heads.tolist(), strict=True):
        following[tail].append(head)
    pending = [start]
    reached[start] = True
    while pending:
        for head in following[pending.pop()]:
            if not reached[head]:
                reached[head] = True
                pending.append(head)
    return reached


def _residual_by_scipy(
    num_nodes: int, tails: Ints, heads: Ints, capacities: Ints, source: int, sink: int
) -> tuple[Ints, Ints]:
    graph = csr_matrix((capacities.astype(np.int32), (tails, heads)), shape=(num_nodes, num_nodes))
    flow = maximum_flow(graph, source, sink).flow
    residual = (graph - flow).tocoo()
    left = residual.data > 0
    return residual.row[left].astype(np.int64), residual.col[left].astype(np.int64)


def _residual_by_networkx(
    num_nodes: int, tails: Ints, heads: Ints, capacities: Ints, source: int, sink: int
) -> tuple[Ints, Ints]:
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(range(num_nodes))
    for tail, head, capacity in zip(
        tails.tolist(), heads.tolist(), capacities.tolist(), strict=True
    ):
        graph.add_edge(tail, head, capacity=capacity)
    flow = nx.algorithms.flow.boykov_kolmogorov(graph, source, sink)
    pairs = [
        (tail, head)
        for tail, head, data in flow.edges(data=True)
        if data["capacity"] - data["flow"] > 0
    ]
    rows = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return rows[:, 0], rows[:, 1]


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
        use_scipy: Whether scipy's flow is used, else networkx's.
    """

    def __init__(
        self,
        problem: RematProblem,
        seconds: Floats | None = None,
        *,
        use_scipy: bool = HAS_SCIPY,
    ) -> None:
        self.problem = problem
        self._use_scipy = use_scipy
        runs_once = problem.region != Region.FORWARD
        again = problem.seconds if seconds is None else seconds
        # What the forward pass does not need runs once wherever it is put.
        again = np.where(problem.in_forward, again, 0.0)
        self._seconds = np.where(runs_once | ~problem.can_recompute, math.inf, again)
        saves = problem.can_save | (problem.region == Region.INPUT)
        free = np.zeros(len(problem), dtype=np.bool_)
        free[problem.base[list(problem.forward_outputs)]] = True
        free |= problem.region == Region.INPUT
        size = problem.num_bytes[problem.base].astype(np.float64)
        self._bytes = np.where(saves, np.where(free, 0.0, size), math.inf)

    @cached_property
    def _structure(self) -> tuple[Ints, Ints, Ints, int]:
        problem = self.problem
        usable = problem.needed & (problem.region != Region.BACKWARD)
        number = np.full(len(problem), -1, dtype=np.int64)
        kept = np.flatnonzero(usable)
        number[kept] = np.arange(len(kept))
        producers, users = problem.edges
        inner = usable[producers] & usable[users] & (problem.region[users] == Region.FORWARD)
        pairs = np.unique(np.stack([producers[inner], users[inner]]), axis=1)
        return kept, 2 * number[pairs[0]] + 1, 2 * number[pairs[1]], len(kept)

    def cut(self, seconds_per_byte: float) -> Cut:
        """The plan with the least time plus ``seconds_per_byte`` for each byte saved.

        Raises:
            ValueError: If something may neither be saved nor run again.
        """
        problem = self.problem
        kept, inner_tails, inner_heads, count = self._structure
        source, sink = 2 * count, 2 * count + 1
        firsts = 2 * np.arange(count)
        wanted = problem.wanted | _read_inputs(problem)
        roots = np.flatnonzero(wanted[kept])
        size = self._bytes[kept]
        weights = np.where(
            np.isinf(size), math.inf, seconds_per_byte * np.where(np.isinf(size), 0.0, size)
        )
        tails = np.concatenate([np.full(count, source), firsts, inner_tails, 2 * roots + 1])
        heads = np.concatenate([firsts, firsts + 1, inner_heads, np.full(len(roots), sink)])
        capacities = np.concatenate(
            [
                self._seconds[kept],
                weights,
                np.full(len(inner_tails) + len(roots), math.inf),
            ]
        )
        side = source_side(
            2 * count + 2, tails, heads, capacities, source, sink, use_scipy=self._use_scipy
        )
        saved = np.zeros(len(problem), dtype=np.bool_)
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
        found = [first, last]
        pending = [(first, last)]
        while pending and len(found) < max_cuts:
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
            if cost < gain * (1 - 1e-6) and not _same(middle, (left, right)):
                found.append(middle)
                pending += [(left, middle), (middle, right)]
        return non_dominated(found)


def _read_inputs(problem: RematProblem) -> Mask:
    """Inputs that the backward pass reads itself."""
    read = np.zeros(len(problem), dtype=np.bool_)
    producers, users = problem.edges
    by_backward = problem.region[users] == Region.BACKWARD
    read[producers[by_backward]] = True
    return read & (problem.region == Region.INPUT)


def _same(one: Cut, others: Sequence[Cut]) -> bool:
    return any(
        one.saved_bytes == other.saved_bytes and one.seconds == other.seconds for other in others
    )


def non_dominated(cuts: Sequence[Cut]) -> list[Cut]:
    """The cuts that no other beats in time and bytes, the fastest first."""
    kept: list[Cut] = []
    for one in sorted(cuts, key=lambda cut: (cut.seconds, cut.saved_bytes)):
        if not kept or one.saved_bytes < kept[-1].saved_bytes:
            kept.append(one)
    return kept

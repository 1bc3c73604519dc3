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

from lightning_unitscale.remat.flow import HAS_SCIPY, FlowNetwork
from lightning_unitscale.remat.problem import (
    Floats,
    Ints,
    Mask,
    Region,
    RematProblem,
    recomputed,
)


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
    def _kept(self) -> Ints:
        """Nodes that are in the network."""
        problem = self.problem
        return np.flatnonzero(problem.needed & (problem.region != Region.BACKWARD))

    @cached_property
    def _network(self) -> tuple[FlowNetwork, int]:
        """The network, and how many of its edges come after those that cost time or bytes."""
        problem, kept = self.problem, self._kept
        number = np.full(len(problem), -1, dtype=np.int64)
        number[kept] = np.arange(len(kept))
        producers, users = problem.edges
        inner = (number[producers] >= 0) & (number[users] >= 0)
        inner &= problem.region[users] == Region.FORWARD
        count = len(kept)
        source, sink = 2 * count, 2 * count + 1
        firsts = 2 * np.arange(count)
        pairs = np.unique(number[producers[inner]] * count + number[users[inner]])
        roots = np.flatnonzero((problem.wanted | _read_inputs(problem))[kept])
        sources, sinks = np.full(count, source), np.full(len(roots), sink)
        tails = np.concatenate([sources, firsts, 2 * (pairs // count) + 1, 2 * roots + 1])
        heads = np.concatenate([firsts, firsts + 1, 2 * (pairs % count), sinks])
        network = FlowNetwork(2 * count + 2, tails, heads, source, sink, use_scipy=self._use_scipy)
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

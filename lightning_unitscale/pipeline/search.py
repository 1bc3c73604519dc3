"""The search for balanced cuts, for one stage or several on each rank. Pure.

A stage costs the estimated seconds of its operations, forward and backward, and of sending and
receiving what crosses its edges.

With one stage per rank, dynamic programming finds the shortest step: for a limit on the slowest
stage the cuts that send least, and the best of these limits. With several, each of those cuts is
moved in turn to where the ranks are most equal, until none moves: where one stage of a rank costs
more than the others (an output layer that is one product), the rank's other stages get less. Moving
single cuts gets stuck, so this is done from many starting points; the random numbers start from the
same seed, so that all ranks find the same cuts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# By this fraction two sums may differ in their last bits.
_ROUNDING = 1e-9

# Of the moves for several stages per rank: sweeps over the cuts, and starting points.
_SWEEPS = 50
_STARTS = 300
# Every second start draws all cuts again; the others move about this fraction of the cuts.
_REDRAW = 2
_MOVED = 0.6

# For a stage, whether it may reach from one end (row) to another (column).
Allowed = Callable[[int], NDArray[np.bool_]]
_Costs = NDArray[np.float64]
# The slowest rank, then how unequal they are.
_Key = tuple[float, float]


@dataclass(frozen=True)
class CutCandidate:
    """A possible place of a cut.

    Attributes:
        before: Name of the operation behind it.
        seconds_before: Estimated seconds of all operations in front of it, both directions.
        boundary_bytes: Bytes that cross it, both directions together.
    """

    before: str
    seconds_before: float
    boundary_bytes: int


def choose_cuts(
    cuts: Sequence[CutCandidate],
    total: float,
    num_stages: int,
    bytes_per_second: float,
    num_microbatches: int,
    *,
    rank_of: Callable[[int], int] | None = None,
    allowed: Allowed | None = None,
) -> list[int]:
    """The cuts, as positions in ``cuts``, for which a step is short.

    With one stage per rank the result is proven best. With n microbatches a step takes
    ``(n - 1) * slowest + sum`` of the seconds of the stages. Under 1F1B, where forward and backward
    passes of different stages overlap, it takes no longer, and as long if the stages are equal.

    With several stages per rank those cuts are moved until the slowest rank is fast, which is no
    proven optimum.
    """
    ends = np.array([0.0, *(cut.seconds_before for cut in cuts), total])
    sends = np.array([0.0, *(cut.boundary_bytes / bytes_per_second for cut in cuts), 0.0])
    # Seconds of a stage from one end (row) to another (column).
    costs: _Costs = ends[None, :] - ends[:, None] + sends[:, None] + sends[None, :]
    costs[np.tril_indices(len(ends))] = np.inf
    stage_costs = [
        costs if allowed is None else np.where(allowed(stage), costs, np.inf)
        for stage in range(num_stages)
    ]
    chosen = _shortest_step(stage_costs, sends, total, num_microbatches)
    ranks = [rank_of(stage) if rank_of else stage for stage in range(num_stages)]
    if len(set(ranks)) < num_stages:
        chosen = _fastest_ranks(stage_costs, ranks, chosen)
    return [end - 1 for end in chosen[1:-1]]


def _shortest_step(
    stage_costs: Sequence[_Costs],
    sends: NDArray[np.float64],
    total: float,
    num_microbatches: int,
) -> list[int]:
    """The ends of the stages for which a step is shortest, with one stage per rank."""
    num_stages = len(stage_costs)
    slowest = np.full(len(sends), np.inf)
    slowest[0] = 0.0
    for costs in stage_costs:
        slowest = np.maximum(slowest[:, None], costs).min(axis=0)
    if not np.isfinite(slowest[-1]):
        raise ValueError(
            f"num_stages={num_stages}: none of the {len(sends) - 2} possible cuts will do."
        )
    fastest = float(slowest[-1])
    # The more a stage may take, the less is sent. Behind this limit that no longer pays.
    least, _ = _fewest_sent(stage_costs, sends, np.inf)
    most, best = _fewest_sent(stage_costs, sends, fastest * (1 + _ROUNDING))
    others = num_microbatches - 1
    window = 2 * (most - least) / others if others else np.inf
    limit = (fastest + window) * (1 + _ROUNDING)
    shortest = np.inf
    while limit >= fastest:
        sent, ends = _fewest_sent(stage_costs, sends, limit)
        if others * fastest + total + 2 * sent >= shortest:
            break
        slow = max(map(float, _seconds(stage_costs, ends)))
        # What is sent costs both sides.
        seconds = others * slow + total + 2 * sent
        if seconds <= shortest * (1 + _ROUNDING):
            shortest, best = seconds, ends
        limit = slow * (1 - _ROUNDING)
    return best


def _seconds(stage_costs: Sequence[_Costs], ends: Sequence[int]) -> list[float]:
    """Seconds of each stage."""
    pairs = zip(stage_costs, pairwise(ends), strict=True)
    return [float(costs[start, end]) for costs, (start, end) in pairs]


def thinned(cuts: Sequence[CutCandidate], total: float, most: int) -> list[CutCandidate]:
    """About ``most`` of the cuts at most: of cuts close to each other the one that sends least.

    Cuts are close if nothing between them takes time; if more than ``most`` are left, those that
    are less than ``total / most`` apart.
    """
    kept = _best_of_each(cuts, [cut.seconds_before for cut in cuts])
    if len(kept) > most:
        kept = _best_of_each(kept, [int(cut.seconds_before / total * most) for cut in kept])
    return kept


def _best_of_each(cuts: Sequence[CutCandidate], groups: Sequence[float]) -> list[CutCandidate]:
    best: dict[float, CutCandidate] = {}
    for cut, group in zip(cuts, groups, strict=True):
        if group not in best or cut.boundary_bytes < best[group].boundary_bytes:
            best[group] = cut
    return list(best.values())


def _fewest_sent(
    stage_costs: Sequence[_Costs], sends: NDArray[np.float64], limit: float
) -> tuple[float, list[int]]:
    """Of all choices with no stage above the limit, the one that sends least: seconds, and ends."""
    sent = np.full(len(sends), np.inf)
    sent[0] = 0.0
    before: list[NDArray[np.intp]] = []
    for costs in stage_costs:
        possible = np.isfinite(costs) & (costs <= limit)
        options = np.where(possible, sent[:, None] + sends[None, :], np.inf)
        before.append(options.argmin(axis=0))
        sent = options.min(axis=0)
    ends = [len(sends) - 1]
    for starts in reversed(before):
        ends.append(int(starts[ends[-1]]))
    return float(sent[-1]), ends[::-1]


def _fastest_ranks(stage_costs: Sequence[_Costs], ranks: list[int], ends: list[int]) -> list[int]:
    """The ends of the stages, moved from ``ends`` until the slowest rank is fast."""
    last = ends[-1]
    key, best = _settled(stage_costs, ranks, ends)
    chance = random.Random(0)
    for start in range(_STARTS):
        if start % _REDRAW == 0:
            candidate = [0, *sorted(chance.sample(range(1, last), len(best) - 2)), last]
        else:
            # Some cuts somewhere between the one before, which may have moved, and the one behind.
            candidate = list(best)
            for index in range(1, len(best) - 1):
                if chance.random() < _MOVED:
                    candidate[index] = chance.randrange(candidate[index - 1] + 1, best[index + 1])
        candidate_key, candidate = _settled(stage_costs, ranks, candidate)
        if candidate_key < key:
            key, best = candidate_key, candidate
    return best


def _settled(
    stage_costs: Sequence[_Costs], ranks: list[int], ends: list[int]
) -> tuple[_Key, list[int]]:
    """The cuts after moving each until none moves, behind their key; a smaller one is better."""
    ends = list(ends)
    key = (np.inf, np.inf)
    for _ in range(_SWEEPS):
        loads = _loads(stage_costs, ranks, ends, ())
        new_key = float(loads.max()), float(np.square(loads).sum())
        if not new_key < key:
            break
        key = new_key
        for index in range(1, len(ranks)):
            ends[index] = _best_end(stage_costs, ranks, ends, index)
    return key, ends


def _best_end(stage_costs: Sequence[_Costs], ranks: list[int], ends: list[int], index: int) -> int:
    """The best position for one cut between the two beside it."""
    free = np.arange(ends[index - 1] + 1, ends[index + 1])
    loads = _loads(stage_costs, ranks, ends, (index - 1, index))[:, None].repeat(len(free), axis=1)
    loads[ranks[index - 1]] += stage_costs[index - 1][ends[index - 1], free]
    loads[ranks[index]] += stage_costs[index][free, ends[index + 1]]
    slowest, squares = loads.max(axis=0), np.square(loads).sum(axis=0)
    # Of equally good positions (the last bits of a sum do not count) the most equal.
    squares[slowest > slowest.min() * (1 + _ROUNDING)] = np.inf
    return int(free[squares.argmin()])


def _loads(
    stage_costs: Sequence[_Costs], ranks: list[int], ends: list[int], without: tuple[int, ...]
) -> NDArray[np.float64]:
    """Seconds of each rank, some stages left out."""
    loads = np.zeros(max(ranks) + 1)
    for stage, rank in enumerate(ranks):
        if stage not in without:
            loads[rank] += stage_costs[stage][ends[stage], ends[stage + 1]]
    return loads

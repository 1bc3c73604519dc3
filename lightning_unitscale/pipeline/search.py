"""Search for balanced cuts, for one stage or several stages per rank. Pure.

A stage costs the estimated seconds of its operations, forward and backward, and its transfers.

With one stage per rank, dynamic programming finds the shortest step. For each limit on the slowest
stage it finds the cuts that send least. It then takes the best limit. With several stages per rank,
each cut moves in turn to the place where the ranks are most equal, until none moves. So if one
stage costs more (an output layer that is one matmul), the other stages of its rank get less. Such
moves can get stuck, so the search has many starting points. All ranks use the same seed, so they
find the same cuts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_ROUNDING = 1e-9  # two sums may differ by this fraction in their last bits

# For several stages per rank: sweeps over the cuts, and starting points.
_SWEEPS = 50
_STARTS = 300
# Every second start draws all cuts again. The others move about this fraction of the cuts.
_REDRAW = 2
_MOVED = 0.6

# For each stage, whether it may extend from one end (row) to another (column).
Allowed = Sequence[NDArray[np.bool_]]
_Costs = NDArray[np.float64]
_Key = tuple[float, float]  # the seconds of the slowest rank, then the inequality of the ranks


@dataclass(frozen=True)
class CutCandidate:
    """A possible place of a cut."""

    before: str  # name of the operation after the cut
    seconds_before: float  # estimated seconds of all operations before it, forward and backward
    boundary_bytes: int  # bytes that cross it, forward and backward


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
    """Return the indices in ``cuts`` that give a short step."""
    # With one stage per rank the result is optimal, if a step of n microbatches takes `(n - 1) *
    # slowest + sum` of the stages' seconds. Under 1F1B passes of different stages overlap, so a
    # step takes no longer. It takes as long if the stages are equal.
    # With several stages per rank, these cuts move until the slowest rank is fast. The result may
    # not be optimal.
    ends = np.array([0.0, *(cut.seconds_before for cut in cuts), total])
    sends = np.array([0.0, *(cut.boundary_bytes / bytes_per_second for cut in cuts), 0.0])
    # Seconds of a stage from one end (row) to another (column).
    costs: _Costs = ends[None, :] - ends[:, None] + sends[:, None] + sends[None, :]
    costs[np.tril_indices(len(ends))] = np.inf
    stage_costs = [
        costs if allowed is None else np.where(allowed[stage], costs, np.inf)
        for stage in range(num_stages)
    ]
    chosen = _shortest_step(stage_costs, sends, total, num_microbatches)
    ranks = [rank_of(stage) if rank_of else stage for stage in range(num_stages)]
    if len(set(ranks)) < num_stages:
        chosen = _fastest_ranks(stage_costs, ranks, chosen)
    return [end - 1 for end in chosen[1:-1]]


def _shortest_step(
    stage_costs: Sequence[_Costs], sends: NDArray[np.float64], total: float, num_microbatches: int
) -> list[int]:
    """Return the ends of the stages of the shortest step, with one stage per rank."""
    num_stages = len(stage_costs)
    slowest = np.full(len(sends), np.inf)
    slowest[0] = 0.0
    for costs in stage_costs:
        slowest = np.maximum(slowest[:, None], costs).min(axis=0)
    if not np.isfinite(slowest[-1]):
        raise ValueError(
            f"num_stages={num_stages}: none of the {len(sends) - 2} possible cuts is allowed. Ask "
            "for fewer stages."
        )
    fastest = float(slowest[-1])
    # Slower stages can send less. Above this limit the step only gets longer.
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
        pairs = zip(stage_costs, pairwise(ends), strict=True)
        slow = max(float(costs[start, end]) for costs, (start, end) in pairs)
        # A transfer takes time on both sides.
        seconds = others * slow + total + 2 * sent
        if seconds <= shortest * (1 + _ROUNDING):
            shortest, best = seconds, ends
        limit = slow * (1 - _ROUNDING)
    return best


def thinned(cuts: Sequence[CutCandidate], total: float, most: int) -> list[CutCandidate]:
    """Reduce cuts to about ``most``: among close cuts, keep the one that sends least."""
    # Cuts are close if nothing between them takes time. If more than `most` remain, cuts less than
    # `total / most` apart also count as close.
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
    """Return the ends that send least below a limit, and the seconds of sending."""
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
    """Move the ends of the stages until the slowest rank is fast."""
    last = ends[-1]
    key, best = _settled(stage_costs, ranks, ends)
    chance = random.Random(0)
    for start in range(_STARTS):
        if start % _REDRAW == 0:
            candidate = [0, *sorted(chance.sample(range(1, last), len(best) - 2)), last]
        else:
            # Move some cuts between the previous cut, which may have moved, and the next one.
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
    """Move each cut until none moves. Return a key (smaller is better) and the cuts."""
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
    """Return the best position of one cut between its two neighbors."""
    free = np.arange(ends[index - 1] + 1, ends[index + 1])
    loads = _loads(stage_costs, ranks, ends, (index - 1, index))[:, None].repeat(len(free), axis=1)
    loads[ranks[index - 1]] += stage_costs[index - 1][ends[index - 1], free]
    loads[ranks[index]] += stage_costs[index][free, ends[index + 1]]
    slowest, squares = loads.max(axis=0), np.square(loads).sum(axis=0)
    # Among positions that differ only in the last bits of a sum, take the most equal ranks.
    squares[slowest > slowest.min() * (1 + _ROUNDING)] = np.inf
    return int(free[squares.argmin()])


def _loads(
    stage_costs: Sequence[_Costs], ranks: list[int], ends: list[int], without: tuple[int, ...]
) -> NDArray[np.float64]:
    """Return the seconds of each rank without some stages."""
    loads = np.zeros(max(ranks) + 1)
    for stage, rank in enumerate(ranks):
        if stage not in without:
            loads[rank] += stage_costs[stage][ends[stage], ends[stage + 1]]
    return loads

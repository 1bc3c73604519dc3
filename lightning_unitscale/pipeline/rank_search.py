"""The search for cuts where ranks have several stages: ranks of equal cost. Pure.

From every starting point each cut is moved, in turn, to where the ranks are most equal, until none
moves. So where one stage of a rank costs more than the others (an output layer that is one product)
the rank's other stages get less. Single cuts get stuck, so the best cuts found are scattered and
moved again, many times; chance begins with the same seed, so that all ranks find the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_unitscale.pipeline.search import Cut, choose_cuts, costs_of_stages

_SWEEPS = 50
_STARTS = 300
# Every so many starts all cuts are drawn anew; the others move about so many of the cuts.
_ANEW = 2
_MOVED = 0.6

_Key = tuple[float, float]


def balance_ranks(
    cuts: Sequence[Cut],
    total: float,
    num_stages: int,
    bytes_per_second: float,
    rank_of: Callable[[int], int],
    num_microbatches: int,
) -> list[int]:
    """Cuts for which the slowest rank is fast.

    With one stage per rank those of :func:`choose_cuts`, which are proven best. With several the
    result is no proven optimum.

    Args:
        cuts: As in :func:`choose_cuts`.
        total: As there.
        num_stages: As there.
        bytes_per_second: As there.
        rank_of: The rank of a stage.
        num_microbatches: As there; of use with one stage per rank.
    """
    chosen = choose_cuts(cuts, total, num_stages, bytes_per_second, num_microbatches)
    ranks = [rank_of(stage) for stage in range(num_stages)]
    if len(set(ranks)) == num_stages:
        return chosen
    costs, _ = costs_of_stages(cuts, total, bytes_per_second)
    last = len(costs) - 1
    key, best = _settled(costs, ranks, [0, *(one + 1 for one in chosen), last])
    chance = random.Random(0)
    for start in range(_STARTS):
        places = _anew(chance, len(best), last) if start % _ANEW == 0 else _moved(chance, best)
        found, places = _settled(costs, ranks, places)
        if found < key:
            key, best = found, places
    return [one - 1 for one in best[1:-1]]


def _anew(chance: random.Random, num_ends: int, last: int) -> list[int]:
    return [0, *sorted(chance.sample(range(1, last), num_ends - 2)), last]


def _moved(chance: random.Random, best: list[int]) -> list[int]:
    """Some cuts somewhere between the one before, which may have moved, and the one behind."""
    places = list(best)
    for index in range(1, len(best) - 1):
        if chance.random() < _MOVED:
            places[index] = chance.randrange(places[index - 1] + 1, best[index + 1])
    return places


def _settled(
    costs: NDArray[np.float64], ranks: list[int], places: list[int]
) -> tuple[_Key, list[int]]:
    """The cuts after moving each until none moves, and how good they are."""
    places = list(places)
    key = _key(_loads(costs, ranks, places, ()))
    for _ in range(_SWEEPS):
        for index in range(1, len(ranks)):
            places[index] = _best_place(costs, ranks, places, index)
        found = _key(_loads(costs, ranks, places, ()))
        if not found < key:
            break
        key = found
    return key, places


def _best_place(costs: NDArray[np.float64], ranks: list[int], places: list[int], index: int) -> int:
    """The best place for one cut between the two beside it."""
    stages = (index - 1, index)
    before, after = (ranks[stage] for stage in stages)
    loads = _loads(costs, ranks, places, stages)
    free = np.arange(places[index - 1] + 1, places[index + 1])
    first, second = costs[places[index - 1], free], costs[free, places[index + 1]]
    if before == after:
        changed = [loads[before] + first + second]
    else:
        changed = [loads[before] + first, loads[after] + second]
    slowest = np.full(
        len(free), max((one for rank, one in enumerate(loads) if rank not in (before, after)),
                       default=0.0)
    )  # fmt: skip
    squares = np.zeros(len(free))
    for one in changed:
        slowest = np.maximum(slowest, one)
        squares = squares + one * one
    # Of equally good places (the last bits of a sum do not count) the most equal.
    squares[slowest > slowest.min() * (1 + 1e-9)] = np.inf
    return int(free[squares.argmin()])


def _loads(
    costs: NDArray[np.float64], ranks: list[int], places: list[int], without: tuple[int, ...]
) -> list[float]:
    """Seconds of each rank, some stages left out."""
    loads = [0.0] * (max(ranks) + 1)
    for stage, rank in enumerate(ranks):
        if stage not in without:
            loads[rank] += float(costs[places[stage], places[stage + 1]])
    return loads


def _key(loads: list[float]) -> _Key:
    """Smaller is better: the slowest rank, then how unequal they are."""
    return max(loads), sum(one * one for one in loads)

"""The search for cuts: stages, and the ranks that have several of them, of equal cost. Pure.

The search is over positions in the order of the graph. A stage's cost is the estimated seconds of
its operations, forward and backward, and of sending and receiving what crosses its edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 50
_POWER = 16


@dataclass(frozen=True)
class Cut:
    """A possible place of a cut.

    Attributes:
        before: Name of the operation behind it.
        seconds_before: Estimated seconds of all operations in front of it, both directions.
        boundary_bytes: Bytes that cross it, in one direction.
    """

    before: str
    seconds_before: float
    boundary_bytes: int


def choose_cuts(
    cuts: Sequence[Cut],
    total: float,
    num_stages: int,
    bytes_per_second: float,
    allowed: Callable[[int], NDArray[np.bool_]] | None = None,
) -> list[int]:
    """The cuts, as places in ``cuts``, for which the slowest stage is fastest.

    Of equally fast ones those with the fewest bytes at all boundaries are taken, and of those the
    first.

    Args:
        cuts: Possible cuts in the order of the graph.
        total: Seconds of the whole graph.
        num_stages: How many stages.
        bytes_per_second: Rate at which a boundary's tensors are sent.
        allowed: For a stage, whether it may reach from one end (row) to another (column); end 0 is
            the graph's start, end ``i`` the cut ``i - 1``, and ``len(cuts) + 1`` the graph's end.

    Raises:
        ValueError: If no choice is allowed.
    """
    ends, sends = _ends(cuts, total, bytes_per_second)
    costs = _costs(ends, sends)
    costs[np.tril_indices(len(ends))] = np.inf
    found = [
        costs if allowed is None else np.where(allowed(stage), costs, np.inf)
        for stage in range(num_stages)
    ]
    slowest = np.full(len(ends), np.inf)
    slowest[0] = 0.0
    for slow in found:
        slowest = np.maximum(slowest[:, None], slow).min(axis=0)
    if not np.isfinite(slowest[-1]):
        raise ValueError(f"num_stages={num_stages}: none of the {len(cuts)} possible cuts will do.")
    # Among all that are as fast, the fewest bytes; the last bits of a sum do not count.
    limit = slowest[-1] * (1 + 1e-9)
    sent = np.full(len(ends), np.inf)
    sent[0] = 0.0
    before: list[NDArray[np.intp]] = []
    for slow in found:
        options = np.where(slow <= limit, sent[:, None] + sends[None, :], np.inf)
        before.append(options.argmin(axis=0))
        sent = options.min(axis=0)
    chosen, end = [], len(ends) - 1
    for starts in reversed(before[1:]):
        end = int(starts[end])
        chosen.append(end - 1)
    return chosen[::-1]


def balance_ranks(
    cuts: Sequence[Cut],
    total: float,
    num_stages: int,
    bytes_per_second: float,
    rank_of: Callable[[int], int],
) -> list[int]:
    """Cuts for which the slowest rank is fast, where ranks have several stages.

    From the cuts of :func:`choose_cuts`, each is moved to where the ranks are most equal, in turn,
    until none moves. So where one stage of a rank costs more than the others (an output layer that
    is one product), the rank's other stages get less. The result is no proven optimum.

    Args:
        cuts: As in :func:`choose_cuts`.
        total: As there.
        num_stages: As there.
        bytes_per_second: As there.
        rank_of: The rank of a stage.
    """
    chosen = choose_cuts(cuts, total, num_stages, bytes_per_second)
    ranks = np.array([rank_of(stage) for stage in range(num_stages)])
    if len(set(ranks.tolist())) == num_stages:
        return chosen
    ends, sends = _ends(cuts, total, bytes_per_second)
    costs = _costs(ends, sends)
    places = np.array([0, *(one + 1 for one in chosen), len(ends) - 1])
    scale = ends[-1] or 1.0
    reached = np.inf
    for _ in range(_ROUNDS):
        for index in range(1, num_stages):
            # The two stages beside this cut, for every place that it can be moved to.
            free = np.arange(places[index - 1] + 1, places[index + 1])
            found = np.tile(costs[places[:-1], places[1:]], (len(free), 1))
            found[:, index - 1] = costs[places[index - 1], free]
            found[:, index] = costs[free, places[index + 1]]
            loads = found @ (ranks[:, None] == np.arange(ranks.max() + 1))
            # Nearly the largest load; the others count a little, so that they move as well.
            unequal = ((loads / scale) ** _POWER).sum(axis=1)
            places[index] = free[unequal.argmin()]
            now = unequal.min()
        if now >= reached * (1 - 1e-9):
            break
        reached = now
    return [int(one) - 1 for one in places[1:-1]]


def _ends(
    cuts: Sequence[Cut], total: float, bytes_per_second: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds before each end, and of sending at it."""
    ends = np.array([0.0, *(one.seconds_before for one in cuts), total])
    sends = np.array([0.0, *(2 * one.boundary_bytes / bytes_per_second for one in cuts), 0.0])
    return ends, sends


def _costs(ends: NDArray[np.float64], sends: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of a stage from one end (row) to another (column)."""
    costs: NDArray[np.float64] = ends[None, :] - ends[:, None] + sends[:, None] + sends[None, :]
    return costs

"""The search for cuts, one stage for each rank: a step as short as it can be. Pure.

The search is over positions in the order of the graph. A stage's cost is the estimated seconds of
its operations, forward and backward, and of sending and receiving what crosses its edges. A step
takes as long as one microbatch needs through all stages, and as the slowest stage needs for all
the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Of so much two sums may differ by their last bits.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Cut:
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
    cuts: Sequence[Cut],
    total: float,
    num_stages: int,
    bytes_per_second: float,
    num_microbatches: int,
    allowed: Callable[[int], NDArray[np.bool_]] | None = None,
) -> list[int]:
    """The cuts, as places in ``cuts``, for which a step is shortest.

    With n microbatches a step takes ``(n - 1) * slowest + sum`` of the seconds of the stages. Under
    1F1B, where forward and backward passes of different stages overlap, it takes no longer, and as
    long if the stages are equal.

    Args:
        cuts: Possible cuts in the order of the graph.
        total: Seconds of the whole graph.
        num_stages: How many stages.
        bytes_per_second: Rate at which a boundary's tensors are sent.
        num_microbatches: Microbatches of a step.
        allowed: For a stage, whether it may reach from one end (row) to another (column); end 0 is
            the graph's start, end ``i`` the cut ``i - 1``, and ``len(cuts) + 1`` the graph's end.

    Raises:
        ValueError: If no choice is allowed.
    """
    costs, sends = costs_of_stages(cuts, total, bytes_per_second)
    found = [
        costs if allowed is None else np.where(allowed(stage), costs, np.inf)
        for stage in range(num_stages)
    ]
    slowest = np.full(len(sends), np.inf)
    slowest[0] = 0.0
    for one in found:
        slowest = np.maximum(slowest[:, None], one).min(axis=0)
    if not np.isfinite(slowest[-1]):
        raise ValueError(f"num_stages={num_stages}: none of the {len(cuts)} possible cuts will do.")
    fastest = float(slowest[-1])
    # The more a stage may take, the less is sent. Behind this limit that no longer pays.
    least, _ = _fewest_sent(found, sends, np.inf)
    most, best = _fewest_sent(found, sends, fastest * (1 + _ROUNDING))
    others = num_microbatches - 1
    window = 2 * (most - least) / others if others else np.inf
    limit = (fastest + window) * (1 + _ROUNDING)
    shortest = np.inf
    while limit >= fastest:
        sent, places = _fewest_sent(found, sends, limit)
        if others * fastest + total + 2 * sent >= shortest:
            break
        slow = max(float(costs[a, b]) for a, b in pairwise(places))
        # What is sent costs both sides.
        seconds = others * slow + total + 2 * sent
        if seconds <= shortest * (1 + _ROUNDING):
            shortest, best = seconds, places
        limit = slow * (1 - _ROUNDING)
    return [place - 1 for place in best[1:-1]]


def costs_of_stages(
    cuts: Sequence[Cut], total: float, bytes_per_second: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of a stage from one end (row) to another (column), and of sending at an end."""
    ends = np.array([0.0, *(one.seconds_before for one in cuts), total])
    sends = np.array([0.0, *(one.boundary_bytes / bytes_per_second for one in cuts), 0.0])
    costs: NDArray[np.float64] = ends[None, :] - ends[:, None] + sends[:, None] + sends[None, :]
    costs[np.tril_indices(len(ends))] = np.inf
    return costs, sends


def thinned(cuts: Sequence[Cut], total: float, most: int) -> list[Cut]:
    """At most about so many of the cuts: of those close to each other the one that sends least.

    Close are cuts with nothing between them that takes time; if there are more than ``most`` of
    those, cuts that are less than a part of ``most`` of the whole apart.
    """
    kept = _best_of_each(cuts, [one.seconds_before for one in cuts])
    if len(kept) > most:
        kept = _best_of_each(kept, [int(one.seconds_before / total * most) for one in kept])
    return kept


def _best_of_each(cuts: Sequence[Cut], groups: Sequence[float]) -> list[Cut]:
    best: dict[float, Cut] = {}
    for one, group in zip(cuts, groups, strict=True):
        if group not in best or one.boundary_bytes < best[group].boundary_bytes:
            best[group] = one
    return list(best.values())


def _fewest_sent(
    found: Sequence[NDArray[np.float64]], sends: NDArray[np.float64], limit: float
) -> tuple[float, list[int]]:
    """Of all choices with no stage above the limit, the one that sends least: seconds, and ends."""
    sent = np.full(len(sends), np.inf)
    sent[0] = 0.0
    before: list[NDArray[np.intp]] = []
    for slow in found:
        possible = np.isfinite(slow) & (slow <= limit)
        options = np.where(possible, sent[:, None] + sends[None, :], np.inf)
        before.append(options.argmin(axis=0))
        sent = options.min(axis=0)
    places = [len(sends) - 1]
    for starts in reversed(before):
        places.append(int(starts[places[-1]]))
    return float(sent[-1]), places[::-1]

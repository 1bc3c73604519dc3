"""Predict the damage of each computation from steps with signed errors and moved parameters."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_unitscale.matmuls.rounding import SimulatedMatmuls
from lightning_unitscale.precision import ledger
from lightning_unitscale.precision.measured_step import Effort, MeasuredStep

# Directions whose tangents are in memory at the same time.
_DIRECTIONS_AT_ONCE = 4
# Pairs from which lasting parts are estimated.
FEWEST_PAIRS = 4
# Every pair of this number is at the step's own place of a moving grid, for its second order there.
_PAIRS_PER_STEPS_OWN = 4
# Places of a moving grid that errors of the gradient are averaged over. On a single one, errors of
# different matmuls are not independent.
_MOST_PLACES = 8
# Share of the sum of squares from which an estimate is replaced by a measurement, and the number of
# directions for each step of such measurements: they take half as many steps as tangents do.
_LARGE_SHARE, _DIRECTIONS_PER_MEASUREMENT = 0.05, 2 * _DIRECTIONS_AT_ONCE


def loss_damage(
    step: MeasuredStep, format: SimulatedMatmuls, effort: Effort, move_grids: Callable[[int], bool]
) -> dict[str, tuple[float, float]]:
    """Return the second order of each forward matmul, and the part of its damage that lasts.

    The two steps of a pair have opposite signs: their sum has the second order, and their
    difference the first. If the grid moves, the second order is that of the step's own place, where
    each fourth pair is, and the part that lasts is a mean over this place and those of other pairs.
    """
    orders: dict[str, dict[int, list[tuple[float, float]]]] = {}
    is_moving = False
    for pair in range(effort.pairs):
        place = pair if pair % _PAIRS_PER_STEPS_OWN else 0
        is_moving = move_grids(place)
        passes = [ledger.SignedPass(format, index) for index in (2 * pair, 2 * pair + 1)]
        for each in passes:
            step.run(each)
        one, other = (read(each.products) for each in passes)
        for name in one.keys() & other.keys():
            first = ledger.sign_of(name, 2 * pair) * (one[name] - other[name]) / 2
            second = (one[name] + other[name]) / 4
            by_place = orders.setdefault(name, {})
            by_place.setdefault(place if is_moving else 0, []).append((first, second))
    found = {}
    for name, by_place in orders.items():
        means = [map(statistics.mean, zip(*pairs, strict=True)) for pairs in by_place.values()]
        firsts, seconds = zip(*means, strict=True)
        # On a grid that does not move, the first order is that of a single draw.
        lasting = _lasting_part(firsts) if is_moving else 0.0
        found[name] = seconds[0], statistics.mean(seconds) + lasting
    return found


def _lasting_part(first_orders: Sequence[float]) -> float:
    """Return the mean of a matmul's first orders on several grids, without what may be chance.

    Rounding to nearest errs to both sides, but small numbers that become zero do not. So a part of
    the first order has the same sign on each grid. The mean is shrunk by its squared standard
    error, so that it is zero where only the noise of few grids is seen.

    References:
        James and Stein, "Estimation with Quadratic Loss" (1961), the estimator for one mean, with
        a factor that is not negative.
    """
    if len(first_orders) < FEWEST_PAIRS:
        return 0.0
    mean = statistics.mean(first_orders)
    noise = statistics.variance(first_orders) / len(first_orders)
    return mean * max(1.0 - noise / mean**2, 0.0) if mean else 0.0


def num_places(effort: Effort, *, is_moving: bool) -> int:
    """Return over how many places of the grid errors of the gradient are averaged."""
    steps = math.ceil(effort.directions / _DIRECTIONS_AT_ONCE)
    return min(effort.pairs, steps, _MOST_PLACES) if is_moving else 1


def gradient_products(
    step: MeasuredStep,
    named: Mapping[str, SimulatedMatmuls],
    eps: float,
    effort: Effort,
    move_grids: Callable[[int], bool],
) -> dict[str, tuple[dict[ledger.Key, float], dict[ledger.Key, float]]]:
    """Return the mean square of ``<d, J r>`` of each computation whose operand has tangents.

    If the grid moves, errors are averaged over several places. In a second dictionary are the
    squares of the errors of all computations, as they arise, averaged over the same places.
    """
    sums: dict[str, dict[ledger.Key, float]] = {word: {} for word in named}
    others: dict[str, dict[ledger.Key, float]] = {word: {} for word in named}
    distance = step.rms * math.sqrt(eps)
    places = num_places(effort, is_moving=move_grids(0))
    for number, first in enumerate(range(0, effort.directions, _DIRECTIONS_AT_ONCE)):
        move_grids(number % places)
        moved = []
        for index in range(first, min(first + _DIRECTIONS_AT_ONCE, effort.directions)):
            moved.append(ledger.MovedPass())
            with step.moved(index, distance):
                step.run(moved[-1], is_forward=True)
        operands, is_new_place = [each.operands for each in moved], 1 < places > number
        tangents = ledger.TangentPass(named, operands, distance, measures_added=is_new_place)
        step.run(tangents)
        for (_, word, key), product in read(tangents.products).items():
            mean = product**2 / effort.directions
            sums[word][key] = sums[word].get(key, 0.0) + mean
        for (word, key), square in read(tangents.added).items():
            others[word][key] = others[word].get(key, 0.0) + square / places
    move_grids(0)
    return {word: (sums[word], others[word]) for word in named}


def large_estimates(
    estimates: Mapping[ledger.Key, float], total: float, effort: Effort, places: int
) -> list[ledger.Key]:
    """Return the computations whose estimated squares make up much of the sum of all, ``total``.

    An estimate is uncertain by ``sqrt(2 / directions)`` of itself. A large one makes the sum as
    uncertain, and with it the shares of all others. So it is worth a measurement, which needs a
    step for each place of the grid.
    """
    large = [key for key, square in estimates.items() if square > _LARGE_SHARE * total]
    most = effort.directions // (_DIRECTIONS_PER_MEASUREMENT * places)
    return sorted(large, key=lambda key: -estimates[key])[:most]


def read(numbers: ledger.Numbers) -> dict[Any, float]:
    """Return numbers from their device, in one transfer."""
    if not numbers:
        return {}
    values = torch.stack([value.double() for value in numbers.values()]).tolist()
    return dict(zip(numbers, values, strict=True))

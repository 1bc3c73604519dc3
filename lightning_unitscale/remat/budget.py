"""Budgets, and the choice of an option for every run of blocks under a peak. Pure.

References:
    Bellman (1957), dynamic programming; the constraint is on the peak of every run rather than on
    the sum of what is kept, as in Beaumont et al., "Optimal checkpointing for heterogeneous chains"
    (2019).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_unitscale.remat.options import BlockOptions, Option
from lightning_unitscale.remat.problem import Floats, Ints

Budget = int | float | str
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kKmMgGtT]?[iI]?[bB])\s*")
# States kept per block boundary: different numbers of bytes saved so far.
_MAX_STATES = 512


def check_budget(budget: Budget) -> Budget:
    """``budget`` in its simplest form: an int of bytes, a float in (0, 1], or ``"min_cut"``.

    Raises:
        ValueError: If it is none of these.
    """
    expected = (
        "expected bytes (an int, or a string such as '600MiB' or '2GB'), a fraction in (0, 1] of "
        "the peak without rematerialization, or 'min_cut'"
    )
    if isinstance(budget, str):
        if budget == "min_cut":
            return budget
        match = _QUANTITY.fullmatch(budget)
        if match:
            return _positive(int(float(match[1]) * _UNITS[match[2].upper()]), budget, expected)
    elif isinstance(budget, bool):
        pass
    elif isinstance(budget, int):
        return _positive(budget, budget, expected)
    elif isinstance(budget, float) and 0 < budget <= 1:
        return budget
    raise ValueError(f"budget={budget!r}: not a budget; {expected}; pass budget=0.5 to try it.")


def _positive(num_bytes: int, given: Budget, expected: str) -> int:
    if num_bytes < 1:
        raise ValueError(f"budget={given!r}: no bytes at all; {expected}; pass more.")
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """Bytes as a reader takes them in: ``"1.50 GiB"``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


@dataclass(frozen=True)
class Choice:
    """An option for every run of blocks, in forward order.

    Attributes:
        runs: (first block, block after the last, option) of each run.
        seconds: Time of what runs again.
    """

    runs: tuple[tuple[int, int, Option], ...]
    seconds: float


@dataclass
class _States:
    """Ways to come to a boundary, by the bytes saved on the way: fewer bytes take more time."""

    saved: Ints
    seconds: Floats
    # Where each came from: (boundary, its state there, option).
    came_from: list[tuple[int, int, Option | None]]


def choose_options(
    options: BlockOptions, budget_bytes: int, *, forward_bytes: int = 0
) -> Choice | None:
    """The fastest choice whose peak, run by run, stays within the budget; ``None`` if none does.

    For every run: what was saved before it, what it needs at most, and the gradients of the runs
    after it, which its backward pass finds there, are alive together.

    Args:
        options: The options of all runs of blocks.
        budget_bytes: Bytes for activations and gradients: beyond what is resident.
        forward_bytes: Bytes alive during the forward pass only.
    """
    count = len(options.blocks)
    gradients = options.blocks.gradient_bytes()
    after = np.concatenate([np.cumsum(gradients[::-1])[::-1], [0]])
    states = [_States(np.zeros(1, np.int64), np.zeros(1), [(0, 0, None)])]
    for stop in range(1, count + 1):
        saved: list[Ints] = []
        seconds: list[Floats] = []
        origins: list[tuple[int, Ints, Option]] = []
        for length in options.lengths():
            start = stop - length
            if start < 0 or not len(states[start].saved) or not options.may_join(start, stop):
                continue
            for option in options.of(start, stop):
                backward = option.backward_bytes + int(after[stop])
                need = max(backward, option.forward_bytes + forward_bytes)
                fits = np.flatnonzero(states[start].saved <= budget_bytes - need)
                if len(fits):
                    saved.append(states[start].saved[fits] + option.saved_bytes)
                    seconds.append(states[start].seconds[fits] + option.seconds)
                    origins.append((start, fits, option))
        states.append(_merged(saved, seconds, origins, budget_bytes))
    if not len(states[count].saved):
        return None
    best = int(np.lexsort((states[count].saved, states[count].seconds))[0])
    return _traced(states, count, best)


def _merged(
    saved: Sequence[Ints],
    seconds: Sequence[Floats],
    origins: Sequence[tuple[int, Ints, Option]],
    budget_bytes: int,
) -> _States:
    if not saved:
        return _States(np.zeros(0, np.int64), np.zeros(0), [])
    all_saved, all_seconds = np.concatenate(saved), np.concatenate(seconds)
    group = np.repeat(np.arange(len(saved)), [len(one) for one in saved])
    place = np.concatenate([np.arange(len(one)) for one in saved])
    order = np.lexsort((all_seconds, all_saved))
    best = np.minimum.accumulate(all_seconds[order])
    improves = np.concatenate([[True], best[1:] < best[:-1] - 1e-12])
    kept = order[improves]
    if len(kept) > _MAX_STATES:
        # Of those that save nearly the same the fastest, which is the one that saves most.
        bins = all_saved[kept] * _MAX_STATES // max(int(all_saved[kept[-1]]), 1)
        last = np.concatenate([bins[1:] != bins[:-1], [True]])
        last[0] = True  # nobody saves less
        kept = kept[last]
    came_from: list[tuple[int, int, Option | None]] = []
    for one in kept.tolist():
        start, fits, option = origins[group[one]]
        came_from.append((start, int(fits[place[one]]), option))
    return _States(all_saved[kept], all_seconds[kept], came_from)


def _traced(states: Sequence[_States], stop: int, index: int) -> Choice:
    seconds = float(states[stop].seconds[index])
    runs: list[tuple[int, int, Option]] = []
    while stop > 0:
        start, before, option = states[stop].came_from[index]
        assert option is not None
        runs.append((start, stop, option))
        stop, index = start, before
    return Choice(tuple(reversed(runs)), seconds)

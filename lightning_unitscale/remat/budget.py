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
_MAX_STATES = 160


def check_budget(budget: Budget, *, name: str = "budget") -> Budget:
    """``budget`` in its simplest form: an int of bytes, a float in (0, 1], or ``"min_cut"``.

    Args:
        budget: What the user gave.
        name: As which argument he gave it.

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
            num_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
            return _positive(num_bytes, budget, name, expected)
    elif isinstance(budget, bool):
        pass
    elif isinstance(budget, int):
        return _positive(budget, budget, name, expected)
    elif isinstance(budget, float) and 0 < budget <= 1:
        return budget
    raise ValueError(f"{name}={budget!r}: not a budget; {expected}; pass {name}=0.5 to try it.")


def _positive(num_bytes: int, given: Budget, name: str, expected: str) -> int:
    if num_bytes < 1:
        raise ValueError(f"{name}={given!r}: no bytes at all; {expected}; pass more.")
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
    """Ways to come to a boundary, by the bytes saved on the way: fewer bytes take more time.

    Attributes:
        saved: Bytes saved before the boundary, ascending.
        seconds: Time of what runs again before it.
        origins: (boundary, option) that each group of ways came by.
        group: Group of each state.
        before: Where each was at that boundary.
    """

    saved: Ints
    seconds: Floats
    origins: list[tuple[int, Option]]
    group: Ints
    before: Ints


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
    none = np.zeros(1, np.int64)
    states = [_States(none, np.zeros(1), [], none, none)]
    for stop in range(1, count + 1):
        ways: list[tuple[int, int, Option]] = []
        for length in options.lengths():
            start = stop - length
            if start < 0 or not len(states[start].saved) or not options.may_join(start, stop):
                continue
            for option in options.of(start, stop):
                backward = option.backward_bytes + int(after[stop])
                need = max(backward, option.forward_bytes + forward_bytes)
                num_fitting = int(states[start].saved.searchsorted(budget_bytes - need, "right"))
                if num_fitting:
                    ways.append((start, num_fitting, option))
        states.append(_merged(states, ways))
    if not len(states[count].saved):
        return None
    # The last state saves most, and so is the fastest.
    return _traced(states, count, len(states[count].saved) - 1)


def _merged(states: Sequence[_States], ways: Sequence[tuple[int, int, Option]]) -> _States:
    origins = [(start, option) for start, _, option in ways]
    if not ways:
        none = np.zeros(0, np.int64)
        return _States(none, np.zeros(0), origins, none, none)
    saved = np.concatenate([states[i].saved[:n] + one.saved_bytes for i, n, one in ways])
    seconds = np.concatenate([states[i].seconds[:n] + one.seconds for i, n, one in ways])
    counts = [n for _, n, _ in ways]
    group = np.repeat(np.arange(len(ways)), counts)
    before = np.concatenate([np.arange(n) for n in counts])
    order = np.argsort(saved, kind="stable")
    best = np.minimum.accumulate(seconds[order])
    improves = np.concatenate([[True], best[1:] < best[:-1] - 1e-12])
    kept = order[improves]
    if len(kept) > _MAX_STATES:
        # Of those that save nearly the same the fastest, which is the one that saves most.
        bins = saved[kept] * _MAX_STATES // max(int(saved[kept[-1]]), 1)
        last = np.concatenate([bins[1:] != bins[:-1], [True]])
        last[0] = True  # nobody saves less
        kept = kept[last]
    return _States(saved[kept], seconds[kept], origins, group[kept], before[kept])


def _traced(states: Sequence[_States], stop: int, index: int) -> Choice:
    seconds = float(states[stop].seconds[index])
    runs: list[tuple[int, int, Option]] = []
    while stop > 0:
        here = states[stop]
        start, option = here.origins[here.group[index]]
        runs.append((start, stop, option))
        stop, index = start, int(here.before[index])
    return Choice(tuple(reversed(runs)), seconds)

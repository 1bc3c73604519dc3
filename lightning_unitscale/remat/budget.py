"""Budgets, and the choice of an option for every run of blocks under a peak. Pure.

References:
    Bellman (1957), dynamic programming; the constraint is on the peak of every run rather than on
    the sum of what is kept, as in Beaumont et al., "Optimal checkpointing for heterogeneous chains"
    (2019).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from lightning_unitscale.remat.options import BlockOptions, EndingRuns, Option
from lightning_unitscale.remat.problem import Floats, Ints

Budget = int | float | str
"""Bytes (an int, or ``"600MiB"``), a share of the plain step's peak, or ``"min_cut"``."""
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kKmMgGtT]?[iI]?[bB])\s*")
# States kept per block boundary: different numbers of bytes saved so far.
_MAX_STATES = 64
# More than all bytes that can be saved: where the states of each boundary start among all keys.
_BOUNDARY = 2**52


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


def _positive(num_bytes: int, budget: Budget, name: str, expected: str) -> int:
    if num_bytes < 1:
        raise ValueError(f"{name}={budget!r}: no bytes at all; {expected}; pass more.")
    return num_bytes


@dataclass(frozen=True)
class Choice:
    """An option for every run of blocks, in forward order.

    Attributes:
        runs: (first block, block after the last, option) of each run.
        seconds: Time of what runs again.
    """

    runs: tuple[tuple[int, int, Option], ...]
    seconds: float


class _States:
    """Ways to come to each boundary, by the bytes saved on the way: fewer bytes take more time.

    The states of all boundaries lie one after the other, those of one boundary by ascending bytes.
    """

    def __init__(self, num_blocks: int) -> None:
        capacity = 1 + num_blocks * (_MAX_STATES + 2)
        self.saved = np.zeros(capacity, dtype=np.int64)
        self.seconds = np.zeros(capacity)
        # The state before each, and the option that led from there.
        self.before = np.zeros(capacity, dtype=np.int64)
        self.option = np.zeros(capacity, dtype=np.int64)
        # Ascending over all boundaries, to search several of them at once.
        self._keys = np.zeros(capacity, dtype=np.int64)
        self._options: list[Option] = []
        self._starts = np.zeros(num_blocks + 2, dtype=np.int64)
        self._starts[1] = 1  # the first boundary has one state
        self._num_boundaries = 1

    def of(self, boundary: int) -> slice:
        """Where the states of a boundary lie."""
        return slice(int(self._starts[boundary]), int(self._starts[boundary + 1]))

    def add_boundary(self, ending: EndingRuns, free_bytes: Ints) -> None:
        """Add the states that the runs before a boundary lead to.

        Args:
            ending: The options of these runs.
            free_bytes: For each of them, the most that may have been saved where its run starts.
        """
        boundary = self._num_boundaries
        filled = int(self._starts[boundary])
        limits = free_bytes.clip(-1, _BOUNDARY - 1) + ending.starts * _BOUNDARY
        first = self._starts[ending.starts]
        counts = self._keys[:filled].searchsorted(limits, "right") - first
        option = np.repeat(np.arange(len(counts)), counts)
        before = np.arange(len(option)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        saved = self.saved[before] + ending.saved_bytes[option]
        seconds = self.seconds[before] + ending.seconds[option]
        kept = _improving(saved, seconds)
        here = slice(filled, filled + len(kept))
        self.saved[here], self.seconds[here] = saved[kept], seconds[kept]
        self._keys[here] = saved[kept] + boundary * _BOUNDARY
        self.before[here] = before[kept]
        self.option[here] = option[kept] + len(self._options)
        self._options += ending.options
        self._starts[boundary + 1] = here.stop
        self._num_boundaries += 1

    def traced(self, boundary: int) -> Choice | None:
        """The fastest choice that leads to a boundary, ``None`` if none does."""
        here = self.of(boundary)
        if here.start == here.stop:
            return None
        state = here.stop - 1  # the last saves most, and so is the fastest
        seconds = float(self.seconds[state])
        runs: list[tuple[int, int, Option]] = []
        while state > 0:
            before = int(self.before[state])
            start = int(self._starts[:boundary].searchsorted(before, "right")) - 1
            runs.append((start, boundary, self._options[self.option[state]]))
            state, boundary = before, start
        return Choice(tuple(reversed(runs)), seconds)


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
    states = _States(len(options.blocks))
    for ending in options.ending:
        need = np.maximum(ending.backward_bytes, ending.forward_bytes + forward_bytes)
        states.add_boundary(ending, budget_bytes - need)
    return states.traced(len(options.blocks))


def _improving(saved: Ints, seconds: Floats) -> Ints:
    """The states, by ascending bytes, that are faster than all that save fewer; at most so many."""
    order = np.argsort(saved, kind="stable")
    best = np.minimum.accumulate(seconds[order])
    kept = order[np.concatenate([[True], best[1:] < best[:-1] - 1e-12])[: len(order)]]
    if len(kept) > _MAX_STATES:
        # Of those that save nearly the same the fastest, which is the one that saves most.
        bins = saved[kept] * _MAX_STATES // max(int(saved[kept[-1]]), 1)
        last = np.concatenate([bins[1:] != bins[:-1], [True]])
        last[0] = True  # nobody saves less
        kept = kept[last]
    return kept

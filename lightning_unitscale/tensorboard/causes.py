"""Decide what a difference of two runs comes from: a module, or something outside all modules.

Statistics of tensors do not show labels, indices and optimizers. A difference that begins where
they enter is not blamed on a module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from lightning_unitscale.scales.layout import Direction
from lightning_unitscale.tensorboard.chance import RECENT, Judged, growth, is_fine
from lightning_unitscale.tensorboard.run_pair import Doubles, PairHistory, RunPair, common_module

Cause = Literal["module", "batch", "loss", "weights", "optimizer"]
ADVICE: Final[dict[Cause, str]] = {
    "batch": "no single module is at fault: compare batches (order, size, padding, preprocessing)",
    "loss": "the modules before the loss are equal: compare labels and loss (reduction, weights)",
    "weights": "many weights differ, so no module can be named: compare seeds and checkpoints, or "
    "sample more often",
    "optimizer": "weights changed otherwise after gradients of equal size: compare the optimizer, "
    "learning rates, weight decay, clipping, zero_grad(); in low precision, batches and labels too",
}
# Changes of log2 RMS of a parameter that are more than rounding.
_LEAST_MOVE: Final = 2e-5
_FEWEST_MOVES: Final = (12, 4)  # of parameters: if nothing is off, or if a tensor is
_FEWEST: Final = 3
# A quantile of the relative differences of these changes, and its limits: if nothing is off, and if
# a tensor is off already. The first step of Adam depends on signs alone, those of rounding too.
_APART_AT_FIRST: Final = (0.25, 0.75, 0.6)
_APART: Final = (0.4, 0.3, 0.1)
_APART_IN_FP32: Final = (0.5, 0.2, 0.02)
_OF_EARLIER: Final = 3.0  # times the least of recent steps, up to a limit
_APART_CLEARLY: Final = 0.45
_APART_CLEARLY_IN_FP32: Final = 0.1
_MANY: Final = 0.5
# At the first samples: a difference is weak, and results before it differ already.
_FEW_SAMPLES: Final = 2
_WEAK: Final = 1.5  # times chance
_MOST: Final = 0.75
_USUAL: Final = 0.15


class OptimizerSteps:
    """The changes of parameters from sample to sample, compared between two runs."""

    def __init__(self, pair: RunPair, history: PairHistory) -> None:
        self._pair, self._history = pair, history
        states = [k for k, each in enumerate(pair.pairs) if each.is_state]
        self._states = np.array(states, dtype=int)
        self._is_fine, self._growth = is_fine(history), growth(history)
        self._known: dict[int, _Moves] = {}

    def at_fault(self, row: int, *, is_off: bool) -> tuple[int, str | None] | None:
        """Return the parameter whose changes since the last step differ most, if most differ.

        If a tensor is off already, less is enough. A module comes with it if one run leaves out its
        weight alone.
        """
        history, states = self._history, self._states
        if row == 0 or history.steps[row] - history.steps[row - 1] > 1:
            return None
        window = {t: self._moves(t) for t in range(max(1, row - RECENT), row + 1)}
        if min(len(each.clear) for each in window.values()) < _FEWEST_MOVES[is_off]:
            return None
        last = window.pop(row)
        # Except in FP32, the first step of Adam tells nothing about later ones.
        recent = [each.apart for t, each in window.items() if t > 1 or self._is_fine]
        clearly = _APART_CLEARLY_IN_FP32 if self._is_fine and is_off else _APART_CLEARLY
        limit = self._limits(row)[1 + is_off] * float(self._growth[row])
        if last.apart > max(limit, min(_OF_EARLIER * min(recent, default=0.0), clearly)):
            return int(states[last.clear][last.differences.argmax()]), None
        amax = history.log2_amax[:, row - 1 : row + 1, states[last.clear]]
        is_still = ((last.moves == 0) & (amax[:, 0] == amax[:, 1])).any(axis=0)
        still = [k for k in states[last.clear[is_still]] if self._pair.pairs[k].is_operand]
        return (int(still[0]), self._pair.pairs[still[0]].module) if len(still) == 1 else None

    def _limits(self, row: int) -> tuple[float, float, float]:
        """Return the quantile to compare, and its limits."""
        return _APART_IN_FP32 if self._is_fine else _APART if row > 1 else _APART_AT_FIRST

    def _moves(self, row: int) -> _Moves:
        """Compare the changes since the sample before, once for each sample."""
        if row not in self._known:
            before, after = (self._history.log2_rms[:, t, self._states] for t in (row - 1, row))
            with np.errstate(invalid="ignore"):
                moves = after - before
            larger = np.abs(moves).max(axis=0, initial=0.0)
            clear = np.flatnonzero(np.isfinite(moves).all(axis=0) & (larger > _LEAST_MOVE))
            moves = moves[:, clear]
            differences = np.abs(moves[0] - moves[1])
            shares = differences / larger[clear]
            apart = float(np.quantile(shares, self._limits(row)[0])) if len(clear) else 0.0
            self._known[row] = _Moves(moves, clear, differences, apart)
        return self._known[row]


@dataclass(frozen=True, eq=False)
class _Moves:
    """The changes of log2 RMS since the sample before that are more than rounding."""

    moves: Doubles  # (2, number of them)
    clear: npt.NDArray[np.int64]  # their positions among the parameters
    differences: Doubles
    apart: float  # a quantile of the relative differences


def cause_of(
    pair: RunPair, judged: dict[Direction, Judged], step: int, direction: Direction, k: int
) -> tuple[Cause, str | None]:
    """Return what the first tensor that is off comes from, and the module, if one is at fault."""
    found, one = pair.pairs[k], judged[direction]
    row = one.row(step)
    assert row is not None
    # Older event files have no inputs of tensors.
    if found.is_rewired or one.history.is_lone[row, k] or not any(pair.inputs):
        return "module", found.module
    excess = one.excess[row]
    losses = loss_tensors(pair, one.history)
    number = len(pair.pairs)
    if direction == "backward":
        others = judged.get("forward")
        at = None if others is None else others.row(step)
        is_other_loss = True
        if others is not None and at is not None:
            is_other_loss = bool((others.excess[at] > others.suspicious[at])[losses].any())
            if _began_before(pair, others, at, range(number), excess[k]):
                return "batch", None
        # The loss computes the gradient of what it reads.
        is_read = {*losses}.issuperset(pair.readers[k]) and not found.is_source
        if is_read and one.history.is_of_parts[losses].any():
            return "batch", None
        if (
            k in losses
            or (is_read and (is_other_loss or excess[k] <= 1))
            or _began_before(pair, one, row, range(k + 1, number), excess[k])
            or (found.is_source and _are_parameters_alone(pair, one, row))
        ):
            return "loss", None
        return "module", found.module
    if found.is_state:
        least = np.maximum(one.suspicious[row], min(excess[k], 1.0) / 3)
        return _weights(pair, excess > least, k, is_first=row == 0)
    if found.is_source or _began_before(pair, one, row, range(k), excess[k]):
        return "batch", None
    if all(pair.pairs[j].is_state for j in pair.inputs[k]):  # its other inputs are not recorded
        is_lookup = found.name.rpartition(".")[2].startswith("embedding")
        return "batch", None if is_lookup else found.module
    return ("loss", None) if k in losses else ("module", found.module)


def _began_before(
    pair: RunPair, one: Judged, row: int, before: Sequence[int], excess: float
) -> bool:
    """Return whether most results before the first one that is off differ more than usual."""
    results = [j for j in before if not pair.pairs[j].is_source]
    if len(results) < _FEWEST or math.isinf(excess):
        return False
    known = one.excess[: row + 1, results]
    if row < _FEW_SAMPLES:
        return bool(excess < _WEAK and np.quantile(known[row], _MOST) > _USUAL)
    least = np.maximum(2 * known[:row].max(axis=0), one.suspicious[row, results] / 4)
    return bool((known[row] > least).mean() > _MANY)


def _are_parameters_alone(pair: RunPair, one: Judged, row: int) -> bool:
    """Return whether the gradients of parameters are off in several modules, and no others."""
    # Other labels change the sums over a batch more than what they sum.
    excess = one.excess[row]
    if np.isneginf(one.history.log2_rms[:, row]).any():  # what underflows has no sums
        return False
    if any(excess[k] > 1 and not each.is_source for k, each in enumerate(pair.pairs)):
        return False
    off = np.flatnonzero(excess > one.suspicious[row])
    return len({pair.pairs[k].module for k in off if pair.pairs[k].is_source}) >= _FEWEST


def _weights(
    pair: RunPair, is_off: npt.NDArray[np.bool_], k: int, *, is_first: bool
) -> tuple[Cause, str | None]:
    """Return the cause of weights that are off."""
    states = [j for j, each in enumerate(pair.pairs) if each.is_state]
    modules = [pair.pairs[j].module for j in states if is_off[j] or j == k]
    if len({*modules}) == 1:
        return "module", modules[0]
    return ("weights" if is_first else "optimizer"), common_module(modules) or None


def loss_tensors(pair: RunPair, history: PairHistory) -> list[int]:
    """Return the scalars that a step computes last."""
    found: set[int] = set()
    for k in reversed(range(len(pair.pairs))):
        is_last = not pair.pairs[k].is_source and found.issuperset(pair.readers[k])
        if is_last and history.numel[k] == 1:
            found.add(k)
    return sorted(found)

"""Estimate how far two runs may be apart by chance, tensor by tensor and step by step.

Three differences of a pair of tensors are compared: of log2 RMS, of log2 of the largest magnitude,
and of the shares of elements by exponent. The difference that counts as chance is the largest of

- rounding: 0.6 of the spacing of the numbers near 1 in the coarsest format of both runs (1.2 for
  gradients), more for tensors of few elements;
- three times the differences that the pair, and nearly all pairs, had at earlier samples;
- if steps between two samples were not seen, the tensor's own change from sample to sample.

If a pair and nearly all others stayed far below this at earlier samples, less counts as chance in
formats that are coarser than FP32.

Runs may have other layouts. If ranks, microbatches or accumulated batches have their own losses and
weight gradients, these are not compared. The other gradients are compared as gradients of the loss
of the whole batch.

A parameter may only differ by its own movement and by three times its last difference. Tensors that
consist of rounding errors are not compared: a bias gradient whose terms cancel, and the bias that
it updates.

A bias gradient whose terms cancel in part has a larger relative error than its terms.
Gradients of functions with kinks, such as ReLU, jump. This adds another error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from lightning_unitscale.formats import E5M2
from lightning_unitscale.scales.layout import Direction
from lightning_unitscale.tensorboard.run_pair import Doubles, PairHistory, RunPair

# Relative difference of values that are equal in exact arithmetic: another order of sums, or a
# perturbation of 1e-6 that many operations have amplified.
_FLOOR: Final = 2e-3
_ROUNDING: Final[dict[Direction, float]] = {"forward": 0.6, "backward": 1.2}
# Master weights are rounded to the type of the step at most.
_OF_PARAMETERS: Final = 0.1
_OF_AMAX: Final = 2.3
_OF_SHAPE: Final = 9.2
# A relative error of e in the values turns over a share of e of the elements of a kinked function.
# That is a relative error of sqrt(e) in its gradient. After an optimizer's step e is that of the
# parameters, since Adam divides each gradient by its size.
_MOVED: Final = 3e-3
# The same for the change of a tensor since the last sample.
_OF_DRIFT: Final = 1.4
_KINKED: Final = frozenset({
    "relu", "relu6", "leaky_relu", "prelu", "hardtanh", "hardswish", "hardsigmoid", "abs", "clamp",
    "clip", "max", "min", "amax", "amin", "maximum", "minimum", "max_pool1d", "max_pool2d",
    "max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "l1_loss", "smooth_l1_loss", "huber_loss", "hinge_embedding_loss",
})  # fmt: skip
_REPEATED: Final = 3.0  # times earlier differences
_NEARLY_ALL: Final = 0.9
RECENT: Final = 8  # samples
# Rounded runs part more and more after so many steps.
_FIRST_STEPS: Final = 8
# The share of chance that is left if all differences were far smaller at earlier samples.
_LEAST_CHANCE: Final = 0.6
_OF_EARLIER: Final = 4.0  # times earlier shares of chance
# From these shares of chance on a tensor is suspicious, at the first sample and later: in FP32, and
# in coarser formats.
_SUSPICIOUS: Final = ((0.02, 0.02), (0.5, 0.25))
_SUSPICIOUS_ZEROS: Final = 0.25  # parameters of zeros, perturbed
_MOST_SUSPICIOUS: Final = 0.5
_FINE_SPACING: Final = 1e-5
# Parameters below this RMS are zero, as one that was perturbed by 1e-6 is.
_LOG2_ZERO: Final = -14.0
# A sum of n rounded terms has an error of sqrt(n) roundings.
_CANCELED: Final = 4.0
_LEAST_SPACING: Final = 1e-6
_OF_HIDDEN: Final = 3.0  # log2
_MOST_CANCELED: Final = 4.0  # log2


@dataclass(frozen=True, eq=False)
class Judged:
    """How far pairs are apart in one direction, as shares of chance, ``(T, P)``."""

    history: PairHistory
    excess: Doubles
    chance: Doubles  # of log2 RMS
    # From this excess on it is suspicious: its differences were far smaller before.
    suspicious: Doubles

    def is_lone(self, step: int, k: int) -> bool:
        """Return whether only one run has a tensor at a step."""
        return bool(self.history.is_lone[self.row(step), k])

    def row(self, step: int) -> int | None:
        """Return the position of a step; ``None`` without it."""
        return next(iter(np.flatnonzero(self.history.steps == step).tolist()), None)


def floors_of(pair: RunPair, history: PairHistory, direction: Direction, sums: Doubles) -> Doubles:
    """Return log2 of the magnitudes that count as zero, ``(T, P)``."""
    shape = history.shape_distance.shape
    if direction == "forward":
        states = np.array([each.is_state for each in pair.pairs])
        return np.broadcast_to(np.where(states, _LOG2_ZERO, -np.inf), shape)
    spacing = max(_spacing(history), _LEAST_SPACING)
    # Compiled code hides what reads a bias.
    is_hidden = np.array([not readers for readers in pair.readers])
    is_bias = [any(pair.pairs[r].is_matmul for r in readers) for readers in pair.readers]
    zero = math.log2(_CANCELED * spacing) + _OF_HIDDEN * is_hidden
    return np.where(is_bias | is_hidden, sums.max(axis=0) + zero, -np.inf)


def sums_of(pair: RunPair, history: PairHistory, direction: Direction) -> Doubles:
    """Return log2 of the RMS that gradients of biases and gains have if nothing cancels.

    In the shape of ``log2_rms``; infinitely small for values and for other tensors.
    """
    sums = np.full(history.log2_rms.shape, -np.inf)
    for k, each in enumerate(pair.pairs if direction == "backward" else ()):
        if not each.is_source or each.is_operand:
            continue
        if not pair.readers[k]:
            # The gradient of the weight is about as large as a bias gradient without cancellation.
            own = [j for j, other in enumerate(pair.pairs) if other.module == each.module]
            if history.numel[k] < history.numel[own].max():
                sums[:, :, k] = history.log2_rms[:, :, own].max(axis=2)
            continue
        matmuls = [r for r in pair.readers[k] if pair.pairs[r].is_matmul]
        readers = matmuls or list(pair.readers[k])
        terms = history.numel[readers[0]] / history.numel[k]
        if terms > 1:
            arriving = history.log2_rms[:, :, readers].max(axis=2)
            sums[:, :, k] = arriving + math.log2(terms) / 2
    return sums


def judge(
    pair: RunPair,
    history: PairHistory,
    direction: Direction,
    sums: Doubles,
    floors: Doubles,
    is_noise: npt.NDArray[np.bool_],
) -> Judged:
    """Compare the differences of all pairs with chance."""
    spacing = _spacing(history)
    few = np.broadcast_to(1 + 4 / np.sqrt(history.numel), history.shape_distance.shape)
    if direction == "backward":
        # A sum whose terms cancel has larger relative errors than its terms.
        with np.errstate(invalid="ignore"):
            canceled = (sums - history.log2_rms).max(axis=0)
        few = few * np.exp2(np.nan_to_num(canceled).clip(0.0, _MOST_CANCELED))
    rounding = _ROUNDING[direction] * spacing * few
    states = np.array([each.is_state for each in pair.pairs]) & (direction == "forward")
    rounding = np.where(states, _OF_PARAMETERS * spacing * few, rounding)
    kinks = _of_kinks(pair, history, direction)
    drift = _OF_DRIFT * math.sqrt(max(spacing, _MOVED)) * growth(history)[:, None]
    values = _with_floor(pair, history, direction, floors)
    # The sums of parts of a batch are not those of the batch, but weights are the same for all.
    is_other = history.is_of_parts & ~states
    distance = np.where(is_other, np.nan, np.abs(values[0] - values[1]))
    rms = _Difference(distance, (_FLOOR + kinks) * few + rounding, values, drift)
    # A tensor of zeros has neither a largest magnitude nor a shape, and a tiny parameter no shape.
    is_zero = np.isneginf(history.log2_rms).any(axis=0)
    with np.errstate(invalid="ignore"):
        largest = np.logaddexp2(2 * history.log2_amax, 2 * floors) / 2
    # Of rounding errors only the RMS is compared.
    is_rounding = is_noise & (direction == "backward")
    largest = np.where((is_zero & ~states) | is_rounding, np.nan, largest)
    amax_rounding = 0.02 + _OF_AMAX * spacing * few + 2 * kinks * few
    amax_rounding[1:] += drift[1:]  # one element differs more than the RMS of all
    with np.errstate(invalid="ignore"):
        apart = np.where(is_other, np.nan, np.abs(largest[0] - largest[1]))
    amax = _Difference(apart, amax_rounding, largest, drift)
    root = np.sqrt(history.numel.clip(max=2.0**14))
    shape_rounding = 2e-3 + (0.5 + _OF_SHAPE * math.sqrt(spacing)) / root + kinks
    shapes = np.where(is_zero | states | is_other | is_rounding, np.nan, history.shape_distance)
    shape = _Difference(shapes, shape_rounding, values, drift)
    gaps = np.diff(history.steps, prepend=history.steps[:1] - 1)
    chance = rms.chance(states, gaps)
    excess = rms.amount / chance
    for other in (amax, shape):
        with np.errstate(invalid="ignore"):
            excess = np.fmax(excess, other.amount / other.chance(states, gaps))
    lost = history.nonfinite[0] != history.nonfinite[1]
    excess = np.where(lost, np.inf, np.where(history.nonfinite.all(axis=0), 0.0, excess))
    if direction == "forward":
        excess[:, is_noise & states] = 0.0
    # Twice: the floor itself is a rough estimate.
    excess = np.where((history.log2_rms < floors + 1).all(axis=0) & ~states, 0.0, excess)
    excess = np.where(history.is_lone, np.inf, excess)
    excess = np.nan_to_num(excess, nan=0.0, posinf=np.inf)
    left, suspicious = _earlier(excess, states, in_fp32=is_fine(history))
    return Judged(history, excess / left, chance * left, suspicious)


def is_fine(history: PairHistory) -> bool:
    """Check whether both runs are in FP32."""
    return _spacing(history) < _FINE_SPACING


def growth(history: PairHistory) -> Doubles:
    """Return by how much rounded runs part more at each step than in the first ones, ``(T,)``."""
    # Roundings of all steps so far have moved the weights apart, as in a random walk.
    num_steps = (history.steps - history.steps[0]) * (not is_fine(history))
    grown: Doubles = np.sqrt(np.maximum(num_steps / _FIRST_STEPS, 1.0))
    return grown


def _earlier(
    excess: Doubles, states: npt.NDArray[np.bool_], *, in_fp32: bool
) -> tuple[Doubles, Doubles]:
    """Return the share of chance that earlier samples leave, and what is suspicious, ``(T, P)``."""
    at_first, later = _SUSPICIOUS[not in_fp32]
    left, suspicious = np.ones_like(excess), np.full_like(excess, at_first)
    suspicious[:, states] = max(at_first, _SUSPICIOUS_ZEROS)
    known = np.where(np.isfinite(excess), excess, 0.0)
    for t in range(1, len(excess)):
        recent = known[max(0, t - RECENT) : t]
        results = recent[:, ~states] if not states.all() else recent
        usual = np.quantile(results, _NEARLY_ALL, axis=1).max()
        earlier = _OF_EARLIER * np.maximum(recent.max(axis=0), usual)
        suspicious[t] = np.clip(earlier, later, max(later, _MOST_SUSPICIOUS))
        if t > 2 and not in_fp32:  # in FP32, a kink may turn over at any step
            left[t] = np.clip(earlier, _LEAST_CHANCE, 1.0)
    return left, suspicious / left


def _of_kinks(pair: RunPair, history: PairHistory, direction: Direction) -> Doubles:
    """Return the relative errors that kinked functions make in gradients, ``(T, P)``."""
    depth = np.zeros(len(pair.pairs))  # how many of them the gradient has passed in a row
    for k in reversed(range(len(depth) if direction == "backward" else 0)):
        for r in pair.readers[k]:
            word = pair.pairs[r].name.rpartition(".")[2]
            is_kinked = word in _KINKED or word.rstrip("_0123456789") in _KINKED
            depth[k] = max(depth[k], depth[r] + is_kinked)
    errors = np.full(len(history.steps), max(_spacing(history), _LEAST_SPACING))
    errors[1:] = np.maximum(errors[1:], _MOVED)
    kinks: Doubles = np.sqrt(errors[:, None] * depth)
    return kinks


@dataclass(frozen=True, eq=False)
class _Difference:
    """One kind of difference of all pairs, the part from rounding, and the values."""

    amount: Doubles  # (T, P)
    rounding: Doubles  # (T, P)
    values: Doubles  # log2, (2, T, P)
    drift: Doubles  # the share of a tensor's movement that may differ, (T, 1)

    def chance(self, states: npt.NDArray[np.bool_], gaps: npt.NDArray[np.int64]) -> Doubles:
        """Return the difference that counts as chance, ``(T, P)``."""
        chance = self.rounding.copy()
        with np.errstate(invalid="ignore"):
            moved = np.nan_to_num(np.abs(np.diff(self.values, axis=1)), nan=0.0)
        known = np.nan_to_num(self.amount, nan=0.0, posinf=0.0)
        for k in range(1, len(chance)):
            before = known[max(0, k - RECENT) : k].max(axis=0)
            last_known = known[k - 1][~states]
            usual = float(np.quantile(last_known, _NEARLY_ALL)) if last_known.size else 0.0
            repeated = _REPEATED * np.maximum(before, usual)
            last = moved[:, k - 1].min(axis=0)
            earlier = moved[:, k - 2].max(axis=0) if k > 1 else last
            movement = np.maximum(last, np.minimum(earlier, 1.0))
            of_states = self.rounding[k] + _REPEATED * known[k - 1] + 0.5 * movement
            moving = np.minimum(moved[:, k - 1].max(axis=0), 1.0)
            others = np.maximum(self.rounding[k] + self.drift[k] * moving, repeated)
            if gaps[k] > 1:
                recent = moved[:, max(0, k - RECENT) : k]
                others = np.maximum(others, np.median(recent, axis=1).max(axis=0))
            chance[k] = np.where(states, of_states, others)
        return chance


def _with_floor(
    pair: RunPair, history: PairHistory, direction: Direction, floors: Doubles
) -> Doubles:
    """Return log2 of the root of two squares: the RMS, and the magnitude that counts as zero."""
    rms = history.log2_rms
    around = pair.inputs if direction == "forward" else pair.readers
    floors = floors.copy()
    # Where one run has zeros, the other may have rounding errors of their inputs.
    for t, k in np.argwhere(np.isneginf(rms).any(axis=0)):
        read = rms[:, t, list(around[k])]
        if read.size and np.isfinite(read).any():
            rounding = math.log2(_CANCELED * max(_spacing(history), _LEAST_SPACING))
            floors[t, k] = max(floors[t, k], read[np.isfinite(read)].max() + rounding)
    with np.errstate(invalid="ignore"):  # infinite and infinite
        values: Doubles = np.logaddexp2(2 * rms, 2 * floors) / 2
    return np.where(np.isneginf(values).all(axis=0), 0.0, values)


def _spacing(history: PairHistory) -> float:
    """Return the spacing of the coarsest format; of FP8 if it is not known."""
    return E5M2.eps if math.isnan(history.spacing) else history.spacing

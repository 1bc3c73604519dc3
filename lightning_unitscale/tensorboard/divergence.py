"""Find the first step, tensor and direction in which two runs differ by more than chance.

Three differences of a pair of tensors are compared: of log2 RMS, of log2 of the largest magnitude,
and of the shares of elements by exponent. The difference that counts as chance is the largest of

- rounding: 0.6 of the spacing of the numbers near 1 in the coarsest format of both runs (1.2 for
  gradients), more for tensors of few elements;
- three times the differences that the pair, and nearly all pairs, had at earlier samples;
- if steps between two samples were not seen, the tensor's own change from sample to sample.

Runs may have other layouts. If ranks, microbatches or accumulated batches have their own losses and
weight gradients, these are not compared. The other gradients are compared as gradients of the loss
of the whole batch.

A parameter may only differ by its own movement and by three times its last difference. Tensors that
consist of rounding errors are not compared: a bias gradient whose terms cancel, and the bias that
it updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lightning_unitscale.formats import E5M2
from lightning_unitscale.scales.layout import DIRECTIONS, Direction
from lightning_unitscale.tensorboard.history import RunScales, read_run
from lightning_unitscale.tensorboard.run_pair import Doubles, PairHistory, RunPair

# Relative difference of what is equal in exact numbers: another order of sums, a perturbation of
# 1e-6 that many operations have amplified.
_FLOOR: Final = 2e-3
_ROUNDING: Final[dict[Direction, float]] = {"forward": 0.6, "backward": 1.2}
# Master weights are rounded to the type of the step at most.
_OF_PARAMETERS: Final = 0.1
_OF_AMAX: Final = 2.3
_OF_SHAPE: Final = 9.2
_REPEATED: Final = 3.0  # times earlier differences
_NEARLY_ALL: Final = 0.9
_RECENT: Final = 8
# Parameters below this RMS are zero, as one that was perturbed by 1e-6 is.
_LOG2_ZERO: Final = -14.0
# A sum of n rounded terms has an error of sqrt(n) roundings.
_CANCELED: Final = 4.0
_LEAST_SPACING: Final = 1e-6
# From this share of its chance on, the input of a tensor that is off counts as off too.
_SUSPICIOUS: Final = 0.5
# And from this share of what the tensor is off by.
_SUSPICIOUS_SHARE: Final = 1 / 3
_LARGE: Final = 3.0
_CLEAR: Final = 2.0
# More of the parameters than these are not off by a fault of their own.
_FEW_PARAMETERS: Final = 1 / 3


@dataclass(frozen=True)
class Divergence:
    """The first difference of two runs: the object that ``compare --json`` prints."""

    diverged: bool
    step: int | None = None
    module: str | None = None
    tensor: str | None = None
    direction: Direction | None = None
    inherited: tuple[str, ...] = ()  # what it is computed from and was off already
    log2_rms: tuple[float | None, float | None] | None = None  # in either run
    chance: float | None = None  # the difference of log2 RMS that counts as chance
    text: str = ""  # for the report only

    def to_json(self) -> dict[str, Any]:
        """Return the fields that scripts read."""
        fields = asdict(self)
        del fields["text"]
        return fields | {"inherited": list(self.inherited)}


@dataclass(frozen=True, eq=False)
class _Judged:
    """How far pairs are apart in one direction, as shares of chance, ``(T, P)``."""

    history: PairHistory
    excess: Doubles
    chance: Doubles  # of log2 RMS

    def row(self, step: int) -> int | None:
        """Return the position of a step; ``None`` without it."""
        return next(iter(np.flatnonzero(self.history.steps == step).tolist()), None)


def compare_runs(run_a: str | Path, run_b: str | Path) -> Divergence:
    """Find the first step, tensor and direction in which two runs differ by more than chance.

    The runs may have other precisions, devices and parallel layouts, but sample the same steps.

    Args:
        run_a: Folder with the event files of a run that had a ``ScaleMonitor``.
        run_b: Folder of the other run.

    Returns:
        The finding. ``text`` is a report in a few lines.

    Raises:
        FileNotFoundError: If a folder has no event files.
        ValueError: If a run has no scales, or the runs share no tensor or no sampled step.
    """
    return find_divergence(read_run(run_a), read_run(run_b))


def find_divergence(a: RunScales, b: RunScales) -> Divergence:
    """Return the first step, tensor and direction in which two runs differ beyond chance."""
    pair = RunPair(a, b)
    histories = {direction: pair.history(direction) for direction in DIRECTIONS}
    judged: dict[Direction, _Judged] = {}
    is_noise = np.zeros(len(pair.pairs), dtype=bool)
    for direction in reversed(DIRECTIONS):
        if (history := histories[direction]) is not None:
            floors = _floors(pair, history, direction)
            if direction == "backward":
                # Gradients that are rounding alone, in at least one of the steps.
                is_noise = (history.log2_rms.min(axis=0) < floors).any(axis=0)
            judged[direction] = _judge(pair, history, direction, floors, is_noise)
    if not judged:
        raise ValueError(
            "run_a, run_b: they share no sampled step. Expected runs that sampled at least "
            "one step in common. Sample more often, such as with every_n_steps=1."
        )
    every = np.unique(np.concatenate([one.history.steps for one in judged.values()])).tolist()
    for index, step in enumerate(every):
        is_next = index > 0 and step - every[index - 1] > 1
        if (found := _first_off(pair, judged, step, has_gap=is_next)) is not None:
            return _report(pair, judged, step, *found)
    shown = f"{len(every)} steps, {len(pair.pairs)} tensors"
    return Divergence(False, text=f"The runs differ by no more than chance ({shown}).")


def _floors(pair: RunPair, history: PairHistory, direction: Direction) -> Doubles:
    """Return log2 of the magnitudes that count as zero, ``(T, P)``."""
    shape = history.shape_distance.shape
    if direction == "forward":
        states = np.array([each.is_state for each in pair.pairs])
        return np.broadcast_to(np.where(states, _LOG2_ZERO, -np.inf), shape)
    floors = np.full(shape, -np.inf)
    spacing = max(_spacing(history), _LEAST_SPACING)
    for k, each in enumerate(pair.pairs):
        readers = [r for r in pair.readers[k] if pair.pairs[r].is_matmul]
        if not (each.is_source and readers) or each.is_operand:
            continue
        terms = history.numel[readers[0]] / history.numel[k]
        if terms > 1:  # a bias
            arriving = history.log2_rms[:, :, readers].max(axis=(0, 2))
            floors[:, k] = arriving + math.log2(_CANCELED * spacing * math.sqrt(terms))
    return floors


def _judge(
    pair: RunPair,
    history: PairHistory,
    direction: Direction,
    floors: Doubles,
    is_noise: npt.NDArray[np.bool_],
) -> _Judged:
    """Compare the differences of all pairs with chance."""
    spacing, few = _spacing(history), 1 + 4 / np.sqrt(history.numel)
    rounding = _ROUNDING[direction] * spacing * few
    states = np.array([each.is_state for each in pair.pairs]) & (direction == "forward")
    rounding = np.where(states, _OF_PARAMETERS * spacing * few, rounding)
    values = _with_floor(pair, history, direction, floors)
    # The sums of parts of a batch are not those of the batch, but weights are the same for all.
    is_other = history.is_of_parts & ~states
    distance = np.where(is_other, np.nan, np.abs(values[0] - values[1]))
    rms = _Difference(distance, _FLOOR * few + rounding, values)
    # A tensor of zeros has neither a largest magnitude nor a shape, and a tiny parameter no shape.
    is_zero = np.isneginf(history.log2_rms).any(axis=0)
    with np.errstate(invalid="ignore"):
        largest = np.logaddexp2(2 * history.log2_amax, 2 * floors) / 2
    largest = np.where(is_zero & ~states, np.nan, largest)
    amax_rounding = 0.02 + _OF_AMAX * spacing * few
    with np.errstate(invalid="ignore"):
        apart = np.where(is_other, np.nan, np.abs(largest[0] - largest[1]))
    amax = _Difference(apart, amax_rounding, largest)
    root = np.sqrt(history.numel.clip(max=2.0**14))
    shape_rounding = 2e-3 + (0.5 + _OF_SHAPE * math.sqrt(spacing)) / root
    shapes = np.where(is_zero | states | is_other, np.nan, history.shape_distance)
    shape = _Difference(shapes, shape_rounding, values)
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
    return _Judged(history, np.nan_to_num(excess, nan=0.0, posinf=np.inf), chance)


@dataclass(frozen=True, eq=False)
class _Difference:
    """One kind of difference of all pairs, what rounding explains, and the values behind it."""

    amount: Doubles  # (T, P)
    rounding: Doubles  # (P,)
    values: Doubles  # log2, (2, T, P)

    def chance(self, states: npt.NDArray[np.bool_], gaps: npt.NDArray[np.int64]) -> Doubles:
        """Return the difference that counts as chance, ``(T, P)``."""
        chance = np.broadcast_to(self.rounding, self.amount.shape).copy()
        with np.errstate(invalid="ignore"):
            moved = np.nan_to_num(np.abs(np.diff(self.values, axis=1)), nan=0.0)
        known = np.nan_to_num(self.amount, nan=0.0, posinf=0.0)
        for k in range(1, len(chance)):
            before = known[max(0, k - _RECENT) : k].max(axis=0)
            last_known = known[k - 1][~states]
            usual = float(np.quantile(last_known, _NEARLY_ALL)) if last_known.size else 0.0
            repeated = _REPEATED * np.maximum(before, usual)
            last = moved[:, k - 1].min(axis=0)
            earlier = moved[:, k - 2].max(axis=0) if k > 1 else last
            movement = np.maximum(last, np.minimum(earlier, 1.0))
            of_states = self.rounding + _REPEATED * known[k - 1] + 0.5 * movement
            others = np.maximum(self.rounding, repeated)
            if gaps[k] > 1:
                recent = moved[:, max(0, k - _RECENT) : k]
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
    # Where one run has zeros, the other may have the rounding of what it computes them from.
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


def _first_off(
    pair: RunPair, judged: dict[Direction, _Judged], step: int, *, has_gap: bool
) -> tuple[Direction, int] | None:
    """Return the direction and the position of the first pair that is off at a step."""
    candidates: list[tuple[Direction, int, float]] = []
    excesses: dict[Direction, Doubles] = {}
    for direction in DIRECTIONS:
        row = judged[direction].row(step) if direction in judged else None
        if row is None or not (judged[direction].excess[row] > 1).any():
            continue
        excesses[direction] = excess = judged[direction].excess[row]
        for k in _order(pair, direction):
            if excess[k] > 1:
                before = max((excess[j] for j in _read(pair, direction, k)), default=0.0)
                jump = excess[k] / max(before, 1.0) if math.isfinite(before) else 0.0
                candidates.append((direction, k, jump))
    if not candidates:
        return None
    off = [k for direction, k, _ in candidates if direction == "forward" and pair.pairs[k].is_state]
    num_states = sum(each.is_state for each in pair.pairs)
    if has_gap and len(off) > _FEW_PARAMETERS * num_states:
        # The fault is older than this sample, and the optimizer has spread it.
        others = [each for each in candidates if not pair.pairs[each[1]].is_source]
        candidates = sorted(others or candidates, key=lambda each: -each[2])
    clear = (each for each in candidates if each[2] >= _CLEAR)
    direction, k, _ = next(clear, max(candidates, key=lambda each: each[2]))
    excess = excesses[direction]
    for _ in pair.pairs:
        before = [j for j in _read(pair, direction, k) if not pair.pairs[j].is_source]
        first = max(before, key=lambda j: excess[j], default=k)
        least = max(_SUSPICIOUS, _SUSPICIOUS_SHARE * min(excess[k], _LARGE))
        if first == k or excess[first] <= least:
            break
        k = first
    return direction, k


def _order(pair: RunPair, direction: Direction) -> Sequence[int]:
    """Return the positions of the pairs in the order in which a step computes them."""
    numbers = range(len(pair.pairs))
    if direction == "forward":
        return numbers
    # A parameter's gradient follows that of the first tensor that reads it.
    return sorted(
        numbers,
        key=lambda k: (
            -min(pair.readers[k], default=k) + 0.5 if pair.pairs[k].is_source else -k,
            -k,
        ),
    )


def _read(pair: RunPair, direction: Direction, k: int) -> tuple[int, ...]:
    """Return what a value, or a gradient, is computed from."""
    return pair.inputs[k] if direction == "forward" else pair.readers[k]


def _module(pair: RunPair, direction: Direction, k: int, excess: Doubles) -> str:
    """Return the module at fault: that of the tensor, or of the matmul whose gradients are off."""
    # A matmul is at fault if the gradients of all that it multiplies are off, and its own is not.
    if direction == "backward":
        for reader in pair.readers[k]:
            # Another reader may have made the gradient of a shared operand wrong.
            operands = [
                j
                for j in pair.inputs[reader]
                if pair.pairs[j].is_operand and pair.readers[j] == (reader,)
            ]
            if len(operands) > 1 and k in operands and (excess[operands] > 1).all():
                return pair.pairs[reader].module
    return pair.pairs[k].module


def _report(
    pair: RunPair, judged: dict[Direction, _Judged], step: int, direction: Direction, k: int
) -> Divergence:
    one = judged[direction]
    row = one.row(step)
    assert row is not None
    module = _module(pair, direction, k, one.excess[row])
    if pair.pairs[k].is_rewired:  # neither of the two is wrong, but what reads it
        k, module = pair.rewired(k)
    excess, found = one.excess[row], pair.pairs[k]
    inherited = tuple(
        pair.pairs[j].name for j in _read(pair, direction, k) if excess[j] > _SUSPICIOUS
    )
    a, b = (
        float(value) if math.isfinite(value) else None for value in one.history.log2_rms[:, row, k]
    )
    chance = float(one.chance[row, k])
    result = Divergence(
        True, step, module, found.name, direction, inherited, (a, b),
        chance if math.isfinite(chance) else None,
    )  # fmt: skip
    return replace(result, text="\n".join(_lines(pair, one, row, result, k)))


def _lines(pair: RunPair, one: _Judged, row: int, result: Divergence, k: int) -> Iterator[str]:
    """Return the report of a finding, line by line."""
    direction = result.direction or "forward"
    gradient = "gradient of " if direction == "backward" else ""
    where = f" (module {result.module})" if result.module else ""
    yield f"The runs diverge at step {result.step}, {direction}: {gradient}{result.tensor}{where}"
    a, b = (
        "no finite element" if value is None else f"2^{value:.4g}"
        for value in result.log2_rms or ()
    )
    yield f"  RMS {a} and {b}, {one.excess[row, k]:.3g} times what chance explains"
    read = _read(pair, direction, k)
    after = pair.readers[k] if direction == "forward" else pair.inputs[k]
    for title, positions in (("computed from", read), ("read by", after)):
        if positions:
            states = ", ".join(
                f"{pair.pairs[j].name} ({'off' if one.excess[row, j] > 1 else 'equal'})"
                for j in positions[:8]
            )
            yield f"  {gradient and 'gradients: '}{title} {states}"

"""Pair the tensors of two runs, and measure how far apart they are.

Names do not depend on precision, device or layout. Where one run has a tensor more (a cast, another
attention, a factor), the tensors that a shared tensor reads in its place are paired instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lightning_unitscale.scales.layout import MIN_EXPONENT, NUM_EXPONENTS, Direction
from lightning_unitscale.tensorboard.history import RunScales, merge_orders
from lightning_unitscale.tensorboard.lone_parameters import lone_parameters
from lightning_unitscale.tensorboard.schema import ExponentCounts

Doubles = npt.NDArray[np.float64]
# The inputs of every tensor, by step.
Graphs = Mapping[int, Mapping[str, tuple[str, ...]]]
# Tensors with fewer elements have no shape of a histogram.
_FEWEST_ELEMENTS: Final = 16
_MOST_STAND_INS: Final = 4
_LEAST_SHARE: Final = -12.0
# For files without a number of elements.
_USUAL_NUMEL: Final = 4096.0
_INPUT: Final = "input."


@dataclass(frozen=True)
class TensorPair:
    """A tensor of both runs."""

    names: tuple[str, str]  # in either run; two names for tensors that take each other's place
    name: str  # for reports: of two names the one that only one run has
    module: str
    is_source: bool  # a parameter, a buffer or an input of the step
    is_operand: bool  # a matmul reads it
    is_matmul: bool  # a matmul makes it
    reader: str = ""  # of two names: the tensor that reads either
    is_rewired: bool = False  # of two names: both runs have both tensors, and read another one here
    # And they belong to two modules; or one run calls the module of its tensor once more instead.
    is_moved: bool = False

    @property
    def is_state(self) -> bool:
        """Return whether it is a parameter or a buffer."""
        return self.is_source and not self.name.startswith(_INPUT)

    def is_replaced(
        self, a: Mapping[str, tuple[str, ...]], b: Mapping[str, tuple[str, ...]]
    ) -> bool:
        """Return whether one takes the other's place in two graphs, which differ there."""
        read = {*a.get(self.reader, ())}, {*b.get(self.reader, ())}
        is_read = self.names[0] in read[0] and self.names[1] in read[1]
        return is_read and not {*self.names} & read[0] & read[1]


@dataclass(frozen=True, eq=False)
class PairHistory:
    """The statistics of ``P`` pairs at the ``T`` steps that both runs have, in one direction."""

    steps: npt.NDArray[np.int64]
    log2_rms: Doubles  # of true values, (2, T, P); NaN where absent
    log2_amax: Doubles  # (2, T, P)
    nonfinite: npt.NDArray[np.bool_]  # whether there are NaN or infinite elements, (2, T, P)
    # The largest share of elements above a power of two in one run and not above its half in the
    # other, (T, P).
    shape_distance: Doubles
    numel: Doubles  # (P,)
    # Whether the runs have it of other parts of a batch, (P,): the loss of each microbatch or rank,
    # the gradient of a weight on each of them.
    is_of_parts: npt.NDArray[np.bool_]
    # Spacing of the numbers near 1 in the coarsest format; NaN if a run has not recorded it.
    spacing: float
    # Whether only one run has it, although both have its reader, (T, P).
    is_lone: npt.NDArray[np.bool_]


class RunPair:
    """The tensors of two runs in execution order, with their inputs."""

    def __init__(self, a: RunScales, b: RunScales) -> None:
        self.runs = a, b
        self._order = {name: k for k, name in enumerate(merge_orders((a.names, b.names)))}
        if not set(a.names) & set(b.names):
            raise ValueError(
                "run_a, run_b: they share no tensor. Expected two runs of one model, whose modules "
                "have the same names. Pass two runs of the same model."
            )
        self._about = [_facts(run) for run in self.runs]
        self._lone = lone_parameters(self.runs)
        self.pairs = self._pairs()
        place = [{pair.names[side]: k for k, pair in enumerate(self.pairs)} for side in (0, 1)]
        read = [
            {
                place[side][name]
                for side, run in enumerate(self.runs)
                for name in run.inputs.get(pair.names[side], ())
                if place[side].get(name, k) < k
            }
            for k, pair in enumerate(self.pairs)
        ]
        # The positions of the pairs that each reads, and of those that read it.
        self.inputs = [tuple(sorted(found)) for found in read]
        readers: list[list[int]] = [[] for _ in self.pairs]
        for reader, found in enumerate(self.inputs):
            for k in found:
                readers[k].append(reader)
        self.readers = [tuple(found) for found in readers]

    def history(self, direction: Direction) -> PairHistory | None:
        """Return the statistics of all pairs; ``None`` without a common step."""
        if any(direction not in run.directions for run in self.runs):
            return None
        histories = [run.history(direction) for run in self.runs]
        steps = np.intersect1d(histories[0].steps, histories[1].steps)
        if not len(steps):
            return None
        taken: list[list[npt.NDArray[Any]]] = []
        sizes, spacings = [], []
        for side, (run, history) in enumerate(zip(self.runs, histories, strict=True)):
            rows = np.searchsorted(history.steps, steps)
            own = {name: k for k, name in enumerate(run.names)}
            # One run may lack a parameter.
            columns = [own.get(pair.names[side], len(own)) for pair in self.pairs]
            unit = history.log2_unit[rows]
            largest = run.at(steps, direction, "log2_amax", math.nan) + unit
            arrays = history.log2_rms[rows] + unit, largest, history.nonfinite[rows]
            taken.append([_with_absent(array)[:, columns] for array in arrays])
            sizes.append(_with_absent(run.largest(direction, "numel"))[columns])
            spacings.append(np.fmax.reduce(run.largest(direction, "spacing")))
        rms, amax, bad = (
            np.stack(arrays).astype(np.float64) for arrays in zip(*taken, strict=True)
        )
        graphs = [run.inputs_at(direction) for run in self.runs]
        is_lone = self._is_lone(direction, steps, graphs, ~np.isnan(rms) | (bad > 0))
        for k, pair in enumerate(self.pairs):
            for row, step in enumerate(steps.tolist() if pair.reader else ()):
                if not pair.is_replaced(*(graph[step] for graph in graphs)):
                    rms[:, row, k] = amax[:, row, k] = math.nan
        is_of_parts = self._is_of_parts(sizes)
        shifts = np.zeros(len(steps))
        if direction == "backward":
            with np.errstate(invalid="ignore"):  # of zeros, the difference is NaN
                apart = rms[0] - rms[1]
            shifts = self._shifts(apart, sizes, is_of_parts)
            rms[1] += shifts[:, None]
            amax[1] += shifts[:, None]
        numel = np.fmax(*sizes).astype(np.float64)
        # NaN only if a run has none at all; fmax skips those of absent tensors.
        coarsest = float(np.maximum(*spacings))
        log2_spacing = -3.0 if math.isnan(coarsest) else math.log2(coarsest or 1e-9)
        return PairHistory(
            steps,
            rms,
            amax,
            bad > 0,
            self._shape_distance(direction, steps, rms, log2_spacing, shifts),
            np.where(numel > 0, numel, _USUAL_NUMEL),
            is_of_parts,
            coarsest,
            is_lone,
        )

    def _is_lone(
        self,
        direction: Direction,
        steps: npt.NDArray[np.int64],
        graphs: Sequence[Graphs],
        is_there: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Return which values or gradients only one run has where both could, ``(T, P)``."""
        is_lone = np.zeros(is_there.shape[1:], dtype=bool)
        reached = is_there[0] & is_there[1]
        for k in reversed(range(len(self.pairs))):
            if self.pairs[k].reader:
                reached[:, k] |= reached[:, list(self.readers[k])].any(axis=1)
        for row, step in enumerate(steps.tolist()):
            a, b = (graph[step] for graph in graphs)
            for k, pair in enumerate(self.pairs):
                if direction == "forward":
                    is_lone[row, k] = pair.name in self._lone.get(step, ())
                    is_lone[row, k] |= pair.is_moved and pair.is_replaced(a, b)
                elif not pair.reader and is_there[0, row, k] != is_there[1, row, k]:
                    # The gradient has arrived behind the tensor in both runs.
                    read = bool(reached[row, list(self.readers[k])].any())
                    is_lone[row, k] = read and pair.name in a and pair.name in b
        return is_lone

    def rewired(self, k: int) -> tuple[int, str]:
        """Return the pair that reads another tensor in either run, and the module that decides so.

        It contains the reader and, as far as possible, its inputs.
        """
        pair = self.pairs[k]
        place = next(j for j, each in enumerate(self.pairs) if each.names == (pair.reader,) * 2)
        own = self.pairs[place].module
        modules = [about[name][0] for about, name in zip(self._about, pair.names, strict=True)]
        parents = [common_module(each) for each in ((own, modules[0]), (own, modules[1]), modules)]
        return place, max(parents, key=len)

    def _is_of_parts(self, sizes: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
        """Return which pairs differ in their number of elements otherwise than most results do."""
        ratios = np.log2(np.where(sizes[0] > 0, sizes[0], 1) / np.where(sizes[1] > 0, sizes[1], 1))
        results = [k for k, pair in enumerate(self.pairs) if not pair.is_source]
        if not results:
            return np.zeros(len(self.pairs), dtype=bool)
        values, counts = np.unique(ratios[results].round(6), return_counts=True)
        differs: npt.NDArray[np.bool_] = ratios.round(6) != values[counts.argmax()]
        return differs

    def _shifts(
        self, apart: Doubles, sizes: Sequence[npt.NDArray[Any]], is_of_parts: npt.NDArray[np.bool_]
    ) -> Doubles:
        """Return log2 of what the second run's gradients lack in each step, ``(T,)``."""
        # Ranks whose gradients are averaged later each have the gradient of their own loss, and
        # accumulated batches have a share of it. The gradients of the losses show which.
        losses = [
            k
            for k, pair in enumerate(self.pairs)
            if is_of_parts[k] and not (self.readers[k] or pair.is_source)
        ]
        shifts = np.zeros(len(apart))
        if losses:
            found = apart[:, losses] + np.log2(sizes[0][losses] / sizes[1][losses])
            found[~np.isfinite(found)] = np.nan
            known = ~np.isnan(found).all(axis=1)
            shifts[known] = np.nanmedian(found[known], axis=1).round(5)
        return shifts

    def _shape_distance(
        self,
        direction: Direction,
        steps: npt.NDArray[np.int64],
        log2_rms: Doubles,
        log2_spacing: float,
        shifts: Doubles,
    ) -> Doubles:
        distance = np.full((len(steps), len(self.pairs)), math.nan)
        # Elements below this share of the RMS may be zero in one run and rounding in the other.
        least = min(max(log2_spacing - 3, _LEAST_SHARE), -3)
        lowest = np.nan_to_num(np.fmax(*log2_rms) + least, nan=0.0, neginf=MIN_EXPONENT)
        first = np.clip(lowest.round() - MIN_EXPONENT, 1, NUM_EXPONENTS - 2).astype(int)
        # Exponents move by whole numbers.
        is_there = ~np.isnan(log2_rms).any(axis=0) & (shifts == shifts.round())[:, None]
        for k, pair in enumerate(self.pairs):
            a, b = (
                run.exponents(direction, name)
                for run, name in zip(self.runs, pair.names, strict=True)
            )
            rows = [
                row
                for row, step in enumerate(steps.tolist())
                if step in a
                and step in b
                and is_there[row, k]
                and min(a[step].num_sampled, b[step].num_sampled) >= _FEWEST_ELEMENTS
            ]
            if rows:
                at = steps[rows].tolist()
                found = [[own[step] for step in at] for own in (a, b)]
                moved = shifts[rows].astype(int)
                shares = _shares_above(found[0], 0 * moved), _shares_above(found[1], moved)
                distance[rows, k] = _farthest(*shares, first[rows, k])
        return distance

    def _pairs(self) -> tuple[TensorPair, ...]:
        names = [set(run.names) for run in self.runs]
        lone = set().union(*self._lone.values())
        shared = (names[0] & names[1]) | lone
        found = {(name, name): "" for name in self._order if name in shared}
        for name, _ in list(found):
            read = [run.inputs.get(name, ()) for run in self.runs]
            left = [[each for each in read[side] if each not in read[1 - side]] for side in (0, 1)]
            found |= dict.fromkeys(self._stand_ins(*left), name)
        latest = [_latest_names(run) for run in self.runs]
        pairs = [self._pair(each, reader, latest) for each, reader in found.items()]
        return tuple(sorted(pairs, key=lambda pair: self._order[pair.name]))

    def _stand_ins(self, a: Sequence[str], b: Sequence[str]) -> list[tuple[str, str]]:
        """Pair the inputs of a tensor that only one run has, with the closest values together."""
        if not a or len(a) != len(b) or len(a) > _MOST_STAND_INS:
            return []
        choices = [list(zip(a, order, strict=True)) for order in itertools.permutations(b)]
        if len(choices) == 1:
            return choices[0]
        first = [_first_log2_rms(run) for run in self.runs]

        def distance(pairs: list[tuple[str, str]]) -> float:
            return sum(abs(first[0].get(x, 0.0) - first[1].get(y, 0.0)) for x, y in pairs)

        return min(choices, key=distance)

    def _pair(self, names: tuple[str, str], reader: str, latest: Sequence[set[str]]) -> TensorPair:
        a, b = names
        name = b if b not in latest[0] else a
        # The files of a compiled run do not show the readers of a tensor.
        facts = [own[name] for own in self._about if name in own]
        is_source, is_operand, is_matmul = (any(own[k] for own in facts) for k in (1, 2, 3))
        both = a in latest[1] and b in latest[0]
        is_moved = False
        if reader and a in self._about[0] and b in self._about[1]:
            modules = self._about[0][a][0], self._about[1][b][0]
            is_moved = modules[0] != modules[1] and (
                both or self._is_called_again(names, modules, latest)
            )
        return TensorPair(
            names,
            name,
            facts[-1][0],
            is_source,
            is_operand,
            is_matmul,
            reader,
            bool(reader) and (both or is_moved),
            is_moved,
        )

    def _is_called_again(
        self, names: tuple[str, str], modules: tuple[str, str], latest: Sequence[set[str]]
    ) -> bool:
        """Return whether one run calls a module of both once more, and the other its own module."""
        for side, other in ((0, 1), (1, 0)):
            first, _, count = names[side].rpartition("_")
            own = {self._about[side][name][0] for name in latest[side]}
            if (
                count.isdecimal()
                and first in latest[side] & latest[other]
                and modules[side] == self._about[other][first][0]
                and modules[other] not in own
            ):
                return True
        return False


def _shares_above(
    counts: Sequence[ExponentCounts], shifts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Return the share of elements from each exponent on, the highest one first, ``(T, 279)``."""
    # The exponents are higher by ``shifts``.
    moved = map(np.roll, (own.counts for own in counts), shifts.tolist())
    table = np.stack(list(moved))[:, ::-1]
    sampled = np.array([own.num_sampled for own in counts], table.dtype)
    shares: npt.NDArray[np.float32] = np.cumsum(table, axis=1) / sampled[:, None]
    return shares


def _farthest(
    a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], first: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Return the largest share that one has above a power of two and the other not above its half.

    Elements on a power of two may be in either bin, so only larger distances count. Exponents below
    the ``first`` one of each step do not count.
    """
    farther = np.maximum(a[:, :-1] - b[:, 1:], b[:, :-1] - a[:, 1:])
    counts = np.arange(NUM_EXPONENTS - 1) < NUM_EXPONENTS - 1 - first[:, None]
    largest: npt.NDArray[np.float32] = farther.max(axis=1, where=counts, initial=0.0)
    return largest


def common_module(modules: Sequence[str]) -> str:
    """Return the smallest module that contains all of some modules."""
    paths = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(parts[0] for parts in itertools.takewhile(lambda own: len({*own}) == 1, paths))


def _with_absent(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values with those of a tensor that is absent, as the last column."""
    return np.insert(values.astype(np.float64), values.shape[-1], math.nan, axis=-1)


def _facts(run: RunScales) -> dict[str, tuple[str, bool, bool, bool]]:
    """Return module, source, operand and matmul by tensor."""
    forward, backward = run.history("forward", 1), run.history("backward", 1)
    rows: Any = zip(forward.modules, forward.sources, forward.operands, backward.operands,
                    strict=True)  # fmt: skip
    return dict(zip(run.names, rows, strict=True))


def _latest_names(run: RunScales) -> set[str]:
    graphs = run.inputs_at(run.directions[0])
    return set(graphs[max(graphs)])


def _first_log2_rms(run: RunScales) -> dict[str, float]:
    values = run.history("forward").values(stored=False)
    finite = np.where(np.isfinite(values[:1]), values[:1], 0.0).reshape(-1)
    return dict(zip(run.names, finite.tolist(), strict=False))

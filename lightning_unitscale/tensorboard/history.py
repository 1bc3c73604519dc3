"""Read the steps of a run from the series in its event files.

It needs no torch, because the dashboard's server has none. The report uses it too.
"""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
from tensorboard.util import tensor_util

from lightning_unitscale.formats import BlockFormat, NumberFormat
from lightning_unitscale.scales.alerts import ScaleAlert, alerts_from_json
from lightning_unitscale.scales.layout import (
    BLOCK_KINDS,
    DIRECTIONS,
    FORMAT_KINDS,
    Direction,
    RowLayout,
)
from lightning_unitscale.tensorboard.damage import collect_damaged_files
from lightning_unitscale.tensorboard.schema import (
    ALERTS_TAG,
    COVERAGE_TAG,
    PLUGIN_NAME,
    PRECISION_TAG,
    ExponentCounts,
    Quantity,
    Series,
    TensorSet,
)

Floats: TypeAlias = npt.NDArray[np.float32]
# Step and tensor, in the order of the file.
Points: TypeAlias = Iterable[tuple[int, npt.NDArray[Any]]]


@dataclass(frozen=True, eq=False)
class ScaleHistory:
    """The log2 RMS of the ``N`` tensors of a run over its ``T`` steps, in one direction."""

    names: tuple[str, ...]
    modules: tuple[str, ...]
    # True if a tensor is not computed from others: parameters and inputs of the step.
    sources: tuple[bool, ...]
    # True if a matmul reads the tensor, or, backward, its gradient.
    operands: tuple[bool, ...]
    steps: npt.NDArray[np.int64]
    # Of the stored tensors, (T, N); ``-inf`` for a tensor of zeros, NaN for an absent one.
    log2_rms: Floats
    log2_unit: Floats  # log2 of their units, (T, N)
    nonfinite: Floats  # number of NaN and infinite elements, which the RMS excludes, (T, N)

    def values(self, *, stored: bool) -> Floats:
        """Return log2 RMS of the stored or of the true values, shape ``(T, N)``."""
        return self.log2_rms if stored else self.log2_rms + self.log2_unit


@dataclass(frozen=True, eq=False)
class FractionHistory:
    """The shares of the stored elements outside the range of ``F`` formats, in one direction."""

    formats: tuple[NumberFormat, ...]
    steps: npt.NDArray[np.int64]
    fractions: npt.NDArray[np.float16]  # overflow, subnormal and flushed, (T, N, F, 3)
    share_read: Floats  # the share of elements that the fractions come from, (T, N)
    block_formats: tuple[BlockFormat, ...]
    blocks: Floats  # the ``BLOCK_KINDS`` of block formats, (T, N, B, 4)


class RunScales:
    """The scales of one run, read on demand.

    If the observed tensors changed (another graph, a second fit), the vectors of all sets are
    joined, with NaN for absent tensors.
    """

    def __init__(self, tags: Mapping[str, bytes], read: Callable[[str], Points]) -> None:
        self._tags = tags
        self._read = read
        self._sets: dict[str, TensorSet] = {}
        self._inputs_of_set: dict[str, dict[str, tuple[str, ...]]] = {}
        measured: set[Direction] = set()
        for tag, content in tags.items():
            series = Series.parse(tag)
            if series is None or series.quantity != "log2_rms":
                continue
            if (observed := TensorSet.from_content(content)) is not None:
                self._sets[series.subject] = observed
                measured.add(series.direction)
        sets = self._sets.values()
        modules: dict[str, str] = {}
        # The inputs of every tensor, empty if the event files have none.
        self.inputs: dict[str, tuple[str, ...]] = {}
        for observed in sets:
            modules.update(zip(observed.names, observed.modules, strict=True))
            inputs = dict(zip(observed.names, observed.inputs, strict=False))
            self._inputs_of_set[observed.key] = inputs
            self.inputs.update(inputs)
        self.directions = tuple(direction for direction in DIRECTIONS if direction in measured)
        self.names = merge_orders(observed.names for observed in sets)
        self.modules = tuple(modules[name] for name in self.names)
        self.formats = tuple(dict.fromkeys(item for own in sets for item in own.formats))
        blocks = (item for own in sets for item in own.block_formats)
        self.block_formats = tuple(dict.fromkeys(blocks))

    def history(self, direction: Direction, most: int | None = None) -> ScaleHistory:
        """Return log2 RMS and units of all tensors over at most ``most`` steps."""
        single = np.dtype(np.float32)
        steps, log2_rms = self._joined(direction, "log2_rms", (), single)
        unit_steps, units = self._joined(direction, "log2_unit", (), single)
        # While a file is being read, one series may be longer than the other.
        found = np.intersect1d(steps, unit_steps, return_indices=True)
        both, ours, theirs = (column[kept_steps(len(column), most)] for column in found)
        # Without recorded inputs, no tensor is known to be a source.
        is_known = any(self.inputs.values())
        sets = self._sets.values()
        read = frozenset[str]().union(*(item.read_by_matmuls(direction) for item in sets))
        return ScaleHistory(
            names=self.names,
            modules=self.modules,
            sources=tuple(is_known and self.inputs.get(name) == () for name in self.names),
            operands=tuple(name in read for name in self.names),
            steps=both,
            log2_rms=log2_rms[ours],
            log2_unit=units[theirs],
            nonfinite=np.nan_to_num(self.at(both, direction, "nonfinite", 0)),
        )

    def inputs_at(self, direction: Direction) -> dict[int, dict[str, tuple[str, ...]]]:
        """Return the inputs of every tensor by step, since the graph may change."""
        return {
            step: self._inputs_of_set[observed.key]
            for step, (observed, _) in self._rows(direction, "log2_rms").items()
        }

    def fractions(self, direction: Direction, most: int | None = None) -> FractionHistory:
        """Return out-of-range fractions of all tensors over at most ``most`` steps."""
        tail = (len(self.formats), len(FORMAT_KINDS))
        steps, fractions = self._joined(direction, "fractions", tail, np.dtype(np.float16))
        kept = kept_steps(len(steps), most)
        share_read = self.at(steps, direction, "share_read", 1)
        blocks = self.at(
            steps, direction, "blocks", np.nan, (len(self.block_formats), len(BLOCK_KINDS))
        )
        return FractionHistory(
            self.formats,
            steps[kept],
            fractions[kept],
            share_read[kept],
            self.block_formats,
            blocks[kept],
        )

    def exponents(self, direction: Direction, name: str) -> dict[int, ExponentCounts]:
        """Return the exponent counts of one tensor's true values, by step."""
        tag = Series(direction, "exponents", name).tag
        if tag not in self._tags:
            return {}
        points = sorted(dict(self._read(tag)).items())
        return {step: ExponentCounts.from_vector(vector) for step, vector in points}

    def alerts(self) -> tuple[ScaleAlert, ...]:
        """Return all alerts, in the order of the steps."""
        if ALERTS_TAG not in self._tags:
            return ()
        points = sorted(self._read(ALERTS_TAG), key=lambda point: point[0])
        return tuple(alert for _, text in points for alert in alerts_from_json(text.item()))

    def precision(self) -> dict[str, Any] | None:
        """Return the last precision report, its step, text and tables; ``None`` without one."""
        points = list(self._read(PRECISION_TAG)) if PRECISION_TAG in self._tags else []
        if not points:
            return None
        step, text = max(points, key=lambda point: point[0])
        return {"step": step, **json.loads(text.item())}

    def coverage(self) -> dict[str, Any] | None:
        """Return the numbers of matmuls scaled and in a format; ``None`` if not recorded."""
        points = list(self._read(COVERAGE_TAG)) if COVERAGE_TAG in self._tags else []
        return json.loads(points[-1][1].item()) if points else None

    def at(
        self,
        steps: npt.NDArray[np.int64],
        direction: Direction,
        quantity: Quantity,
        default: float,
        tail: tuple[int, ...] = (),
    ) -> Floats:
        """Return a quantity at some steps, ``(T, N, *tail)``, with a default where it lacks."""
        values = np.full((len(steps), len(self.names), *tail), default, np.float32)
        found_steps, found = self._joined(direction, quantity, tail, values.dtype)
        _, rows, found_rows = np.intersect1d(steps, found_steps, return_indices=True)
        values[rows] = found[found_rows]
        return values

    def largest(self, direction: Direction, quantity: Quantity) -> Floats:
        """Return the largest value of a quantity in the run, ``(N,)``; NaN without any."""
        _, found = self._joined(direction, quantity, (), np.dtype(np.float32))
        largest: Floats = np.fmax.reduce(found, axis=0, initial=np.nan)
        return largest

    def _joined(
        self, direction: Direction, quantity: Quantity, tail: tuple[int, ...], dtype: np.dtype[Any]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Return steps ``(T,)`` and the vectors of all sets as one array ``(T, N, *tail)``."""
        rows = self._rows(direction, quantity)
        steps = sorted(rows)
        joined = np.full((len(steps), len(self.names), *tail), np.nan, dtype)
        position = {name: index for index, name in enumerate(self.names)}
        for index, step in enumerate(steps):
            observed, vector = rows[step]
            columns: Any = [position[name] for name in observed.names]
            if tail:
                is_of_blocks = quantity == "blocks"
                own = observed.block_formats if is_of_blocks else observed.formats
                formats = self.block_formats if is_of_blocks else self.formats
                columns = np.ix_(columns, [formats.index(item) for item in own])
            joined[index][columns] = vector
        return np.array(steps, dtype=np.int64), joined

    def written_steps(self, direction: Direction) -> list[int]:
        """Return the steps in the files, a step that was written twice also twice."""
        tags = (Series(direction, "log2_rms", key).tag for key in self._sets)
        return [step for tag in tags if tag in self._tags for step, _ in self._read(tag)]

    def _rows(
        self, direction: Direction, quantity: Quantity
    ) -> dict[int, tuple[TensorSet, npt.NDArray[Any]]]:
        """Return the vector of each step with its set of tensors."""
        rows: dict[int, tuple[TensorSet, npt.NDArray[Any]]] = {}
        for key, observed in self._sets.items():
            tag = Series(direction, quantity, key).tag
            if tag in self._tags:
                # A resumed run may write a step twice. The later one counts.
                rows.update((step, (observed, vector)) for step, vector in self._read(tag))
        return rows


class LastStep:
    """The last step of a run, with the methods that a table needs."""

    def __init__(self, run: RunScales) -> None:
        self._histories = {direction: run.history(direction) for direction in DIRECTIONS}
        self._fractions = {direction: run.fractions(direction) for direction in DIRECTIONS}
        self.step = max(int(self._histories[direction].steps[-1]) for direction in run.directions)
        self.names, self.modules = run.names, run.modules
        self.layout = RowLayout(run.formats, histogram=False, block_formats=run.block_formats)

    def log2_rms(self, direction: Direction, *, stored: bool) -> npt.NDArray[Any]:
        """Return log2 RMS, shape ``(tensors,)``."""
        return _last(self._histories[direction].values(stored=stored))

    def nonfinite(self, direction: Direction) -> npt.NDArray[Any]:
        """Return the number of NaN and infinite elements, shape ``(tensors,)``."""
        return _last(self._histories[direction].nonfinite)

    def read_by_matmuls(self, direction: Direction) -> npt.NDArray[np.bool_]:
        """Return whether matmuls read each tensor, or its gradient; shape ``(tensors,)``."""
        return np.array(self._histories[direction].operands, dtype=bool)

    def fractions(self, direction: Direction) -> npt.NDArray[Any]:
        """Return the overflow, subnormal and flushed shares, ``(tensors, formats, 3)``."""
        return _last(self._fractions[direction].fractions)

    def block_shares(self, direction: Direction) -> npt.NDArray[Any]:
        """Return the ``BLOCK_KINDS`` of block formats, ``(tensors, block formats, 4)``."""
        return _last(self._fractions[direction].blocks)

    def share_read(self, direction: Direction) -> npt.NDArray[Any]:
        """Return the share of elements that the fractions come from, shape ``(tensors,)``."""
        return _last(self._fractions[direction].share_read)


def _last(steps: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the last of several steps; NaN without any."""
    last: npt.NDArray[Any] = steps[-1] if len(steps) else np.full(steps.shape[1:], np.nan)
    return last


def kept_steps(number: int, most: int | None) -> npt.NDArray[np.int64]:
    """Return at most ``most`` positions of ``number`` steps, evenly spread, with the last."""
    most = number if most is None else min(number, most)
    return np.unique(np.linspace(number - 1, 0, most).round().astype(np.int64))


def merge_orders(orders: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Merge orders of names into one that keeps each of them, as far as they agree."""
    # A name that only a later order has follows its predecessor there.
    merged: list[str] = []
    for order in orders:
        seen, previous = set(merged), ""
        added: defaultdict[str, list[str]] = defaultdict(list)
        for name in order:
            if name in seen:
                previous = name
            else:
                added[previous].append(name)
        merged = [*added[""], *(each for name in merged for each in (name, *added[name]))]
    return tuple(merged)


def block_of(module: str) -> str:
    """Return a module's path up to its first index, ``model.blocks.0``, or its first two parts."""
    parts = module.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), 1)
    return ".".join(parts[: number + 1])


EVENT_FILES = "*tfevents*"


def read_run(directory: str | Path, argument: str = "directory") -> RunScales:
    """Read the scales in the event files of a folder, which the user gave as an argument."""
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{argument}={str(folder)!r}: no such folder. Expected the folder of a run, such as "
            "logs/gpt/version_0. Correct the path."
        )
    if not any(path.is_file() for path in folder.glob(EVENT_FILES)):
        raise FileNotFoundError(f"{argument}={str(folder)!r}: no event files here. {_hint(folder)}")
    with collect_damaged_files() as damaged:
        events = EventAccumulator(str(folder), {TENSORS: 0}, purge_orphaned_data=False).Reload()
    try:
        tags = events.PluginTagToContent(PLUGIN_NAME)
    except KeyError:
        tags = {}

    def read(tag: str) -> Points:
        return [
            (event.step, tensor_util.make_ndarray(event.tensor_proto))
            for event in events.Tensors(tag)
        ]

    run = RunScales(tags, read)
    if damaged:
        text = (
            f"{argument}={str(folder)!r}: the event file {', '.join(damaged)} is damaged, and what "
            "follows the damage cannot be read. Expected an intact file. Copy it again."
        )
        if not run.directions:
            raise ValueError(text)
        warnings.warn(text, stacklevel=2)
    if not run.directions:
        raise ValueError(
            f"{argument}={str(folder)!r}: its event files have no scales. Expected a run whose "
            "Trainer had a ScaleMonitor among its callbacks. Add one and train again."
        )
    for direction in run.directions:
        _check_one_run(f"{argument}={str(folder)!r}", folder, run.written_steps(direction))
    return run


def _check_one_run(shown: str, folder: Path, steps: Sequence[int]) -> None:
    """Raise an error if several runs have written a folder: their first step is there twice."""
    # A run that resumes begins at a later step.
    if steps.count(first := min(steps)) > 1:
        files = ", ".join(sorted(path.name for path in folder.glob(EVENT_FILES)))
        raise ValueError(
            f"{shown}: several runs were logged into this folder, since step {first} was written "
            f"{steps.count(first)} times. Expected one run. Give each run its own folder. To keep "
            f"these files, move those of each run into a folder of its own: {files}"
        )


def _hint(folder: Path) -> str:
    """Return a hint about where the event files are."""
    below = sorted({path.parent for path in folder.rglob(EVENT_FILES) if path.is_file()})
    if not below:
        return "Expected the folder that a TensorBoardLogger wrote (its log_dir). Correct the path."
    shown = ", ".join(str(path) for path in below[:5]) + (", ..." if len(below) > 5 else "")
    return f"Expected the folder of one run. There are event files in {shown}."

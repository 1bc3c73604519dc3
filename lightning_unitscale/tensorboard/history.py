"""The steps of a run, read from the series in its event files.

NumPy and the standard library only: the dashboard's server, which has no torch, and the report
both read through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.util import tensor_util

from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.scales.alerts import ScaleAlert, alerts_from_json
from lightning_unitscale.scales.layout import DIRECTIONS, FORMAT_KINDS, Direction
from lightning_unitscale.tensorboard.schema import (
    ALERTS_TAG,
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
    """log2 RMS of all tensors of a run over its steps, in one direction.

    Attributes:
        names: The tensors, in graph order.
        modules: Path of the module that makes each.
        sources: Which of them are computed from no other one: parameters and inputs of the step.
        operands: Which of them matrix products read; backward, whose gradients they read.
        steps: Increasing, shape ``(T,)``.
        log2_rms: Of the stored tensors, shape ``(T, N)``; ``-inf`` for a tensor of zeros, NaN where
            one was not there.
        log2_unit: log2 of the units that they are stored in, shape ``(T, N)``; a tensor means
            ``log2_rms + log2_unit`` to the model.
        nonfinite: Number of NaN and infinite elements, which have no part in the RMS, shape
            ``(T, N)``.
    """

    names: tuple[str, ...]
    modules: tuple[str, ...]
    sources: tuple[bool, ...]
    operands: tuple[bool, ...]
    steps: npt.NDArray[np.int64]
    log2_rms: Floats
    log2_unit: Floats
    nonfinite: Floats

    def values(self, *, stored: bool) -> Floats:
        """log2 RMS of the stored or of the true values, shape ``(T, N)``."""
        return self.log2_rms if stored else self.log2_rms + self.log2_unit

    def thinned(self, number: int) -> ScaleHistory:
        """A copy with at most ``number`` steps, the last among them."""
        kept = kept_steps(len(self.steps), number)
        return replace(
            self,
            steps=self.steps[kept],
            log2_rms=self.log2_rms[kept],
            log2_unit=self.log2_unit[kept],
            nonfinite=self.nonfinite[kept],
        )


@dataclass(frozen=True, eq=False)
class FractionHistory:
    """What each format does to the stored tensors over the steps, in one direction.

    Attributes:
        formats: The monitored formats.
        steps: Increasing, shape ``(T,)``.
        fractions: Overflow, subnormal and flushed, shape ``(T, N, F, 3)``, float16.
    """

    formats: tuple[NumberFormat, ...]
    steps: npt.NDArray[np.int64]
    fractions: npt.NDArray[np.float16]

    def thinned(self, number: int) -> FractionHistory:
        """A copy with at most ``number`` steps, the last among them."""
        kept = kept_steps(len(self.steps), number)
        return replace(self, steps=self.steps[kept], fractions=self.fractions[kept])


@dataclass(frozen=True, eq=False)
class RunScales:
    """The scales of one run, read when they are asked for.

    When other tensors were observed in between (another graph, a second fit), the vectors of all
    sets are laid side by side, with NaN where a tensor was not there.

    Args:
        tags: The plugin's tags of the run and their metadata content.
        read: Returns the points of a tag.
    """

    tags: Mapping[str, bytes]
    read: Callable[[str], Points]
    _sets: dict[Direction, dict[str, TensorSet]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sets: dict[Direction, dict[str, TensorSet]] = {direction: {} for direction in DIRECTIONS}
        for tag, content in self.tags.items():
            series = Series.parse(tag)
            if series is None or series.quantity != "log2_rms":
                continue
            if (observed := TensorSet.from_content(content)) is not None:
                sets[series.direction][series.subject] = observed
        object.__setattr__(self, "_sets", sets)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The directions that were measured."""
        return tuple(direction for direction in DIRECTIONS if self._sets[direction])

    def names(self, direction: Direction) -> tuple[str, ...]:
        """The tensors of all sets, in graph order."""
        return merge_orders(observed.names for observed in self._sets[direction].values())

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """What every tensor is computed from; empty for event files that do not say."""
        inputs: dict[str, tuple[str, ...]] = {}
        for sets in self._sets.values():
            for observed in sets.values():
                inputs.update(zip(observed.names, observed.inputs, strict=False))
        return inputs

    def history(self, direction: Direction) -> ScaleHistory:
        """log2 RMS and units of all tensors and steps."""
        names = self.names(direction)
        sets = self._sets[direction].values()
        modules = {
            name: module
            for observed in sets
            for name, module in zip(observed.names, observed.modules, strict=True)
        }
        single = np.dtype(np.float32)
        steps, log2_rms = self._joined(direction, "log2_rms", names, (), single)
        unit_steps, units = self._joined(direction, "log2_unit", names, (), single)
        # A reader that is still busy may have more of the one than of the other.
        both, ours, theirs = np.intersect1d(steps, unit_steps, return_indices=True)
        in_order = tuple(modules[name] for name in names)
        inputs = self.inputs()
        # A file may say nothing of inputs; then nothing is known to have none.
        is_known = any(inputs.values())
        sources = tuple(is_known and inputs.get(name) == () for name in names)
        nonfinite = np.zeros((len(both), len(names)), single)
        bad_steps, bad = self._joined(direction, "nonfinite", names, (), single)
        _, rows, bad_rows = np.intersect1d(both, bad_steps, return_indices=True)
        nonfinite[rows] = np.nan_to_num(bad[bad_rows])
        read = frozenset[str]().union(*(item.read_by_products(direction) for item in sets))
        return ScaleHistory(
            names=names,
            modules=in_order,
            sources=sources,
            operands=tuple(name in read for name in names),
            steps=both,
            log2_rms=log2_rms[ours],
            log2_unit=units[theirs],
            nonfinite=nonfinite,
        )

    def fractions(self, direction: Direction) -> FractionHistory:
        """Out-of-range fractions of all tensors and steps."""
        formats = tuple(
            dict.fromkeys(
                item for observed in self._sets[direction].values() for item in observed.formats
            )
        )
        tail = (len(formats), len(FORMAT_KINDS))
        names = self.names(direction)
        steps, fractions = self._joined(
            direction, "fractions", names, tail, np.dtype(np.float16), formats
        )
        return FractionHistory(formats, steps, fractions)

    def exponents(self, direction: Direction, name: str) -> dict[int, ExponentCounts]:
        """Exponent counts of one tensor by step, of its true values."""
        tag = Series(direction, "exponents", name).tag
        if tag not in self.tags:
            return {}
        points = sorted(dict(self.read(tag)).items())
        return {step: ExponentCounts.from_vector(vector) for step, vector in points}

    def alerts(self) -> tuple[ScaleAlert, ...]:
        """Everything that was found wrong, in the order of the steps."""
        if ALERTS_TAG not in self.tags:
            return ()
        points = sorted(self.read(ALERTS_TAG), key=lambda point: point[0])
        return tuple(alert for _, text in points for alert in alerts_from_json(text.item()))

    def _joined(
        self,
        direction: Direction,
        quantity: Quantity,
        names: tuple[str, ...],
        tail: tuple[int, ...],
        dtype: np.dtype[Any],
        formats: tuple[NumberFormat, ...] = (),
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Steps ``(T,)`` and the vectors of all sets as one array ``(T, N, *tail)``."""
        position = {name: index for index, name in enumerate(names)}
        rows: dict[int, tuple[TensorSet, npt.NDArray[Any]]] = {}
        for key, observed in self._sets[direction].items():
            tag = Series(direction, quantity, key).tag
            if tag in self.tags:
                # Of a step that was written twice (a resumed run) the later one is true.
                rows.update((step, (observed, vector)) for step, vector in self.read(tag))
        steps = sorted(rows)
        joined = np.full((len(steps), len(names), *tail), np.nan, dtype)
        for index, step in enumerate(steps):
            observed, vector = rows[step]
            if observed.names == names and (not formats or observed.formats == formats):
                joined[index] = vector
                continue
            columns: Any = np.array([position[name] for name in observed.names])
            if formats:
                columns = np.ix_(columns, [formats.index(item) for item in observed.formats])
            joined[index][columns] = vector
        return np.array(steps, dtype=np.int64), joined


def kept_steps(number: int, most: int) -> npt.NDArray[np.int64]:
    """Positions of at most ``most`` of ``number`` steps, evenly spread, the last among them."""
    return np.unique(np.linspace(number - 1, 0, min(number, most)).round().astype(np.int64))


def merge_orders(orders: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """One order of all names that keeps each of the orders, as far as they agree.

    A name that only a later order has follows the name that it follows there.
    """
    merged: list[str] = []
    seen: set[str] = set()
    for order in orders:
        if not merged:
            merged, seen = list(order), set(order)
            continue
        added: dict[str | None, list[str]] = {}
        previous: str | None = None
        for name in order:
            if name in seen:
                previous = name
            else:
                added.setdefault(previous, []).append(name)
        if added:
            result = added.get(None, [])
            for name in merged:
                result += [name, *added.get(name, [])]
            merged, seen = result, set(result)
    return tuple(merged)


def block_of(module: str) -> str:
    """A module's path up to its first index, ``model.blocks.0``, or else its first two parts."""
    parts = module.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), 1)
    return ".".join(parts[: number + 1])


EVENT_FILES = "*tfevents*"


def read_run(directory: str | Path) -> RunScales:
    """The scales in the event files of a folder, all of them read.

    Raises:
        FileNotFoundError: If there is no such folder, or no event file in it.
        ValueError: If its event files have no scales.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"directory={str(folder)!r}: no such folder; expected the folder of a run, such as "
            "logs/gpt/version_0; correct the path"
        )
    # Their names begin with the time at which they were opened.
    files = sorted(path for path in folder.glob(EVENT_FILES) if path.is_file())
    if not files:
        raise FileNotFoundError(f"directory={str(folder)!r}: no event files here; {_hint(folder)}")
    contents: dict[str, bytes] = {}
    points: dict[str, list[tuple[int, npt.NDArray[Any]]]] = {}
    for path in files:
        # The legacy loader leaves summaries as they were written: scalars need no conversion here.
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                is_ours = value.tag == ALERTS_TAG or Series.parse(value.tag) is not None
                if not value.HasField("tensor") or not is_ours:
                    continue
                if value.metadata.plugin_data.content:
                    contents.setdefault(value.tag, value.metadata.plugin_data.content)
                array = np.asarray(tensor_util.make_ndarray(value.tensor))
                points.setdefault(value.tag, []).append((event.step, array))
    run = RunScales({tag: contents.get(tag, b"") for tag in points}, points.__getitem__)
    if not run.directions:
        raise ValueError(
            f"directory={str(folder)!r}: its event files have no scales; expected a run whose "
            "Trainer had a ScaleMonitor among its callbacks; add one and train again"
        )
    return run


def _hint(folder: Path) -> str:
    """Where event files are instead."""
    below = sorted({path.parent for path in folder.rglob(EVENT_FILES) if path.is_file()})
    if not below:
        return "expected the folder that a TensorBoardLogger wrote (its log_dir); correct the path"
    shown = ", ".join(str(path) for path in below[:5]) + (", ..." if len(below) > 5 else "")
    return f"expected the folder of one run; there are event files in {shown}"

"""Explain to users which matmuls were scaled, and their units, as text or HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from lightning_unitscale.callbacks.packages import rank_zero_info, rank_zero_warn
from lightning_unitscale.loops.loggers import RunWriters
from lightning_unitscale.loops.loop import Loop
from lightning_unitscale.matmuls.coverage import (
    NO_UNIT,
    Coverage,
    LostFormats,
    lacking_line,
    listed,
)
from lightning_unitscale.matmuls.gauge import Gauge, GaugePair
from lightning_unitscale.matmuls.matmul_formats import WIDE_GRADIENT
from lightning_unitscale.matmuls.measurement import Unrepresentable
from lightning_unitscale.matmuls.session import MatmulSession
from lightning_unitscale.patching import nothing
from lightning_unitscale.tensorboard.table import STEP_ITSELF

_NONE_YET = "none yet"  # shown for a tensor that was zero or not finite whenever it was measured


@dataclass(frozen=True)
class Table:
    """Rows of texts under headers. ``str`` of it is text."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return tabulate(self.rows, headers=self.headers, disable_numparse=True)

    def html(self) -> str:
        """Return the table as HTML, with escaped texts."""
        return tabulate(self.rows, headers=self.headers, tablefmt="html", disable_numparse=True)


class Explanation(str):
    """A text of several parts, which a notebook shows as HTML."""

    parts: tuple[str | Table, ...]

    def __new__(cls, *parts: str | Table) -> Explanation:
        """Join the parts, with a line between them."""
        shown = tuple(part for part in parts if str(part))
        text = super().__new__(cls, "\n\n".join(map(str, shown)))
        text.parts = shown
        return text

    def _repr_html_(self) -> str:
        return "\n".join(
            part.html() if isinstance(part, Table) else f"<pre>{html.escape(part)}</pre>"
            for part in self.parts
        )


class CountedSteps:
    """The coverage of each counted step, by the step's name."""

    def __init__(self, wanted: str = "") -> None:
        self._lost = LostFormats(wanted)
        self._coverages: dict[str, Coverage] = {}
        self._training_step = ""

    def __contains__(self, name: str) -> bool:
        return name in self._coverages

    @property
    def main(self) -> Coverage:
        """Return the coverage of the training step, or of an evaluation on its own."""
        last = next(iter(self._coverages.values()), Coverage())
        return self._coverages.get(self._training_step, last)

    def take(
        self, session: MatmulSession, name: str, is_wanted: bool, *, is_training: bool, when: str
    ) -> None:
        """Take a step's count from its session, and report new results."""
        # A step's first count is logged as one line, with a warning if much was left unscaled. When
        # matmuls leave the format of the step, a warning names them and the line is logged again.
        # An unrequested count is kept if matmuls have left the format, or if some of the last count
        # lacked a unit.
        counter, session.counter = session.counter, None
        if counter is None:
            return
        before = self._coverages.get(name, Coverage())
        is_first = not before.counts  # a step may skip its first batches
        lacked = is_first or any(count.outside == NO_UNIT for count in before.counts)
        if not (is_wanted or lacked) and self._lost.are_known(name, counter):
            return
        lacking = tuple(session.units.lacking.values())
        coverage = counter.result(lacking=lacking, format=session.format)
        if is_training:
            self._training_step = name
        self._coverages[name] = coverage
        warned = [self._lost.new_in(name, coverage, when)]
        # An evaluation without rounding has the same results scaled and unscaled.
        if is_first and (is_training or coverage.format):
            warned.append(coverage.shortfall())
        text = ". ".join(filter(None, warned))
        is_new = is_first and bool(coverage.counts)
        if text or (is_new and (len(self._coverages) == 1 or is_training)):
            rank_zero_info(f"UnitScaleCallback: {name}: {coverage.line()}.")
        if text:
            rank_zero_warn(f"UnitScaleCallback: {name}: {text}")

    def explain(self, lacking: Mapping[str, str]) -> list[str]:
        """Return a line for each step and a table of the training step, if a step has run."""
        if not self._coverages:
            return []
        lines = [
            f"{name}: {replace(coverage, lacking=()).line()}"
            for name, coverage in self._coverages.items()
        ]
        return ["\n".join(lines), self.main.table(), lacking_line(tuple(lacking.values()))]


class UnitEvents:
    """A record of new units and their reasons, as lines for ``explain()``.

    The loop's loggers get the lines about matmuls that change their format.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._writers = RunWriters("scales", nothing)
        self._running: tuple[Loop, int] | None = None  # the loop that runs and its optimizer step

    def begin_batch(self, loop: Loop) -> None:
        """Take the step of the events that follow."""
        self._running = loop, loop.step_index

    def leave(self) -> None:
        """Drop the loop and its loggers."""
        self._running = None
        self._writers.clear()

    def new_units(self, num_changed: int, when: str, outside: Mapping[str, float]) -> None:
        """Record that units have changed."""
        worst = sorted(outside.items(), key=lambda item: -abs(math.log2(item[1])))[:3]
        reason = ", ".join(f"{name} at RMS {rms:.3g}" for name, rms in worst)
        event = f"New units for {num_changed} tensors at {when}"
        self.lines.append(f"{event}: {reason}" if reason else event)
        if outside:
            rank_zero_info(f"UnitScaleCallback: {self.lines[-1]}")

    def late_units(self, names: Sequence[str], when: str) -> None:
        """Record the first unit of tensors that had none."""
        if names:
            self.lines.append(f"First units for {len(names)} tensors at {when}: {listed(names)}")

    def readmitted(self, names: Sequence[str], when: str) -> None:
        """Record the matmuls that have returned to FP8, or to its finer format."""
        if names:
            self._new_format(f"Back in the finer format from {when} on: {listed(names)}")

    def unrepresentable(self, found: Iterable[Unrepresentable], when: str) -> None:
        """Record the matmuls that left FP8, or its finer format."""
        for new in found:
            for what, reasons in (
                ("Out of FP8", new.matmuls),
                (f"Gradients in {WIDE_GRADIENT}", new.gradients),
            ):
                if reasons:
                    text = "; ".join(f"{name}, since {why}" for name, why in reasons.items())
                    self._new_format(f"{what} from {when} on: {text}")

    def _new_format(self, line: str) -> None:
        self.lines.append(line)
        rank_zero_info(f"UnitScaleCallback: {line}")
        if self._running is not None:
            loop, step = self._running
            self._writers.write_event(loop, line, step)


def units_table(gauge: Gauge, lacking: Iterable[str] = ()) -> Table | None:
    """Return a table of a gauge's units: a row for each tensor, with its module."""
    # A matmul has units for its operands and for its output's gradient.
    rows: dict[str, dict[str, GaugePair | None]] = {}
    known: dict[str, GaugePair | None] = dict(gauge)
    for name, pair in (known | dict.fromkeys(lacking)).items():
        # As in "head.linear:unscaled:weight": its name, how it is made, its operand.
        result, *others = name.split(":")
        role = next((other for other in others if other != "unscaled"), "")
        rows.setdefault(result, {})[role] = pair
    if not rows:
        return None
    # In the order in which modules first have a row.
    modules = dict.fromkeys(result.rpartition(".")[0] for result in rows)
    shown = [
        (module or STEP_ITSELF, result.rpartition(".")[2], *_unit_columns(units))
        for module in modules
        for result, units in rows.items()
        if result.rpartition(".")[0] == module
    ]
    return Table(("module", "tensor", "operand units", "gradient"), tuple(shown))


def _unit_columns(pairs: Mapping[str, GaugePair | None]) -> tuple[str, str]:
    """Return the units of a matmul's operands and gradient. ``None`` has no unit yet."""
    operands = ", ".join(
        f"{role} {_NONE_YET if pair is None else f'2^{pair.log2_sigma}'}"
        for role, pair in pairs.items()
        if role
    )
    if "" not in pairs:
        return operands, ""
    own = pairs[""]
    return operands, _NONE_YET if own is None else f"2^{own.log2_gamma}"

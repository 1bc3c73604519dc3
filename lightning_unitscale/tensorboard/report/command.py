"""`lightning-unitscale report RUN_DIR`: picture, page and table from the event files of runs."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.scales.alerts import ScaleAlert, alerts_text
from lightning_unitscale.scales.layout import Direction, RowLayout
from lightning_unitscale.tensorboard.history import RunScales, merge_orders, read_run
from lightning_unitscale.tensorboard.report.figure import write_figure
from lightning_unitscale.tensorboard.report.page import report_page
from lightning_unitscale.tensorboard.table import Array, scale_table

_SHOWN_ALERTS = 200
_PAGE = "scales.html"
_PICTURE = re.compile(r"scales(_\d+)?\.png")


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        page: The HTML file.
        pictures: A PNG per run; none where matplotlib is not installed.
        tables: The scales of the last step of every run and its alerts, by its name.
        no_pictures: Why there are none; empty otherwise.
    """

    page: Path
    pictures: tuple[Path, ...]
    tables: dict[str, str]
    no_pictures: str = ""


def write_report(
    run_directories: Sequence[str | Path], output: str | Path, *, full: bool = False
) -> Report:
    """Write a report of one run, or of several to compare.

    Args:
        run_directories: Folders with event files, one per run.
        output: The folder to write to; it is made when it is not there.
        full: Whether the tables are of all tensors, as on the page, and not of blocks.

    Raises:
        FileNotFoundError: If a folder is not there or has no event files.
        ValueError: If a run has no scales.
    """
    runs = {name: read_run(path) for name, path in _names(run_directories).items()}
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    _remove_pictures(folder)
    last_steps = {name: LastStep(run) for name, run in runs.items()}
    pictures, no_pictures = [], ""
    for number, (name, run) in enumerate(runs.items(), start=1):
        path = folder / ("scales.png" if len(runs) == 1 else f"scales_{number}.png")
        try:
            write_figure(run, path, name)
        except ModuleNotFoundError as error:
            no_pictures = str(error)
            break
        pictures.append(path)
    page = folder / _PAGE
    full_tables = {name: scale_table(step) for name, step in last_steps.items()}
    text = report_page(runs, full_tables, title=f"Scales: {', '.join(runs)}")
    page.write_text(text, encoding="utf-8")
    tables = {
        name: _with_alerts(scale_table(last_steps[name], full=full), run.alerts())
        for name, run in runs.items()
    }
    return Report(page, tuple(pictures), tables, no_pictures)


def main(args: Sequence[str]) -> None:
    """Run the command.

    Raises:
        SystemExit: If the report cannot be made; the message says why.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-unitscale report",
        description="Writes the scales of runs, which a ScaleMonitor logged to TensorBoard, as "
        "pictures and as one HTML file that needs no server, and prints the last step's table.",
    )
    parser.add_argument(
        "run_directory", nargs="+", metavar="RUN_DIR", help="folder of a run, with its event files"
    )
    parser.add_argument(
        "--output", default="scale_report", metavar="DIR", help="folder to write to (%(default)s)"
    )
    parser.add_argument("--full", action="store_true", help="print the scales of all tensors")
    options = parser.parse_args(args)
    try:
        report = write_report(options.run_directory, options.output, full=options.full)
    except (OSError, ValueError) as error:
        sys.exit(f"lightning-unitscale report: {error}")
    for name, table in report.tables.items():
        print(f"{name}\n{table}\n" if len(report.tables) > 1 else f"{table}\n")
    print("\n".join(f"Written: {path}" for path in (*report.pictures, report.page)))
    if report.no_pictures:
        print(f"No picture: {report.no_pictures}", file=sys.stderr)


class LastStep:
    """What the event file has of the last step, as a table wants it.

    Args:
        run: The run.
    """

    def __init__(self, run: RunScales) -> None:
        self._histories = {direction: run.history(direction) for direction in run.directions}
        self._fractions = {direction: run.fractions(direction) for direction in run.directions}
        self.step = max(int(history.steps[-1]) for history in self._histories.values())
        self.names = merge_orders(history.names for history in self._histories.values())
        modules: dict[str, str] = {}
        for history in self._histories.values():
            modules.update(zip(history.names, history.modules, strict=True))
        self.modules = tuple(modules[name] for name in self.names)
        formats: dict[NumberFormat, None] = {}
        for fractions in self._fractions.values():
            formats.update(dict.fromkeys(fractions.formats))
        self.layout = RowLayout(tuple(formats), histogram=False)

    def log2_rms(self, direction: Direction, *, stored: bool) -> Array:
        """log2 RMS, shape ``(tensors,)``."""
        result = np.full(len(self.names), np.nan)
        history = self._histories.get(direction)
        if history is not None:
            result[self._places(direction)] = history.values(stored=stored)[-1]
        return result

    def nonfinite(self, direction: Direction) -> Array:
        """Number of NaN and infinite elements, shape ``(tensors,)``."""
        result = np.zeros(len(self.names))
        history = self._histories.get(direction)
        if history is not None:
            result[self._places(direction)] = history.nonfinite[-1]
        return result

    def read_by_products(self, direction: Direction) -> npt.NDArray[np.bool_]:
        """Which tensors matrix products read, and which gradients; shape ``(tensors,)``."""
        result = np.zeros(len(self.names), dtype=bool)
        history = self._histories.get(direction)
        if history is not None:
            result[self._places(direction)] = history.operands
        return result

    def fractions(self, direction: Direction, *, stored: bool) -> Array:
        """Overflow, subnormal and flushed of the stored values; of true ones none are written."""
        result = np.full((len(self.names), len(self.layout.formats), 3), np.nan)
        measured = self._fractions.get(direction)
        if measured is not None and stored:
            formats = [self.layout.formats.index(item) for item in measured.formats]
            result[np.ix_(self._places(direction), formats)] = measured.fractions[-1]
        return result

    def _places(self, direction: Direction) -> list[int]:
        position = {name: index for index, name in enumerate(self.names)}
        return [position[name] for name in self._histories[direction].names]


def _with_alerts(table: str, alerts: Sequence[ScaleAlert]) -> str:
    if not alerts:
        return table
    number = "1 alert" if len(alerts) == 1 else f"{len(alerts)} alerts"
    return f"{table}\n\n{number}:\n{alerts_text(alerts, _SHOWN_ALERTS)}"


def _remove_pictures(folder: Path) -> None:
    """Those of an earlier report, which had another number of runs."""
    if (folder / _PAGE).is_file():
        for path in folder.glob("scales*.png"):
            if _PICTURE.fullmatch(path.name):
                path.unlink()


def _names(directories: Sequence[str | Path]) -> dict[str, Path]:
    """Runs by what tells their folders apart, as TensorBoard on the folder above names them."""
    paths = list(dict.fromkeys(Path(os.path.abspath(folder)) for folder in directories))
    if len(paths) == 1:
        return {"/".join(paths[0].parts[-2:]).lstrip("/"): paths[0]}
    common = os.path.commonpath(paths)
    return {os.path.relpath(path, common): path for path in paths}

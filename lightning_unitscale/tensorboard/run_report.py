"""Write a picture, a page and a table of runs: `lightning-unitscale report RUN_DIR`.

The picture has heat maps of true and stored values, forward and backward. Without unit scaling
both are the same, so there is one map per direction.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from lightning_unitscale.arguments import checked_folder
from lightning_unitscale.scales.alerts import ScaleAlert, alerts_text
from lightning_unitscale.tensorboard.history import (
    LastStep,
    RunScales,
    ScaleHistory,
    block_of,
    read_run,
)
from lightning_unitscale.tensorboard.report_page import report_page
from lightning_unitscale.tensorboard.table import scale_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN_ALERTS = 200
_PAGE = "scales.html"
_PICTURE = re.compile(r"scales(_\d+)?\.png")
# As in the dashboard's palette.js.
STOPS: Final = ("#08306b", "#2166ac", "#6baed6", "#f4f4f2", "#fdae61", "#d95f0e", "#7f2704")
ZERO: Final = "#b9bcc2"
BAD: Final = "#c40a8f"
_MISSING: Final = "#ffffff"
# As in the dashboard's style.css.
FLAG: Final = "#b3261e"
_LARGEST_NAMED: Final = 60
_MOST_TICKS: Final = 7


@dataclass(frozen=True)
class Report:
    """A written report: an HTML file, a PNG per run, and tables of the runs' last steps."""

    page: Path
    pictures: tuple[Path, ...]
    tables: dict[str, str]
    no_pictures: str = ""  # why there are no pictures, if matplotlib is not installed


def write_report(
    run_directories: Sequence[str | Path], output: str | Path, *, full: bool = False
) -> Report:
    """Write a report of one or several runs."""
    runs = {name: read_run(path, "RUN_DIR") for name, path in _names(run_directories).items()}
    folder = checked_folder("output", output)
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
        name: _with_more(scale_table(last_steps[name], full=full), run)
        for name, run in runs.items()
    }
    return Report(page, tuple(pictures), tables, no_pictures)


def _with_more(table: str, run: RunScales) -> str:
    """Append the last precision report and the alerts of a run."""
    precision = run.precision()
    parts = [table, "" if precision is None else precision["text"]]
    if alerts := run.alerts():
        number = "1 alert" if len(alerts) == 1 else f"{len(alerts)} alerts"
        parts.append(f"{number}:\n{alerts_text(alerts, _SHOWN_ALERTS)}")
    return "\n\n".join(filter(None, parts))


def _remove_pictures(folder: Path) -> None:
    """Remove the pictures of an earlier report, which may have had more runs."""
    if (folder / _PAGE).is_file():
        for path in folder.glob("scales*.png"):
            if _PICTURE.fullmatch(path.name):
                path.unlink()


def _names(directories: Sequence[str | Path]) -> dict[str, Path]:
    """Return runs by the names that TensorBoard gives them for their common folder."""
    paths = list(dict.fromkeys(Path(os.path.abspath(folder)) for folder in directories))
    if len(paths) == 1:
        return {"/".join(paths[0].parts[-2:]).lstrip("/"): paths[0]}
    common = os.path.commonpath(paths)
    return {os.path.relpath(path, common): path for path in paths}


def write_figure(run: RunScales, path: Path, title: str) -> None:
    """Write the heat maps of a run as a PNG."""
    try:
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "matplotlib not found; the picture of a report needs the extra `report`; run: pip "
            "install 'lightning-unitscale[report]'"
        ) from error
    histories = [run.history(direction) for direction in run.directions]
    alerts = run.alerts()
    has_units = any(np.nan_to_num(history.log2_unit).any() for history in histories)
    views = (False, True) if has_units else (True,)
    most = max(len(history.names) for history in histories)
    height = min(max(0.055 * most, 2.8), 11.0)
    size = (13.0 if has_units else 8.5, 1.2 + height * len(histories))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle("\n".join([title, *_alerts_line(alerts)]), fontsize=12)
    smooth = LinearSegmentedColormap.from_list("scales", STOPS, N=512)
    colors = smooth.with_extremes(bad=_MISSING, under=ZERO, over=BAD)
    grid = figure.subplots(len(histories), len(views), squeeze=False, sharey="row")
    for row, direction, history in zip(grid, run.directions, histories, strict=True):
        limit = color_limit(history)
        for axes, stored in zip(row, views, strict=True):
            values = history.values(stored=stored)
            image = _heat_map(axes, history, values, colors, limit)
            view = "stored value" if stored else "true value"
            axes.set_title(f"{direction}, {view}" if has_units else direction)
            _mark(axes, history, [alert for alert in alerts if alert.direction == direction])
        _label_rows(row[0], history)
        _label_parts(row, history)
        bar = figure.colorbar(image, ax=row, shrink=0.6, pad=0.01, extend="neither")
        bar.set_label("log2 RMS; gray: all zero, pink: NaN or inf", fontsize=8)
    figure.savefig(path, dpi=110)


def color_limit(history: ScaleHistory) -> float:
    """Return a limit of the colors that includes 98 % of all true and stored values."""
    values = [history.values(stored=stored) for stored in (False, True)]
    magnitudes = np.abs(np.concatenate([array[np.isfinite(array)] for array in values]))
    if not magnitudes.size:
        return 8.0
    return 2.0 * max(1, math.ceil(float(np.quantile(magnitudes, 0.98)) / 2))


def _heat_map(
    axes: Axes, history: ScaleHistory, values: npt.NDArray[Any], colors: Any, limit: float
) -> Any:
    # Clip finite values to the range. Below it are tensors of zeros, above it tensors with NaN or
    # infinite elements.
    shown = np.where(np.isneginf(values), -2 * limit, np.clip(values, -limit, limit))
    shown = np.where(history.nonfinite > 0, 2 * limit, shown)
    image = axes.imshow(
        shown.T, cmap=colors, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest"
    )
    stride = -(-len(history.steps) // _MOST_TICKS)
    ticks = range(0, len(history.steps), max(stride, 1))
    axes.set_xticks(ticks, [f"{history.steps[tick]:,}" for tick in ticks], fontsize=8)
    axes.set_xlabel("step", fontsize=8)
    return image


def _mark(axes: Axes, history: ScaleHistory, alerts: Sequence[ScaleAlert]) -> None:
    """Draw a flag at the left of each cell with an alert."""
    rows = {name: index for index, name in enumerate(history.names)}
    columns = {step: index for index, step in enumerate(history.steps.tolist())}
    cells = {
        (columns[alert.step] - 0.5, rows[alert.tensor])
        for alert in alerts
        if alert.tensor in rows and alert.step in columns
    }
    if cells:
        x, y = zip(*sorted(cells), strict=True)
        axes.scatter(x, y, s=26, marker=">", color=FLAG, edgecolors="white", linewidths=0.8)


def _alerts_line(alerts: Sequence[ScaleAlert]) -> list[str]:
    if not alerts:
        return []
    first = alerts[0]
    number = "1 alert" if len(alerts) == 1 else f"{len(alerts)} alerts (flags)"
    kind = "NaN or inf" if first.kind in ("nonfinite", "loss") else first.kind
    return [f"{number}, first at step {first.step:,}: {kind}, {first.tensor}"]


def _label_parts(row: Sequence[Axes], history: ScaleHistory) -> None:
    """Label parameters and results at the right, since their blocks have the same names."""
    parts = [(key, len(list(group))) for key, group in groupby(history.sources)]
    if len(parts) < 2:
        return
    side = row[-1].secondary_yaxis("right")
    starts = np.cumsum([0, *(number for _, number in parts)])
    tall = [
        ((start + stop - 1) / 2, "parameters" if is_source else "results")
        for (is_source, _), start, stop in zip(parts, starts, starts[1:], strict=False)
        if stop - start >= len(history.names) / 8
    ]
    middles, texts = zip(*tall, strict=True) if tall else ((), ())
    side.set_yticks(middles, texts, rotation=90, va="center", fontsize=8)
    side.tick_params(length=0)
    for axes in row:
        for start in starts[1:-1]:
            axes.axhline(start - 0.5, color="black", linewidth=0.8)


def _label_rows(axes: Axes, history: ScaleHistory) -> None:
    """Label rows with names if there is space, or else with blocks."""
    names = history.names
    if len(names) <= _LARGEST_NAMED:
        axes.set_yticks(range(len(names)), names, fontsize=6)
        return
    blocks = [block_of(module) or name for module, name in zip(history.modules, names, strict=True)]
    starts = [k for k, block in enumerate(blocks) if k == 0 or block != blocks[k - 1]]
    ends = [*starts[1:], len(blocks)]
    # A label needs about one hundredth of the height.
    tall = [(a, b) for a, b in zip(starts, ends, strict=True) if b - a >= len(names) / 80]
    middles = [(a + b - 1) / 2 for a, b in tall]
    axes.set_yticks(middles, [blocks[a] for a, _ in tall], fontsize=7)
    for start in starts[1:]:
        axes.axhline(start - 0.5, color="#00000030", linewidth=0.5)

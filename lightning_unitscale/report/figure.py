"""The scales of a run as a picture: heat maps forward and backward, as meant and as stored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from lightning_unitscale.tensorboard.history import RunScales, ScaleHistory, block_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# As in the dashboard's palette.js.
STOPS: Final = ("#08306b", "#2166ac", "#6baed6", "#f4f4f2", "#fdae61", "#d95f0e", "#7f2704")
ZERO: Final = "#b9bcc2"
BAD: Final = "#c40a8f"
_MISSING: Final = "#ffffff"
_LARGEST_NAMED: Final = 60


def write_figure(run: RunScales, path: Path, title: str) -> None:
    """Write the heat maps of a run as a PNG.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "matplotlib not found; the picture of a report needs the extra `report`; run: pip "
            "install 'lightning-unitscale[report]'"
        ) from error
    histories = [run.history(direction) for direction in run.directions]
    most = max(len(one.names) for one in histories)
    height = min(max(0.055 * most, 2.8), 11.0)
    figure = Figure(figsize=(13.0, 0.9 + height * len(histories)), layout="constrained")
    figure.suptitle(title, fontsize=13)
    smooth = LinearSegmentedColormap.from_list("scales", STOPS, N=512)
    colors = smooth.with_extremes(bad=_MISSING, under=ZERO, over=BAD)
    axes = figure.subplots(len(histories), 2, squeeze=False, sharey="row")
    for row, direction, history in zip(axes, run.directions, histories, strict=True):
        limit = color_limit(history)
        for place, stored in enumerate((False, True)):
            values = history.values(stored=stored)
            image = _heat_map(row[place], history, values, colors, limit)
            row[place].set_title(f"{direction}, {'as stored' if stored else 'as meant'}")
        _label_rows(row[0], history)
        bar = figure.colorbar(image, ax=row, shrink=0.6, pad=0.01, extend="neither")
        bar.set_label("log2 RMS; gray: all zero, pink: NaN or inf")
    figure.savefig(path, dpi=110)


def color_limit(history: ScaleHistory) -> float:
    """Where the colours end: 98 % of all values are inside, as meant and as stored."""
    values = [history.values(stored=stored) for stored in (False, True)]
    magnitudes = np.abs(np.concatenate([one[np.isfinite(one)] for one in values]))
    if not magnitudes.size:
        return 8.0
    return 2.0 * max(1, math.ceil(float(np.quantile(magnitudes, 0.98)) / 2))


def _heat_map(
    axes: Axes, history: ScaleHistory, values: npt.NDArray[Any], colors: Any, limit: float
) -> Any:
    # Of finite values none is out of the range: what is drawn below it are tensors of zeros, what
    # is drawn above it has elements that are not finite.
    shown = np.where(np.isneginf(values), -2 * limit, np.clip(values, -limit, limit))
    shown = np.where(history.nonfinite > 0, 2 * limit, shown)
    image = axes.imshow(
        shown.T,
        cmap=colors,
        vmin=-limit,
        vmax=limit,
        aspect="auto",
        interpolation="nearest",
    )
    ticks = np.unique(
        np.linspace(0, len(history.steps) - 1, min(7, len(history.steps))).astype(int)
    )
    axes.set_xticks(ticks, [f"{history.steps[tick]:,}" for tick in ticks], fontsize=8)
    axes.set_xlabel("step", fontsize=8)
    return image


def _label_rows(axes: Axes, history: ScaleHistory) -> None:
    """Names where there is room for them, or else the blocks that the tensors belong to."""
    names = history.names
    if len(names) <= _LARGEST_NAMED:
        axes.set_yticks(range(len(names)), names, fontsize=6)
        return
    blocks = [block_of(module) or name for module, name in zip(history.modules, names, strict=True)]
    starts = [place for place, one in enumerate(blocks) if place == 0 or one != blocks[place - 1]]
    ends = [*starts[1:], len(blocks)]
    # A label needs some one hundredth of the height.
    tall = [(a, b) for a, b in zip(starts, ends, strict=True) if b - a >= len(names) / 80]
    middles = [(a + b - 1) / 2 for a, b in tall]
    axes.set_yticks(middles, [blocks[a] for a, _ in tall], fontsize=7)
    for start in starts[1:]:
        axes.axhline(start - 0.5, color="#00000030", linewidth=0.5)

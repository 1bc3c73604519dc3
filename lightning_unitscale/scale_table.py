"""A snapshot as a table for people: one line per tensor."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tabulate import tabulate

from lightning_unitscale.row_layout import RowLayout
from lightning_unitscale.tensorboard.schema import DIRECTIONS, Direction

Array = npt.NDArray[np.floating[Any]]
_TITLE = (
    "Scales at step {step}: log2 of the RMS of values (forward) and gradients (backward), as the "
    "model means\nthem and as they are stored; percentage of the stored elements that a format "
    "overflows or flushes to zero,\nforward / backward."
)


class Scales(Protocol):
    """The scales of one step: a ``ScaleSnapshot``, or what an event file has of one."""

    @property
    def step(self) -> int:
        """The step."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The module that makes each."""

    @property
    def layout(self) -> RowLayout:
        """Says which formats there are fractions of."""

    def log2_rms(self, direction: Direction, *, stored: bool) -> Array:
        """log2 RMS, shape ``(tensors,)``."""

    def fractions(self, direction: Direction, *, stored: bool) -> Array:
        """Overflow, subnormal and flushed, shape ``(tensors, formats, 3)``."""


def scale_table(snapshot: Scales, tablefmt: str = "simple") -> str:
    """Scales of all tensors of a snapshot, in graph order.

    Args:
        snapshot: What to show.
        tablefmt: A format of ``tabulate``: ``"simple"``, ``"github"``, ``"html"``, ....

    Returns:
        The table under a line that explains its columns; one line when no tensor was observed.
    """
    if not snapshot.names:
        return "No tensor was observed."
    modules = snapshot.modules
    short = [
        name.removeprefix(f"{module}.")
        for name, module in zip(snapshot.names, modules, strict=True)
    ]
    columns = [[_code(one, tablefmt) for one in modules], [_code(one, tablefmt) for one in short]]
    headers = ["module", "tensor"]
    for direction in DIRECTIONS:
        for stored in (False, True):
            headers.append("stored" if stored else direction)
            values = snapshot.log2_rms(direction, stored=stored)
            columns.append([_number(value) for value in values.tolist()])
    lost = [out_of_range(snapshot, direction) for direction in DIRECTIONS]
    for place, item in enumerate(snapshot.layout.formats):
        headers.append(f"{item.name} out %")
        pairs = zip(*(one[:, place].tolist() for one in lost), strict=True)
        columns.append([" / ".join(map(_percent, pair)) for pair in pairs])
    table = tabulate(
        list(zip(*columns, strict=True)),
        headers=headers,
        tablefmt=tablefmt,
        colalign=["left", "left"] + ["right"] * (len(headers) - 2),
        disable_numparse=True,
    )
    return f"{_TITLE.format(step=snapshot.step)}\n\n{table}"


def out_of_range(snapshot: Scales, direction: Direction) -> Array:
    """Share of the stored elements that each format would overflow or flush to zero.

    Returns:
        Shape ``(tensors, len(layout.formats))``; NaN where nothing was measured.
    """
    shares: Array = snapshot.fractions(direction, stored=True)[..., [0, 2]].sum(axis=-1)
    return shares


def _code(name: str, tablefmt: str) -> str:
    # Markdown would make emphasis of the underscores in a name.
    return f"`{name}`" if name and tablefmt in {"github", "pipe"} else name


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    # A zero that is added takes the sign from a minus zero.
    return "zero" if math.isinf(value) else f"{round(value, 1) + 0.0:.1f}"


def _percent(fraction: float) -> str:
    if math.isnan(fraction):
        return "-"
    if fraction == 0.0:
        return "0"
    return "<0.01" if fraction < 1e-4 else f"{100 * fraction:.3g}"

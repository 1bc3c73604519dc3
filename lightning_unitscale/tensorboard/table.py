"""Format a snapshot as a table with one line per block or per tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from tabulate import tabulate

from lightning_unitscale.scales.layout import DIRECTIONS, Direction
from lightning_unitscale.tensorboard.history import LastStep, block_of

if TYPE_CHECKING:
    from lightning_unitscale.scales.snapshot import ScaleSnapshot

Array = npt.NDArray[np.floating[Any]]
# The scales of one step, in memory or in an event file.
Scales: TypeAlias = "ScaleSnapshot | LastStep"
_TITLE = (
    "Scales at step {step}: log2 RMS of values (forward) and of gradients (backward), each true "
    "and as stored.\nThe last columns show the percentage of stored elements that a format "
    "overflows or flushes to zero\n(forward / backward). A star marks matmul operands."
)
_SHORT_TITLE = (
    "Scales at step {step}: how many matmul operands and gradients are stored within 2x of RMS 1, "
    "and\ntheir log2 RMS (smallest to largest)."
)
_BLOCKS = (
    "Of a block format: the percentage of elements\nflushed to zero, of blocks whose scale "
    "saturates or underflows, and the standard\ndeviation of log2 of blocks' largest magnitudes."
)
_ESTIMATED = "A tilde marks a percentage that\ncomes from a sample of the elements."
_MORE = (
    "All {number} tensors: lightning-unitscale report RUN_DIR --full, or "
    "ScaleMonitor.table(full=True)"
)
# The module name of tensors that no submodule computes.
STEP_ITSELF: Final = "(the step itself)"
_READ: Final[dict[Direction, str]] = {"forward": "operands", "backward": "gradients"}


def scale_summary(snapshot: Scales) -> str:
    """Return how many operands of matmuls are stored near RMS 1, in one line; empty if unknown."""
    # Near means within a factor of 2. If some are not, it adds the count within 4x, where
    # recalibration begins. Tensors of zeros have no scale and are not counted.
    found = {direction: distances_from_one(snapshot, direction) for direction in DIRECTIONS}
    read = {direction: distances for direction, distances in found.items() if distances.size}
    if not read:
        return ""
    counts = [f"{_within(own)} of {own.size} {_READ[direction]}" for direction, own in read.items()]
    line = f"{' and '.join(counts)} within 2x of RMS 1"
    if all((distances <= 1).all() for distances in read.values()):
        return line
    wider = " and ".join(str((distances <= 2).sum()) for distances in read.values())
    return f"{line}, {wider} within 4x"


def distances_from_one(
    snapshot: Scales, direction: Direction, rows: npt.NDArray[np.bool_] | bool = True
) -> Array:
    """Return the distance of each stored matmul operand from RMS 1, in powers of two."""
    values = snapshot.log2_rms(direction, stored=True)
    distances = np.where(snapshot.nonfinite(direction) > 0, np.inf, np.abs(values))
    is_known = ~np.isnan(distances) & ~np.isneginf(values)
    chosen: Array = distances[snapshot.read_by_matmuls(direction) & rows & is_known]
    return chosen


def _within(distances: Array) -> int:
    return int((distances <= 1).sum())


def scale_table(snapshot: Scales, tablefmt: str = "simple", *, full: bool = True) -> str:
    """Return the scales of a snapshot as a table, in graph order."""
    summary = scale_summary(snapshot)
    if summary and not full:
        title = _SHORT_TITLE.format(step=snapshot.step)
        more = _MORE.format(number=len(snapshot.names))
        return f"{title}\n\n{_short_table(snapshot, tablefmt)}\n\n{summary}.\n{more}"
    if not snapshot.names:
        return "No tensor was observed."
    modules = snapshot.modules
    short = [
        name.removeprefix(f"{module}.")
        for name, module in zip(snapshot.names, modules, strict=True)
    ]
    columns = [[_code(name, tablefmt) for name in names] for names in (modules, short)]
    read = {direction: snapshot.read_by_matmuls(direction) for direction in DIRECTIONS}
    headers = ["module", "tensor"]
    for direction in DIRECTIONS:
        for stored in (False, True):
            headers.append("stored" if stored else direction)
            values = snapshot.log2_rms(direction, stored=stored).tolist()
            marks = ["*" if is_read and stored else "" for is_read in read[direction]]
            columns.append(
                [_number(value) + mark for value, mark in zip(values, marks, strict=True)]
            )
    # The shares that overflow, and that become zero.
    lost = [snapshot.fractions(direction)[..., [0, 2]].sum(axis=-1) for direction in DIRECTIONS]
    estimated = [snapshot.share_read(direction) < 1 for direction in DIRECTIONS]
    for index, item in enumerate(snapshot.layout.formats):
        headers.append(f"{item.name} out %")
        percentages = (
            _percentages(shares[:, index], of_sample)
            for shares, of_sample in zip(lost, estimated, strict=True)
        )
        columns.append([" / ".join(pair) for pair in zip(*percentages, strict=True)])
    of_blocks = _block_columns(snapshot, estimated)
    headers += of_blocks
    columns += of_blocks.values()
    table = _tabulated(list(zip(*columns, strict=True)), headers, tablefmt, num_left=2)
    title = _TITLE.format(step=snapshot.step)
    if of_blocks:
        title += f" {_BLOCKS}"
    if (snapshot.layout.formats or of_blocks) and np.any(estimated):
        title += f" {_ESTIMATED}"
    lines = [title, *([f"{summary}."] if summary else []), "", table]
    return "\n".join(lines)


def _block_columns(
    snapshot: Scales, estimated: Sequence[npt.NDArray[np.bool_]]
) -> dict[str, list[str]]:
    """Return the losses to block formats by column header, forward / backward."""
    shares = [snapshot.block_shares(direction) for direction in DIRECTIONS]
    columns = {}
    for index, item in enumerate(snapshot.layout.block_formats):
        own = list(zip((share[:, index] for share in shares), estimated, strict=True))
        zero = [_percentages(one[:, 0], of_sample) for one, of_sample in own]
        scale = [_percentages(one[:, 1:3].sum(axis=-1), of_sample) for one, of_sample in own]
        spread = [list(map(_number, one[:, 3].tolist())) for one, _ in own]
        for header, parts in (("zero %", zero), ("scale %", scale), ("spread", spread)):
            columns[f"{item.name} {header}"] = [
                " / ".join(pair) for pair in zip(*parts, strict=True)
            ]
    return columns


def _short_table(snapshot: Scales, tablefmt: str) -> str:
    """Return a line per block: the number of operands near RMS 1, and the ranges of values."""
    blocks = np.array([block_of(module) for module in snapshot.modules])
    read = {direction: snapshot.read_by_matmuls(direction) for direction in DIRECTIONS}
    values = {
        (direction, stored): snapshot.log2_rms(direction, stored=stored)
        for direction in DIRECTIONS
        for stored in (False, True)
    }
    has_units = any(
        not np.array_equal(values[direction, False], values[direction, True], equal_nan=True)
        for direction in DIRECTIONS
    )
    views = {"true value": False, "stored": True} if has_units else {"log2 RMS": True}
    headers = ["block"]
    for direction in DIRECTIONS:
        headers += [_READ[direction], *views]
    lines = []
    for block in dict.fromkeys(blocks[read["forward"] | read["backward"]].tolist()):
        line = [_code(block or STEP_ITSELF, tablefmt)]
        for direction in DIRECTIONS:
            rows = blocks == block
            own = distances_from_one(snapshot, direction, rows)
            line.append(f"{_within(own)} of {own.size}" if own.size else "-")
            rows = rows & read[direction]
            line += [_range(values[direction, stored][rows]) for stored in views.values()]
        lines.append(line)
    return _tabulated(lines, headers, tablefmt, num_left=1)


def _tabulated(
    lines: Sequence[Sequence[str]], headers: Sequence[str], tablefmt: str, *, num_left: int
) -> str:
    return tabulate(
        lines,
        headers=headers,
        tablefmt=tablefmt,
        colalign=["left"] * num_left + ["right"] * (len(headers) - num_left),
        disable_numparse=True,
    )


def _range(values: Array) -> str:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "-"
    low, high = _number(float(finite.min())), _number(float(finite.max()))
    return low if low == high else f"{low} to {high}"


def _code(name: str, tablefmt: str) -> str:
    # Markdown would read the underscores in a name as emphasis.
    return f"`{name}`" if name and tablefmt in {"github", "pipe"} else name


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "zero" if math.isinf(value) else f"{value:z.1f}"


def _percentages(shares: Array, of_sample: npt.NDArray[np.bool_]) -> list[str]:
    """Return shares as percentages, with a tilde where they come from a sample."""
    return [
        ("~" if is_estimate and share == share else "") + _percent(share)
        for share, is_estimate in zip(shares.tolist(), of_sample.tolist(), strict=True)
    ]


def _percent(fraction: float) -> str:
    if math.isnan(fraction):
        return "-"
    if fraction == 0.0:
        return "0"
    return "<0.01" if fraction < 1e-4 else f"{100 * fraction:.3g}"

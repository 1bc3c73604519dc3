"""Export a snapshot: rows for pandas and scripts, a few numbers for loggers' charts.

``pandas.read_csv(path)`` and ``pandas.read_json(path, lines=True)`` read the rows.

A summary has the same number of values for any model: the range of log2 RMS, and for each format
the share that the worst tensor loses, with the names of these tensors. It covers the tensors that
matmuls read, since only these are put into a format. If no matmul is known, it covers all tensors
except scalars and losses. Values describe the stored (scaled) tensor.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from lightning_unitscale.scales.layout import (
    BLOCK_KINDS,
    DIRECTIONS,
    FORMAT_KINDS,
    MEASURED,
    MIN_EXPONENT,
    NUM_EXPONENTS,
    Direction,
    FloatArray,
    RowLayout,
    finite,
)
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.violations import judged_by_format

# Losses to a format, and whether the larger one of two tensors with equal losses is worse.
# For a block format, the loss is the share of blocks whose scale saturates, or of flushed elements.
_LOSSES: Final = (("overflow", True), ("underflow", False))
_QUANTILES: Final = {"min": 0.0, "median": 0.5, "max": 1.0}


def snapshot_rows(snapshot: ScaleSnapshot) -> Iterator[dict[str, Any]]:
    """Return one row per measured tensor and direction."""
    for direction in DIRECTIONS:
        operands = snapshot.read_by_matmuls(direction).tolist()
        is_forward = direction == "forward"
        units = (snapshot.log2_sigma if is_forward else snapshot.log2_gamma).tolist()
        stored = snapshot.log2_rms(direction, stored=True).tolist()
        fractions = snapshot.fractions(direction).tolist()
        blocks = snapshot.block_shares(direction).tolist()
        for index, name in enumerate(snapshot.names):
            statistics = snapshot.statistics(index, direction)
            if statistics is None:
                continue
            row = {
                "step": snapshot.step,
                "tensor": name,
                "module": snapshot.modules[index],
                "direction": direction,
                "operand": operands[index],
                **{field: getattr(statistics, field) for field in MEASURED},
                "log2_unit": units[index],
                "log2_rms_stored": stored[index],
            }
            found = (*fractions[index], *blocks[index])
            for (format, kinds), values in zip(lost_kinds(snapshot.layout), found, strict=True):
                row |= {f"{format}.{kind}": one for kind, one in zip(kinds, values, strict=True)}
            yield row


def lost_kinds(layout: RowLayout) -> list[tuple[str, Sequence[str]]]:
    """Return the names of the formats and block formats, with the losses of each."""
    own = [(item.name, FORMAT_KINDS) for item in layout.formats]
    return [*own, *((item.name, BLOCK_KINDS) for item in layout.block_formats)]


def write_csv(snapshots: Iterable[ScaleSnapshot], path: str | Path) -> None:
    """Write the rows of all snapshots as CSV. A cell is empty if a number is not known."""
    rows = [row for snapshot in snapshots for row in snapshot_rows(snapshot)]
    # A monitor's second fit may have other formats than its first.
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: "" if value != value else value for key, value in row.items()})


def write_json_lines(snapshots: Iterable[ScaleSnapshot], path: str | Path) -> None:
    """Write the rows of all snapshots as JSON, one per line. NaN and infinities are ``null``."""
    with Path(path).open("w", encoding="utf-8") as file:
        for snapshot in snapshots:
            for row in snapshot_rows(snapshot):
                # JSON has no infinity. The log2 RMS of a tensor of zeros is infinite, but its RMS
                # is 0.
                numbers = {key: finite(value) for key, value in row.items()}
                file.write(json.dumps(numbers, allow_nan=False) + "\n")


@dataclass(frozen=True)
class ScaleSummary:
    """The numbers that loggers chart, and the names of the worst tensors."""

    # ``scales/log2_rms/min_forward`` (``median``, ``max``; ``backward``);
    # ``scales/log2_rms/worst``, how many powers of two the farthest RMS is away from 1;
    # ``scales/FP16/overflow_forward`` and ``underflow_forward``, the share of the worst tensor's
    # elements that overflow or become zero; and ``scales/num_violations``.
    numbers: dict[str, float]
    # ``scales/FP16/overflow_forward_tensor``: the worst tensor's name, empty if no tensor loses
    # anything.
    tensors: dict[str, str]


def summarize(
    snapshot: ScaleSnapshot, num_merged: int = 1, num_violations: int = 0
) -> ScaleSummary:
    """Summarize a snapshot. A direction or a format without numbers is left out."""
    summary = ScaleSummary({"scales/num_violations": float(num_violations)}, {})
    worst_distance = "scales/log2_rms/worst"
    for direction in DIRECTIONS:
        rows = judged_by_format(snapshot, direction, num_merged)
        log2_rms = snapshot.log2_rms(direction, stored=True)
        known = log2_rms[rows & np.isfinite(log2_rms)]
        if known.size:
            values = np.quantile(known, list(_QUANTILES.values())).tolist()
            for name, value in zip(_QUANTILES, values, strict=True):
                summary.numbers[f"scales/log2_rms/{name}_{direction}"] = value
            distance = float(np.abs(known).max())
            summary.numbers[worst_distance] = max(
                distance, summary.numbers.get(worst_distance, 0.0)
            )
        fractions, blocks = snapshot.fractions(direction), snapshot.block_shares(direction)
        lost = np.concatenate([fractions[..., [0, 2]], blocks[..., [1, 0]]], axis=1)
        for column, (format, _) in enumerate(lost_kinds(snapshot.layout)):
            for place, (word, is_large) in enumerate(_LOSSES):
                shares = lost[:, column, place]
                (present,) = np.nonzero(rows & ~np.isnan(shares))
                if not present.size:
                    continue
                sizes = log2_rms if is_large else -log2_rms
                worst = present[np.lexsort((sizes[present], shares[present]))[-1]]
                # MLflow refuses other characters, and a format may have any name.
                name = re.sub(r"[^\w.-]", "_", format)
                key = f"scales/{name}/{word}_{direction}"
                summary.numbers[key] = float(shares[worst])
                summary.tensors[f"{key}_tensor"] = snapshot.names[worst] if shares[worst] else ""
    return summary


def exponent_histogram(
    snapshot: ScaleSnapshot, direction: Direction
) -> tuple[FloatArray, FloatArray] | None:
    """Count the elements of the tensors that matmuls read, by log2 of the magnitude."""
    counts = snapshot.exponent_counts(direction)
    if counts is None:
        return None
    rows = judged_by_format(snapshot, direction)
    # The end bins include everything beyond them, as in a row.
    bins = np.arange(NUM_EXPONENTS) - snapshot.log2_divisors(direction)[rows, None]
    bins = bins.clip(0, NUM_EXPONENTS - 1).ravel()
    weights = np.nan_to_num(counts[rows]).ravel()
    total: FloatArray = np.bincount(bins, weights, NUM_EXPONENTS).astype(np.float64)
    (present,) = np.nonzero(total)
    if not present.size:
        return None
    first, stop = present[0], present[-1] + 1
    return total[first:stop], MIN_EXPONENT + np.arange(first, stop + 1.0)

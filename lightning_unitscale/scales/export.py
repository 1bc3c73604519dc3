"""Snapshots as rows for pandas, spreadsheets and scripts: CSV, and JSON lines.

``pandas.read_csv(path)`` and ``pandas.read_json(path, lines=True)`` read them.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_unitscale.scales.layout import DIRECTIONS, FORMAT_KINDS
from lightning_unitscale.scales.snapshot import ScaleSnapshot

_MEASURED = (
    "numel",
    "zeros",
    "nans",
    "infs",
    "mean",
    "mean_abs",
    "rms",
    "std",
    "abs_max",
    "abs_min",
    "log2_rms",
)


def snapshot_rows(snapshot: ScaleSnapshot) -> Iterator[dict[str, Any]]:
    """One row per tensor and direction that was measured.

    Yields:
        ``step``, ``tensor``, ``module``, ``direction``; ``operand``, whether a matrix product reads
        the tensor (backward: the gradient arrives at one); the statistics of the tensor's true
        value, named as in ``TensorStatistics``; ``log2_unit``, the unit it is stored in, and
        ``log2_rms_stored``; and for each format ``FP16.overflow``, ``FP16.subnormal`` and
        ``FP16.flushed``, the fractions of the stored tensor, NaN where they are not known.
    """
    for direction in DIRECTIONS:
        operands = snapshot.read_by_products(direction).tolist()
        units = snapshot.log2_units(direction).tolist()
        stored = snapshot.log2_rms(direction, stored=True).tolist()
        fractions = snapshot.fractions(direction).tolist()
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
                **{field: getattr(statistics, field) for field in _MEASURED},
                "log2_unit": units[index],
                "log2_rms_stored": stored[index],
            }
            for item, values in zip(snapshot.layout.formats, fractions[index], strict=True):
                for kind, value in zip(FORMAT_KINDS, values, strict=True):
                    row[f"{item.name}.{kind}"] = value
            yield row


def write_csv(snapshots: Iterable[ScaleSnapshot], path: str | Path) -> None:
    """Write the rows of all snapshots as CSV; a cell is empty where a number is not known."""
    rows = [row for snapshot in snapshots for row in snapshot_rows(snapshot)]
    # The second fit of a monitor may have other formats than the first.
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: "" if value != value else value for key, value in row.items()})


def write_json_lines(snapshots: Iterable[ScaleSnapshot], path: str | Path) -> None:
    """Write the rows of all snapshots as JSON, one per line; ``null`` for what is no number."""
    with Path(path).open("w", encoding="utf-8") as file:
        for snapshot in snapshots:
            for row in snapshot_rows(snapshot):
                # JSON has no infinity: a tensor of zeros, whose log2 is, has an RMS of 0.
                numbers = {key: finite(value) for key, value in row.items()}
                file.write(json.dumps(numbers, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The value, or ``None`` for a number that is NaN or infinite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""A snapshot in a few numbers, and the names of the tensors they are about, for loggers' charts.

However deep a model is, there are as many: the range of log2 RMS, and for each format what the
worst tensor loses to it. They are about what matrix products read, since that is what is put into a
format; where no product is known, about all tensors but scalars and losses. A tensor is taken as it
is stored: in its unit, where it has one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lightning_unitscale.scales.layout import (
    DIRECTIONS,
    FORMAT_KINDS,
    MIN_EXPONENT,
    NUM_EXPONENTS,
    Direction,
)
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.tensor_statistics import FloatArray
from lightning_unitscale.scales.violations import judged_by_format

# What a format loses, and whether of two tensors that lose as much the larger one is worse.
_LOSSES: Final = (("overflow", "overflow", True), ("underflow", "flushed", False))
_QUANTILES: Final = {"min": 0.0, "median": 0.5, "max": 1.0}


@dataclass(frozen=True)
class ScaleSummary:
    """What loggers chart.

    Attributes:
        numbers: ``scales/log2_rms/min_forward`` (``median``, ``max``; ``backward``), and for each
            format ``scales/FP16/overflow_forward`` and ``scales/FP16/underflow_forward``, the share
            of the worst tensor's elements that overflow, and that become zero.
        tensors: ``scales/FP16/overflow_forward_tensor``: the name of that tensor; empty where no
            tensor loses anything.
    """

    numbers: dict[str, float]
    tensors: dict[str, str]


def summarize(snapshot: ScaleSnapshot, num_merged: int = 1) -> ScaleSummary:
    """The few numbers of a snapshot; a direction or a format without any is left out.

    Args:
        snapshot: Of a step.
        num_merged: As of ``judged_by_format``.
    """
    summary = ScaleSummary({}, {})
    for direction in DIRECTIONS:
        rows = _rows(snapshot, direction, num_merged)
        log2_rms = snapshot.log2_rms(direction, stored=True)
        known = log2_rms[rows & np.isfinite(log2_rms)]
        if known.size:
            for name, quantile in _QUANTILES.items():
                value = float(np.quantile(known, quantile))
                summary.numbers[f"scales/log2_rms/{name}_{direction}"] = value
        fractions = snapshot.fractions(direction)
        for column, item in enumerate(snapshot.layout.formats):
            for word, kind, is_large in _LOSSES:
                shares = fractions[:, column, FORMAT_KINDS.index(kind)]
                (present,) = np.nonzero(rows & ~np.isnan(shares))
                if not present.size:
                    continue
                sizes = log2_rms if is_large else -log2_rms
                worst = present[np.lexsort((sizes[present], shares[present]))[-1]]
                # MLflow refuses other characters, and a format may have any name.
                name = re.sub(r"[^\w.-]", "_", item.name)
                key = f"scales/{name}/{word}_{direction}"
                summary.numbers[key] = float(shares[worst])
                summary.tensors[f"{key}_tensor"] = snapshot.names[worst] if shares[worst] else ""
    return summary


def exponent_histogram(
    snapshot: ScaleSnapshot, direction: Direction
) -> tuple[FloatArray, FloatArray] | None:
    """Over log2 of the magnitude, how many elements there are of what products read.

    Args:
        snapshot: Of a step.
        direction: Of values, or of the gradients that arrive at products.

    Returns:
        Counts, and the edges of their bins, one more; ``None`` where nothing was counted.
    """
    counts = snapshot.exponent_counts(direction)
    if counts is None:
        return None
    rows = _rows(snapshot, direction, 1)
    # The end bins take what lies beyond them, as those of a row do.
    bins = np.arange(NUM_EXPONENTS) - snapshot.log2_units(direction)[rows, None]
    bins = bins.clip(0, NUM_EXPONENTS - 1).ravel()
    weights = np.nan_to_num(counts[rows]).ravel()
    total: FloatArray = np.bincount(bins, weights, NUM_EXPONENTS).astype(np.float64)
    (present,) = np.nonzero(total)
    if not present.size:
        return None
    first, stop = present[0], present[-1] + 1
    return total[first:stop], MIN_EXPONENT + np.arange(first, stop + 1.0)


def _rows(snapshot: ScaleSnapshot, direction: Direction, num_merged: int) -> npt.NDArray[Any]:
    read = snapshot.read_by_products(direction)
    return read if read.any() else judged_by_format(snapshot, num_merged)

"""Combine statistics rows of micro-batches and of ranks, shift them, and complete those of samples.

A row of NaN means that there was no tensor (no gradient arrived). Merging ignores it, and also any
row without elements.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.scales.layout import (
    FORMAT_KINDS,
    MIN_EXPONENT,
    MOMENT_COLUMNS,
    NUM_EXPONENTS,
    FloatArray,
    RowLayout,
    kind_weights,
)


def row_dtype(device: torch.device | str) -> torch.dtype:
    """Return float64, in which counts and sums are exact, or float32 on devices without it."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def empty_rows(num_tensors: int, layout: RowLayout, device: torch.device | str = "cpu") -> Tensor:
    """Return rows of tensors without elements."""
    row = torch.zeros(layout.num_columns, dtype=row_dtype(device), device=device)
    position = torch.arange(layout.num_columns, device=device)
    row = torch.where(position == layout.index("abs_min"), math.inf, row)
    return row.expand(num_tensors, -1)


def absent_rows(num_tensors: int, layout: RowLayout, device: torch.device | str = "cpu") -> Tensor:
    """Return rows of absent tensors."""
    shape = (num_tensors, layout.num_columns)
    return torch.full(shape, math.nan, dtype=row_dtype(device), device=device)


def merge_rows(first: Tensor, second: Tensor, layout: RowLayout) -> Tensor:
    """Merge the statistics of two tensors, for every row."""
    largest, smallest = layout.index("abs_max"), layout.index("abs_min")
    position = torch.arange(layout.num_columns, device=first.device)
    both = torch.where(position == largest, torch.maximum(first, second), first + second)
    both = torch.where(position == smallest, torch.minimum(first, second), both)
    filled = [rows[..., :1] > 0 for rows in (first, second)]
    return torch.where(filled[0] & filled[1], both, torch.where(filled[1], second, first))


def split_rows(rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    """Return the columns that ranks add up, and those whose maximum they take."""
    there = ~rows[:, :1].isnan()
    filled = torch.where(rows[:, :1] > 0, rows, empty_rows(1, layout, rows.device).to(rows.dtype))
    largest, smallest = filled[:, layout.index("abs_max")], filled[:, layout.index("abs_min")]
    extremes = torch.stack([largest, -smallest], dim=1)
    return torch.cat([filled, there.to(rows.dtype)], dim=1), extremes


def joined_rows(sums: Tensor, extremes: Tensor, layout: RowLayout) -> Tensor:
    """Return the merged rows of all ranks, from the sum and the maximum of their ``split_rows``."""
    rows = sums[:, :-1].clone()
    rows[:, layout.index("abs_max")] = extremes[:, 0]
    rows[:, layout.index("abs_min")] = -extremes[:, 1]
    return torch.where(sums[:, -1:] > 0, rows, math.nan)


def shift_rows(rows: Tensor, exponents: npt.NDArray[np.int64], layout: RowLayout) -> Tensor:
    """Return the rows of the tensors multiplied by powers of two. Format counts do not change."""
    if not exponents.any():
        return rows
    shifted = rows.clone()
    shifts = torch.from_numpy(exponents).to(rows.device)
    powers = torch.exp2(shifts.to(rows.dtype))
    for column in ("sum", "abs_sum", "abs_max", "abs_min"):
        shifted[:, layout.index(column)] *= powers
    shifted[:, layout.index("square_sum")] *= powers.square()
    if layout.histogram:
        counts = rows[:, layout.exponents]
        last = counts.shape[1] - 1
        bins = torch.arange(last + 1, device=rows.device) + shifts[:, None]
        moved = torch.zeros_like(counts).scatter_add(1, bins.clamp(0, last).long(), counts)
        shifted[:, layout.exponents] = moved
    return shifted


def completed_rows(
    rows: Tensor, layout: RowLayout, log2_divisors: npt.NDArray[np.int64] | None = None
) -> Tensor:
    """Return rows of all columns, except those of blocks, from the light rows of samples."""
    # A light row serves every format and unit, since a power of two only shifts its exponent
    # counts. Elements are assumed to be evenly spread within a binade. Two exact facts correct
    # this: whether anything overflows follows from the largest magnitude, and a tensor whose
    # elements all have one magnitude is on one side of every threshold.
    measured = rows.numpy()
    if log2_divisors is None:
        log2_divisors = np.zeros(len(measured), dtype=np.int64)
    completed = np.empty((len(measured), layout.num_columns - len(layout.block_columns)))
    moments = completed[:, : len(MOMENT_COLUMNS)]
    moments[:] = measured[:, : len(MOMENT_COLUMNS)]
    sampled = measured[:, layout.measured.index("sampled")]
    counts = measured[:, layout.measured.exponents]
    nonzero = counts.sum(axis=1)
    column = {name: moments[:, index] for index, name in enumerate(MOMENT_COLUMNS)}
    in_sample = column["zeros"] + nonzero
    finite = column["numel"] - column["nans"] - column["infs"]
    for name, all_of_them, part in (
        ("zeros", column["numel"], sampled),
        ("abs_sum", finite, in_sample),
    ):
        scale = np.divide(all_of_them, part, out=np.ones_like(part), where=part > 0)
        column[name] *= scale
    np.rint(column["zeros"], out=column["zeros"])
    if layout.formats:
        shares = completed[:, len(MOMENT_COLUMNS) : layout.num_head]
        shares[:] = _format_counts(moments, counts, nonzero, sampled, layout, log2_divisors)
    if layout.histogram:
        completed[:, layout.num_head] = sampled
        completed[:, layout.exponents] = counts
    return torch.from_numpy(completed)


def _format_counts(
    moments: FloatArray,
    counts: FloatArray,
    nonzero: FloatArray,
    sampled: FloatArray,
    layout: RowLayout,
    log2_divisors: npt.NDArray[np.int64],
) -> FloatArray:
    """Estimate the number of elements per format and kind, shape ``(tensors, 3 * formats)``."""
    numel, largest, smallest = (
        moments[:, MOMENT_COLUMNS.index(name)] for name in ("numel", "abs_max", "abs_min")
    )
    shares = np.zeros((len(moments), len(FORMAT_KINDS) * len(layout.formats)))
    for divisor in sorted(set(log2_divisors.tolist())):
        chosen: Any = log2_divisors == divisor
        if chosen.all():
            chosen = slice(None)  # without a copy
        shares[chosen] = counts[chosen] @ _weights(layout.formats, -divisor)
    number = np.where(sampled > 0, sampled, 1.0)
    shares /= number[:, None]
    nonzero = nonzero / number
    is_one = (smallest == largest) & (largest > 0)
    stored = np.ldexp(largest, -log2_divisors)
    for position, item in enumerate(layout.formats):
        flushed, denormal, in_range = layout.edges[3 * position : 3 * position + 3]
        over = stored > in_range
        overflow, subnormal, zero = (shares[:, 3 * position + kind] for kind in range(3))
        # The binade of the limit is filled only up to the largest magnitude.
        exponent = int(np.frexp(item.overflow_threshold)[1]) - 1
        low = 2.0**exponent
        places = np.clip(exponent + log2_divisors - MIN_EXPONENT, 0, NUM_EXPONENTS - 1)
        inside = counts[np.arange(len(counts)), places] / number
        reach = np.clip(stored - low, low * 2.0**-52, None)
        refined = inside * np.clip((stored - item.overflow_threshold) / reach, 0.0, 1.0)
        np.copyto(overflow, refined, where=over & (stored < 2 * low))
        np.copyto(overflow, 0.0, where=~over)
        for share, applies in (
            (overflow, over),
            (subnormal, (stored <= denormal) & (stored > flushed)),
            (zero, stored <= flushed),
        ):
            np.copyto(share, np.where(applies, nonzero, 0.0), where=is_one)
        # At least one element overflows, even if it is not in the sample.
        least = np.divide(1.0, numel, out=np.zeros_like(numel), where=numel > 0)
        np.copyto(overflow, np.maximum(overflow, least), where=over)
    return shares * numel[:, None]


@functools.lru_cache(maxsize=1024)
def _weights(formats: tuple[NumberFormat, ...], shift: int) -> FloatArray:
    columns = [kind_weights(item, kind, shift) for item in formats for kind in FORMAT_KINDS]
    return np.stack(columns, axis=1)

"""How statistics rows of micro-batches and of ranks combine.

A row of NaN stands for a tensor that was not there (no gradient arrived). It is neutral, and so is
any row of no elements.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_unitscale.scales.layout import RowLayout


def row_dtype(device: torch.device | str) -> torch.dtype:
    """Type of a row: float64, where counts and sums are exact, or float32 where there is none."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def empty_rows(num_tensors: int, layout: RowLayout, device: torch.device | str = "cpu") -> Tensor:
    """Rows of tensors without elements."""
    row = torch.zeros(layout.num_columns, dtype=row_dtype(device), device=device)
    position = torch.arange(layout.num_columns, device=device)
    row = torch.where(position == layout.index("abs_min"), math.inf, row)
    return row.expand(num_tensors, -1)


def absent_rows(num_tensors: int, layout: RowLayout, device: torch.device | str = "cpu") -> Tensor:
    """Rows of tensors that were not there."""
    shape = (num_tensors, layout.num_columns)
    return torch.full(shape, math.nan, dtype=row_dtype(device), device=device)


def merge_rows(first: Tensor, second: Tensor, layout: RowLayout) -> Tensor:
    """Statistics of two tensors taken together, for every row."""
    largest, smallest = layout.index("abs_max"), layout.index("abs_min")
    position = torch.arange(layout.num_columns, device=first.device)
    both = torch.where(position == largest, torch.maximum(first, second), first + second)
    both = torch.where(position == smallest, torch.minimum(first, second), both)
    filled = [rows[..., :1] > 0 for rows in (first, second)]
    return torch.where(filled[0] & filled[1], both, torch.where(filled[1], second, first))


def split_rows(rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    """The columns of one rank's rows that ranks add up, and those of which the largest counts."""
    there = ~rows[:, :1].isnan()
    filled = torch.where(rows[:, :1] > 0, rows, empty_rows(1, layout, rows.device).to(rows.dtype))
    largest, smallest = filled[:, layout.index("abs_max")], filled[:, layout.index("abs_min")]
    extremes = torch.stack([largest, -smallest], dim=1)
    return torch.cat([filled, there.to(rows.dtype)], dim=1), extremes


def joined_rows(sums: Tensor, extremes: Tensor, layout: RowLayout) -> Tensor:
    """Rows of all ranks together, from the sum and the maximum of their ``split_rows``."""
    rows = sums[:, :-1].clone()
    rows[:, layout.index("abs_max")] = extremes[:, 0]
    rows[:, layout.index("abs_min")] = -extremes[:, 1]
    return torch.where(sums[:, -1:] > 0, rows, math.nan)


def shift_rows(rows: Tensor, exponents: npt.NDArray[np.int64], layout: RowLayout) -> Tensor:
    """Rows of the same tensors multiplied by powers of two; format counts stay as they are."""
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

"""Define the columns of a statistics row.

A row is one vector per tensor, so that the rows of a whole training step are one matrix: one
transfer to the host, one collective across ranks. This file does not import torch, because
TensorBoard's server reads rows too. ``statistics.py`` computes them, and so do ``host_rows.py`` and
the kernels in ``triton_kernels.py``, whose columns have the same order. Append a new one to the
moments. ``reduce.py`` combines, shifts and completes rows, and ``expected_row`` in the tests
defines them.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import astuple, dataclass, field
from typing import Final, Literal, get_args

import numpy as np

from lightning_unitscale.formats import E4M3FN, E5M2, FP16, BlockFormat, NumberFormat

MIN_EXPONENT: Final = -150
MAX_EXPONENT: Final = 128
NUM_EXPONENTS: Final = MAX_EXPONENT - MIN_EXPONENT + 1

MOMENT_COLUMNS: Final = (
    "numel",
    "zeros",
    "nans",
    "infs",
    "sum",
    "abs_sum",
    "square_sum",
    "abs_max",
    "abs_min",
)
Direction = Literal["forward", "backward"]
DIRECTIONS: Final[tuple[Direction, ...]] = get_args(Direction)
Kind = Literal["overflow", "subnormal", "flushed"]
FORMAT_KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
# Counts of the sampled blocks: elements, and nonzero elements that become zero; blocks that are not
# all zero, and those whose scale is above or below its range. Then sums over these blocks of log2
# of the largest magnitude, and of its square.
BLOCK_COLUMNS: Final = (
    "elements", "flushed", "blocks", "saturated", "underflow", "log2_sum", "log2_square_sum",
)  # fmt: skip
# The share of elements that become zero, of blocks whose scale saturates or underflows, and the
# standard deviation of log2 of the largest magnitudes.
BlockKind = Literal["flushed", "saturated", "underflow", "spread"]
BLOCK_KINDS: Final[tuple[BlockKind, ...]] = get_args(BlockKind)


@dataclass(frozen=True)
class RowLayout:
    """The columns of a statistics row, in their order."""

    # The moments come first: `numel` (all elements), `zeros`, `nans`, `infs`, then of the
    # finite elements `sum`, `abs_sum`, `square_sum`, `abs_max` and `abs_min` (smallest
    # magnitude above zero, `inf` when there is none). Then for every format the number of finite
    # elements that `overflow`, become `subnormal`, or are `flushed` to zero without being zero.
    # Then, with `histogram`, `sampled` (the number of elements that were read) and the number of
    # finite non-zero elements per binary exponent from -150 to 128. The two end bins include
    # everything beyond them, which only FP64 has. The `BLOCK_COLUMNS` of every block format are the
    # last. They are zero for tensors that no matmul reads.
    #
    # With `sample_size` the counts per format and per exponent, `zeros`, `abs_sum` and
    # `abs_min` come from a strided sample of the tensor. The other columns are exact.

    formats: tuple[NumberFormat, ...] = (FP16, E4M3FN, E5M2)
    histogram: bool = True
    # Maximum number of elements in a sample. ``None`` reads the whole tensor.
    sample_size: int | None = 16_384
    block_formats: tuple[BlockFormat, ...] = ()
    # Three FP64 numbers per format: a magnitude that does not exceed one is flushed (or zero);
    # subnormal or flushed; in range.
    edges: tuple[float, ...] = field(init=False, repr=False, compare=False)
    # The first FP32 and FP64 number above every edge: ``|x| < cut`` compares without rounding.
    fp32_cuts: tuple[float, ...] = field(init=False, repr=False, compare=False)
    fp64_cuts: tuple[float, ...] = field(init=False, repr=False, compare=False)
    # The columns that a device computes. One light row serves all units and formats of a sampled
    # layout; ``completed_rows`` turns it into estimates of all elements. Blocks have rows of their
    # own (``block_rows.py``).
    measured: RowLayout = field(init=False, repr=False, compare=False)
    columns: tuple[str, ...] = field(init=False, repr=False, compare=False)
    # The layout as JSON, for an operator or an event file.
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [item.name for item in self.formats]
        names += [item.name for item in self.block_formats]
        if len(set(names)) != len(names):
            raise ValueError(
                f"formats={names}: a format is given twice. Expected distinct names. Drop one."
            )
        if self.sample_size is not None and self.sample_size < 1:
            raise ValueError(
                f"sample_size={self.sample_size}: out of range. Expected at least 1, or None to "
                "read all elements. Change the number."
            )
        formats = [astuple(item) for item in self.formats]
        edges: list[float] = []
        for item in self.formats:
            overflow = item.overflow_threshold
            edges += [
                item.flush_threshold,
                math.nextafter(item.subnormal_threshold, 0.0),
                overflow if item.finite_only else math.nextafter(overflow, 0.0),
            ]
        columns = list(MOMENT_COLUMNS)
        columns += [f"{item.name}.{kind}" for item in self.formats for kind in FORMAT_KINDS]
        if self.histogram:
            columns.append("sampled")
            columns += [f"2^{e}" for e in range(MIN_EXPONENT, MAX_EXPONENT + 1)]
        columns += self.block_columns
        measured = self
        if self.is_sampled and (self.formats or not self.histogram):
            measured = RowLayout((), True, self.sample_size)
        elif self.block_formats:
            measured = RowLayout(self.formats, self.histogram, self.sample_size)
        derived = {
            "measured": measured,
            "edges": tuple(edges),
            "fp32_cuts": tuple(map(_next_fp32, edges)),
            "fp64_cuts": tuple(math.nextafter(edge, math.inf) for edge in edges),
            "key": json.dumps([formats, self.histogram, self.sample_size]),
            "columns": tuple(columns),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def from_key(key: str) -> RowLayout:
        """Return the layout with this ``key``."""
        formats, histogram, sample_size = json.loads(key)
        return RowLayout(tuple(NumberFormat(*item) for item in formats), histogram, sample_size)

    @property
    def is_sampled(self) -> bool:
        """Return whether some columns come from a sample of the elements."""
        return self.sample_size is not None and (self.histogram or bool(self.formats))

    @property
    def num_columns(self) -> int:
        """Return the length of a row."""
        return len(self.columns)

    @property
    def block_columns(self) -> tuple[str, ...]:
        """Return the columns of block formats, the last ones of a row."""
        return tuple(f"{item.name}.{kind}" for item in self.block_formats for kind in BLOCK_COLUMNS)

    def index(self, column: str) -> int:
        """Return the position of a column."""
        try:
            return self.columns.index(column)
        except ValueError:
            raise KeyError(
                f"column={column!r}: not in this layout. Expected one of "
                f"{', '.join(self.columns[: self.num_head])}"
            ) from None

    @property
    def num_head(self) -> int:
        """Return the number of columns before the exponent counts (and before ``sampled``)."""
        return len(MOMENT_COLUMNS) + len(FORMAT_KINDS) * len(self.formats)

    @property
    def exponents(self) -> slice:
        """Return the columns of the exponent counts; empty without ``histogram``."""
        start = self.num_head + 1
        return slice(start, start + NUM_EXPONENTS) if self.histogram else slice(0, 0)


def _next_fp32(value: float) -> float:
    """Return the smallest FP32 number above ``value``; infinite beyond the range."""
    with np.errstate(over="ignore", under="ignore"):
        nearest = np.float32(value)
        above = np.nextafter(nearest, np.float32(math.inf))
    return float(nearest if float(nearest) > value else above)


# Only the moments, without formats and exponents.
MOMENTS: Final = RowLayout(formats=(), histogram=False)

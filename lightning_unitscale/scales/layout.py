"""Define the columns of a statistics row, and read the numbers of a tensor from it.

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
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from lightning_unitscale.formats import (
    E4M3FN,
    E5M2,
    FP16,
    BlockFormat,
    NumberFormat,
    get_number_format,
)

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
    # own (``torch_rows.py``).
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


FloatArray = npt.NDArray[np.float64]
# The numbers of a ``TensorStatistics`` that tables and graphs show.
MEASURED: Final = (
    "numel", "zeros", "nans", "infs", "mean", "mean_abs", "rms", "std", "abs_max", "abs_min",
    "log2_rms",
)  # fmt: skip


def kind_weights(format: NumberFormat, kind: Kind, shift: int) -> FloatArray:
    """Return the share of every shifted binade that a cast affects in one way, shape ``(279,)``."""
    # Elements are assumed to be evenly spread within a binade. The flushed fraction is exact,
    # except for elements equal to the threshold. The overflowing fraction is approximate within the
    # binade of the format's maximum. The subnormal fraction is approximate within the binade just
    # below the smallest normal number, since its upper end rounds up to that number.
    low, high = {
        "overflow": (format.overflow_threshold, math.inf),
        "subnormal": (format.flush_threshold, format.subnormal_threshold),
        "flushed": (0.0, format.flush_threshold),
    }[kind]
    return _share_below(high, shift) - _share_below(low, shift)


def _share_below(threshold: float, shift: int) -> FloatArray:
    """Return the share of every shifted binade below ``threshold``, shape ``(279,)``."""
    exponents = MIN_EXPONENT + np.arange(NUM_EXPONENTS) + shift
    # The part of [2**e, 2**(e + 1)) below t is t / 2**e - 1, limited to [0, 1].
    with np.errstate(over="ignore", under="ignore"):
        return np.clip(np.ldexp(threshold, -exponents) - 1.0, 0.0, 1.0)


class TensorStatistics:
    """Statistics of one tensor, read from its row.

    Everything except the counts describes only the finite elements, and is NaN if there are none.
    With a sampled layout, the zeros, the mean magnitude, the smallest magnitude and the shares per
    format are estimates from the sample. Whether any element overflows is exact.

    Attributes:
        row: The measured columns, shape ``(layout.num_columns,)``, float64.
        layout: The columns of the row.
        log2_factor: The statistics describe ``2**log2_factor`` times the measured tensor.
        log2_factor_of_counts: The factor for the row's format counts (the ``factor`` of
            ``statistics_row``). Fractions at that scale are exact.
        numel: Number of elements, of all micro-batches and ranks that were merged.
        zeros: Number of elements that are exactly zero.
        nans: Number of NaN elements.
        infs: Number of infinite elements.
        num_finite: Number of finite elements.
        mean: Mean.
        mean_abs: Mean magnitude.
        rms: Root mean square.
        std: Standard deviation as in ``torch.std`` (with Bessel's correction), around the mean of
            all merged elements; NaN for one element.
        abs_max: Largest magnitude.
        abs_min: Smallest magnitude above zero; NaN if every element is zero.
        log2_rms: ``log2`` of the RMS, as in scale plots; ``-inf`` for a tensor of zeros.
    """

    def __init__(
        self,
        row: FloatArray,
        layout: RowLayout,
        log2_factor: int = 0,
        log2_factor_of_counts: int = 0,
    ) -> None:
        self.row, self.layout = row, layout
        self.log2_factor, self.log2_factor_of_counts = log2_factor, log2_factor_of_counts
        *counts, total, magnitudes, squares, largest, smallest = row[: len(MOMENT_COLUMNS)].tolist()
        self.numel, self.zeros, self.nans, self.infs = map(int, counts)
        self.num_finite = number = self.numel - self.nans - self.infs
        mean, mean_abs, mean_square = (
            column / number if number else math.nan for column in (total, magnitudes, squares)
        )
        factor = 2.0**log2_factor
        self.mean, self.mean_abs = mean * factor, mean_abs * factor
        self.rms = math.sqrt(mean_square) * factor
        self.log2_rms = (
            -math.inf if mean_square == 0 else 0.5 * math.log2(mean_square) + log2_factor
        )
        self.std = math.nan
        if number > 1:
            variance = max(mean_square - mean * mean, 0.0) * number / (number - 1)
            self.std = math.sqrt(variance) * factor
        self.abs_max = largest * factor if number else math.nan
        self.abs_min = smallest * factor if 0 < smallest < math.inf else math.nan

    @property
    def exponent_counts(self) -> FloatArray | None:
        """Return the number of finite non-zero elements per binary exponent, from -150 to 128.

        They count the measured tensor, without ``log2_factor``. The shape is ``(279,)``. ``None``
        if exponents were not counted.
        """
        return self.row[self.layout.exponents] if self.layout.histogram else None

    @property
    def num_sampled(self) -> int:
        """Return the number of elements that the exponent counts come from."""
        return int(self._value("sampled")) if self.layout.histogram else 0

    def fraction(self, format: str | NumberFormat, kind: Kind) -> float:
        """Return the fraction of elements that ``format`` overflows, denormalizes or flushes.

        For a format of the layout, at the scale of its counts, it is exact, or an estimate with a
        sampled layout. Otherwise it comes from the exponent counts (see ``kind_weights``).
        """
        resolved = get_number_format(format)
        if kind not in FORMAT_KINDS:
            raise ValueError(f"kind={kind!r}: unknown. Pass one of {', '.join(FORMAT_KINDS)}.")
        counted = resolved in self.layout.formats
        if counted and self.log2_factor == self.log2_factor_of_counts:
            return self._value(f"{resolved.name}.{kind}") / self.numel if self.numel else math.nan
        counts = self.exponent_counts
        if counts is None:
            raise ValueError(
                f"format={resolved.name!r}: not counted at the scale 2**{self.log2_factor} and "
                "there are no exponent counts to compute it from. Expected a monitored format or a "
                "layout with histogram=True. Turn histograms on."
            )
        lost = float(counts @ kind_weights(resolved, kind, self.log2_factor))
        return lost / self.num_sampled if self.num_sampled else math.nan

    def scaled(self, log2_factor: int) -> TensorStatistics:
        """Return the statistics of ``2**log2_factor`` times this tensor."""
        factor = self.log2_factor + log2_factor
        return TensorStatistics(self.row, self.layout, factor, self.log2_factor_of_counts)

    def _value(self, column: str) -> float:
        return float(self.row[self.layout.index(column)])


def finite(value: Any) -> Any:
    """Return the value, or ``None`` for NaN and infinities, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

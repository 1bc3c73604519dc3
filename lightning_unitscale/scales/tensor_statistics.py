"""Read the statistics of a tensor from its row, and compute the share that any format would lose.

Multiplying by a power of two only shifts the exponents. So one histogram is enough for every format
and every scale, also after the tensor is freed. This file needs only NumPy, because the report and
the dashboard use it too.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from lightning_unitscale.formats import NumberFormat, get_number_format
from lightning_unitscale.scales.layout import (
    FORMAT_KINDS,
    MIN_EXPONENT,
    MOMENT_COLUMNS,
    NUM_EXPONENTS,
    Kind,
    RowLayout,
)

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

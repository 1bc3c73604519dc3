"""``Metrics``: the numbers that describe the scale of one tensor and of its gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from lightning_unitscale.row_layout import RowLayout
from lightning_unitscale.statistics import statistics_row

# The moments alone: no format is asked about and no exponent counted.
MOMENTS: Final = RowLayout(formats=(), histogram=False)

_FULL_NAMES: Final = {
    "mean_abs": "mean absolute value",
    "abs_mean": "absolute mean value",
    "std": "standard deviation",
    "abs_max": "absolute maximum",
    "abs_min": "absolute minimum",
    "numel": "number of elements",
}


class Metrics:
    """Scale of a tensor in the forward pass and of its gradient in the backward pass.

    Args:
        fwd_tensor: The tensor, real and floating-point, of any shape; or its numbers.
        bwd_tensor: Its gradient or the numbers of that; ``None`` when no gradient has arrived.

    Attributes:
        fwd: Numbers of the tensor.
        bwd: Numbers of its gradient, or ``None``: no backward pass has been run, or none of the
            gradient came this way.

    Raises:
        ValueError: If a tensor is not a real floating-point one.
    """

    @dataclass
    class Data:
        """Numbers of one tensor, as torch computes them from all of its elements.

        Attributes:
            mean_abs: Mean magnitude.
            abs_mean: Magnitude of the mean.
            std: Standard deviation with Bessel's correction; NaN for fewer than two elements.
            abs_max: Largest magnitude.
            abs_min: Smallest magnitude; 0 as soon as one element is 0.
            numel: Number of elements.
        """

        mean_abs: float
        abs_mean: float
        std: float
        abs_max: float
        abs_min: float
        numel: int

    def __init__(self, fwd_tensor: Tensor | Data, bwd_tensor: Tensor | Data | None = None) -> None:
        self.fwd = self._data(fwd_tensor)
        self.bwd: Metrics.Data | None = None if bwd_tensor is None else self._data(bwd_tensor)

    def set_bwd(self, bwd_tensor: Tensor | Data) -> None:
        """Put the gradient's numbers in place of what was known of it."""
        self.bwd = self._data(bwd_tensor)

    @staticmethod
    def from_tensor(t: Tensor) -> Metrics.Data:
        """Numbers of one real floating-point tensor of any shape; it may be empty.

        Raises:
            ValueError: If the tensor is of another type.
        """
        return Metrics.from_row(statistics_row(t, MOMENTS).tolist())

    @staticmethod
    def from_row(row: Sequence[float]) -> Metrics.Data:
        """Numbers from a statistics row, whose first columns are the moments of ``RowLayout``.

        A NaN among the elements makes every number NaN and an infinity makes the means infinite,
        since the moments of the finite elements alone would hide what is wrong with the tensor.
        """
        numel, zeros, nans, infs, total, magnitudes, squares, largest, smallest = row[:9]
        if not numel or nans:
            nan = math.nan
            return Metrics.Data(nan, nan, nan, nan, nan, int(numel))
        abs_min = 0.0 if zeros else smallest
        if infs:
            return Metrics.Data(math.inf, math.inf, math.nan, math.inf, abs_min, int(numel))
        mean = total / numel
        is_constant = abs_min == largest and abs(total) == magnitudes
        variance = 0.0 if is_constant else max(squares / numel - mean * mean, 0.0)
        std = math.sqrt(variance * numel / (numel - 1)) if numel > 1 else math.nan
        return Metrics.Data(magnitudes / numel, abs(mean), std, largest, abs_min, int(numel))

    @staticmethod
    def names() -> list[str]:
        """Names of the numbers, as attributes of :class:`Metrics.Data`."""
        return [field.name for field in dataclasses.fields(Metrics.Data)]

    @staticmethod
    def full_names() -> list[str]:
        """The same in words, in the same order."""
        return [Metrics.get_full_name(name) for name in Metrics.names()]

    @staticmethod
    def get_full_name(short_name: str) -> str:
        """One of the names in words.

        Raises:
            KeyError: If there is no such number.
        """
        return _FULL_NAMES[short_name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metrics):
            return NotImplemented
        return self.fwd == other.fwd and self.bwd == other.bwd

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Metrics(fwd={self.fwd}, bwd={self.bwd})"

    @staticmethod
    def _data(value: Tensor | Metrics.Data) -> Metrics.Data:
        return Metrics.from_tensor(value) if isinstance(value, Tensor) else value

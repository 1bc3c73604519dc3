"""Columns of a statistics row: which numbers are kept of one tensor, and how two rows combine.

A row is one vector per tensor, so that the rows of a whole training step are one matrix: one
transfer to the host, one collective across ranks. Standard library only; the torch side is in
``statistics.py``, the reading side in ``snapshot.py``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

from lightning_unitscale.formats import E4M3FN, E5M2, FP16, NumberFormat

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
Kind = Literal["overflow", "subnormal", "flushed"]
FORMAT_KINDS: Final[tuple[Kind, ...]] = ("overflow", "subnormal", "flushed")


@dataclass(frozen=True)
class RowLayout:
    """Which columns a statistics row has, in which order.

    The moments come first: ``numel`` (all elements), ``zeros``, ``nans``, ``infs``, then of the
    finite elements ``sum``, ``abs_sum``, ``square_sum``, ``abs_max`` and ``abs_min`` (smallest
    magnitude above zero, ``inf`` when there is none). Then for every format the number of finite
    elements that ``overflow``, become ``subnormal``, or are ``flushed`` to zero without being zero.
    Then, with ``histogram``, ``sampled`` (how many elements were looked at) and the number of
    finite non-zero elements per binary exponent -150 to 128; the two end bins take all that lies
    beyond them, which only FP64 can.

    Attributes:
        formats: The formats whose out-of-range elements are counted.
        histogram: Whether exponents are counted.
        sample_size: Of how many elements at most; ``None`` counts all of them.
        fp32_cuts: For every format the FP32 numbers ``cut`` such that ``|x| < cut`` says of an FP32
            ``x``, without any rounding, that it is flushed (or zero), that it is subnormal or
            flushed, that it is in range; in this order.
        fp64_cuts: The same for FP64 ``x``.

    Raises:
        ValueError: If a format is given twice, or ``sample_size`` is below 1.
    """

    formats: tuple[NumberFormat, ...] = (FP16, E4M3FN, E5M2)
    histogram: bool = True
    sample_size: int | None = 16_384
    fp32_cuts: tuple[float, ...] = field(init=False, repr=False, compare=False)
    fp64_cuts: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [item.name for item in self.formats]
        if len(set(names)) != len(names):
            raise ValueError(
                f"formats={names}: a format is given twice; expected distinct names; drop one"
            )
        if self.sample_size is not None and self.sample_size < 1:
            raise ValueError(
                f"sample_size={self.sample_size}: out of range; expected at least 1, or None to "
                "count all elements; change the number"
            )
        limits = list(zip(*self.limits(), strict=True))
        fp32 = tuple(_cut(limit, below, _next_fp32) for limit, below in limits)
        fp64 = tuple(_cut(limit, below, _next_fp64) for limit, below in limits)
        object.__setattr__(self, "fp32_cuts", fp32)
        object.__setattr__(self, "fp64_cuts", fp64)

    def limits(self) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        """Thresholds of the formats, three each as in ``fp32_cuts``, before any rounding.

        Returns:
            The thresholds, and for each whether a value equal to it counts as below the cut.
        """
        limits: list[float] = []
        below: list[bool] = []
        for item in self.formats:
            limits += [item.flush_threshold, item.subnormal_threshold, item.overflow_threshold]
            below += [True, False, item.finite_only]
        return tuple(limits), tuple(below)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Name of every column: ``numel``, ..., ``FP16.overflow``, ..., ``2^-150``, ...."""
        names = list(MOMENT_COLUMNS)
        names += [f"{item.name}.{kind}" for item in self.formats for kind in FORMAT_KINDS]
        if self.histogram:
            names.append("sampled")
            names += [f"2^{e}" for e in range(MIN_EXPONENT, MAX_EXPONENT + 1)]
        return tuple(names)

    @property
    def num_columns(self) -> int:
        """Length of a row."""
        return len(self.columns)

    def index(self, column: str) -> int:
        """Position of a column.

        Raises:
            KeyError: If there is no such column.
        """
        try:
            return self._positions[column]
        except KeyError:
            raise KeyError(
                f"column={column!r}: not in this layout; expected one of "
                f"{', '.join(self.columns[: self.num_head])}"
            ) from None

    @property
    def num_head(self) -> int:
        """Number of columns before the exponent counts (and before ``sampled``)."""
        return len(MOMENT_COLUMNS) + len(FORMAT_KINDS) * len(self.formats)

    @property
    def exponents(self) -> slice:
        """Columns of the exponent counts; empty without ``histogram``."""
        start = self.num_head + 1
        return slice(start, start + NUM_EXPONENTS) if self.histogram else slice(0, 0)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self.columns)}


def _cut(limit: float, limit_is_below: bool, following: Callable[[float], float]) -> float:
    """Smallest number of a type that is above ``limit``, or at least ``limit`` if that is out."""
    return following(limit if limit_is_below else math.nextafter(limit, 0.0))


def _next_fp64(value: float) -> float:
    return math.nextafter(value, math.inf)


def _next_fp32(value: float) -> float:
    """Smallest FP32 number above ``value``, which is not negative; infinite beyond the range."""
    try:
        (code,) = struct.unpack("<I", struct.pack("<f", value))
    except OverflowError:
        return math.inf
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    if rounded > value:
        return float(rounded)
    # The codes of positive FP32 numbers are in the order of the numbers; the last one is infinity.
    (above,) = struct.unpack("<f", struct.pack("<I", code + 1))
    return float(above)

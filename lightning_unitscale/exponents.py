"""Out-of-range fractions of any format, at any power-of-two scale, from exponent counts alone.

A power of two only moves the counts to other exponents, so one histogram answers for every format
and every scale, long after the tensor is gone. NumPy only: the report and the dashboard use it too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_unitscale.formats import NumberFormat, get_format
from lightning_unitscale.row_layout import FORMAT_KINDS, MIN_EXPONENT, NUM_EXPONENTS, Kind

FloatArray = npt.NDArray[np.float64]


def fraction_from_counts(
    exponent_counts: npt.ArrayLike,
    sampled: npt.ArrayLike,
    format: str | NumberFormat,
    kind: Kind,
    shift: int = 0,
) -> FloatArray:
    """Fraction of the elements that a cast of ``tensor * 2**shift`` would treat in one way.

    Inside one binade the elements are taken as evenly spread. That leaves the flushed fraction
    exact but for elements that equal the threshold itself; the overflowing fraction is approximate
    within the binade of the format's maximum, the subnormal one within the binade just below the
    smallest normal number, whose upper end rounds up to it.

    Args:
        exponent_counts: Finite non-zero elements per binary exponent -150 to 128, shape
            ``(..., 279)``.
        sampled: Number of elements looked at, zeros included, shape ``(...)``.
        format: The format, or its name.
        kind: ``"overflow"`` (beyond the largest number), ``"subnormal"`` or ``"flushed"`` (rounded
            to zero without being zero).
        shift: The power of two that the values are multiplied with before the cast.

    Returns:
        Fractions of all elements, between 0 and 1, shape ``(...)``; NaN where none was looked at.

    Raises:
        ValueError: If the format or the kind is unknown, or the counts have another length.
    """
    counts = np.asarray(exponent_counts, dtype=np.float64)
    if counts.shape[-1:] != (NUM_EXPONENTS,):
        raise ValueError(
            f"exponent_counts of shape {counts.shape}: wrong number of exponents; expected the "
            f"last dimension to be {NUM_EXPONENTS}; pass counts from a statistics row"
        )
    found = get_format(format)
    if kind == "flushed":
        weights = _share_below(found.flush_threshold, shift)
    elif kind == "subnormal":
        weights = _share_below(found.subnormal_threshold, shift)
        weights -= _share_below(found.flush_threshold, shift)
    elif kind == "overflow":
        weights = 1.0 - _share_below(found.overflow_threshold, shift)
    else:
        raise ValueError(
            f"kind={kind!r}: unknown; expected one of {', '.join(FORMAT_KINDS)}; correct it"
        )
    number = np.asarray(sampled, dtype=np.float64)
    result = np.full(np.broadcast_shapes(counts.shape[:-1], number.shape), np.nan)
    np.divide(counts @ weights, number, out=result, where=number > 0)
    return result


def _share_below(threshold: float, shift: int) -> FloatArray:
    """Share of every binade, shifted, that lies below ``threshold``: shape ``(279,)``."""
    exponents = MIN_EXPONENT + np.arange(NUM_EXPONENTS) + shift
    # Of [2**e, 2**(e + 1)) the part below t is t / 2**e - 1, between none and all of it.
    with np.errstate(over="ignore", under="ignore"):
        return np.clip(np.ldexp(threshold, -exponents) - 1.0, 0.0, 1.0)

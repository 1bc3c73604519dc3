"""Where a product on operands in units would not have the bits of the plain one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from lightning_unitscale.dispatch.tensors import Extent

# BLAS sums BF16 in FP32, which has the same smallest normal number.
_SMALLEST_LOG2 = {torch.float32: -126, torch.bfloat16: -126, torch.float64: -1022}
# As many terms as a product may add, as an exponent of two.
_LOG2_TERMS = 20


def why_inexact(
    extents: Sequence[Extent],
    log2_units: Sequence[int],
    dtype: torch.dtype,
    addends: Sequence[Extent] = (),
) -> str:
    """Why powers of two would not be exact in a product; empty where they are.

    A product of two elements below the smallest normal number vanishes in the plain product and
    survives in units, where it may break a tie of larger terms. A sum that overflows on its way is
    infinite or NaN there and may be a number in units.

    Args:
        extents: Of the operands.
        log2_units: Exponents of their units.
        dtype: Their type.
        addends: Of what is added to the product.
    """
    limit = _SMALLEST_LOG2.get(dtype)
    if limit is None:
        return ""
    smallest = [math.log2(extent.smallest) for extent in extents]
    if any(sum(pair) < limit for pair in itertools.combinations(smallest, 2)):
        return f"terms below 2**{limit}, which vanish there and not in units"
    largest = [math.log2(extent.largest) for extent in extents if extent.largest]
    too_large = -limit - _LOG2_TERMS
    if any(sum(pair) > too_large for pair in itertools.combinations(largest, 2)):
        return f"terms above 2**{too_large}, whose sums may overflow there and not in units"
    stored = [log2 - unit for log2, unit in zip(smallest, log2_units, strict=True)]
    common = sum(log2_units)
    stored += [math.log2(extent.smallest) - common for extent in addends]
    if any(log2 < limit for log2 in stored):
        return f"elements that would be below 2**{limit} in units"
    largest = [math.log2(extent.largest) for extent in addends if extent.largest]
    if any(log2 - common > -limit for log2 in largest):
        return f"an addend that would be above 2**{-limit} in units"
    return ""

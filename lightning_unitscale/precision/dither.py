"""Factors for the casts of a step that move the numbers of a format at every step.

Rounding to nearest is right on average over the elements of a tensor, but not over the steps of a
training. In constant units of powers of two, a weight that hardly moves is rounded to the same side
at every step, and the weights gather where that side changes. A factor ``c`` in (1/2, 1] before
the cast, divided out after the product, moves the numbers of the format under the tensor, so that
the errors of a few steps average out; no maximum is looked for and nothing is kept of any tensor.
Factors above 1 would do the same, and could bring an element beyond the range that fits into it.

References:
    Nagel et al., "Overcoming Oscillations in Quantization-Aware Training" (arXiv 2203.11086),
    section 2, on the weights; the golden ratio as the most even of all sequences of steps:
    Kuipers and Niederreiter, "Uniform Distribution of Sequences", chapter 2.3.
"""

from __future__ import annotations

import math
import zlib
from typing import Literal, get_args

from lightning_unitscale.arguments import check_choice

Grid = Literal["fixed", "moving"]

# By how much a logarithm goes on at a step: the golden ratio.
_STRIDE = (math.sqrt(5) - 1) / 2


def check_grid(grid: object) -> None:
    """Refuse an unknown kind of grid."""
    advice = "pass 'moving' to train, 'fixed' for the numbers of the format themselves"
    check_choice("grid", grid, get_args(Grid), "unknown grid", advice)


class MovingGrid:
    """The factors of all casts of a module's steps."""

    # The logarithms start at a place of their own for every cast, given by its name alone, and all
    # go on by the golden ratio at every training step: independent of each other, the same after a
    # restart, in every graph of a step, and on every stage of a pipeline.

    def __init__(self) -> None:
        self.step = 0  # how many training steps there have been, evaluation not counted
        self._counts_calls = True

    def follow(self, step: int) -> None:
        """Take the optimizer's step: the batches that it accumulates share their factors."""
        self.step = step
        self._counts_calls = False

    def factor(self, name: str, call: int) -> float:
        """The factor of a cast."""
        step = max(call - 1, 0) if self._counts_calls else self.step
        start = 2.0 ** -(zlib.crc32(name.encode()) / 2**32)
        moved = start * 2.0 ** -(step * _STRIDE % 1.0)
        # Rounded to FP32, in which kernels hold it.
        mantissa, exponent = math.frexp(moved if moved > 0.5 else 2 * moved)
        return math.ldexp(round(mantissa * 2**24) / 2**24, exponent)

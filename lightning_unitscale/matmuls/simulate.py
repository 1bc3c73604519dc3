"""Simulate matmuls in a number format: round their operands, compute them wide.

FP8 hardware accumulates products of FP8 numbers in FP32. So it is enough to round the three tensors
that meet in a matmul and its gradients.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

from lightning_unitscale.arguments import check_choice, check_count, check_flag, shown
from lightning_unitscale.capture.name_patterns import NamePatterns
from lightning_unitscale.quantize import FormatLike, Rounding, check_rounding, checked_format

Grid = Literal["fixed", "moving"]

# The step of a logarithm per training step: the golden ratio.
_STRIDE = (math.sqrt(5) - 1) / 2
# The formats of "fp8": precision for operands, range for gradients.
FP8_FORMATS = ("E4M3FN", "E5M2")


def format_pair(setting: Any, *, argument: str) -> tuple[Any, Any]:
    """Return the formats of operands and of gradients from one setting."""
    given = f"{argument}={shown(setting)}"
    if isinstance(setting, str) and setting.strip().lower() == "fp8":
        return FP8_FORMATS
    if not isinstance(setting, (tuple, list)):
        checked_format(setting, given=given)
        return setting, setting
    if len(setting) != 2:
        raise ValueError(
            f"{given}: {len(setting)} formats. Expected 'fp8', a format, or a pair of formats, of "
            "operands and of gradients. Pass for example ('E4M3FN', 'E5M2')."
        )
    for format in setting:
        checked_format(format, given=f"{given}: {shown(format)}")
    return setting[0], setting[1]


def check_grid(grid: object) -> None:
    """Refuse an unknown kind of grid."""
    advice = "pass 'moving' to train, 'fixed' for the numbers of the format themselves"
    check_choice("grid", grid, get_args(Grid), "unknown grid", advice)


class MovingGrid:
    """Factors for the casts of a step that move the numbers of a format at every step.

    Rounding to nearest is right on average over the elements of a tensor, but not over the steps of
    a training. In constant units of powers of two, a weight that hardly moves is rounded to the
    same side at every step, and the weights gather where that side changes. A factor ``c`` in
    (1/2, 1] before the cast, divided out after the matmul, moves the numbers of the format under
    the tensor. So the errors of a few steps average out. Factors above 1 would do the same, but
    could bring an element that fits beyond the range.

    The logarithm of each cast starts at a value that depends only on its name, and moves by the
    golden ratio at every training step. So factors are independent of each other, and the same
    after a restart, in every graph of a step, and on every stage of a pipeline.

    References:
        Nagel et al., "Overcoming Oscillations in Quantization-Aware Training" (arXiv 2203.11086),
        section 2, on the weights; the golden ratio as the most even of all sequences of steps:
        Kuipers and Niederreiter, "Uniform Distribution of Sequences", chapter 2.3.
    """

    def __init__(self) -> None:
        self.step = 0  # number of training steps so far, without evaluation
        self._counts_calls = True

    def follow(self, step: int) -> None:
        """Count optimizer steps from now on, so that accumulated batches share their factors."""
        self.step = step
        self._counts_calls = False

    def factor(self, name: str, call: int) -> float:
        """Return the factor of a cast."""
        step = max(call - 1, 0) if self._counts_calls else self.step
        start = 2.0 ** -(zlib.crc32(name.encode()) / 2**32)
        moved = start * 2.0 ** -(step * _STRIDE % 1.0)
        # Rounded to FP32, the type in which kernels hold it.
        mantissa, exponent = math.frexp(moved if moved > 0.5 else 2 * moved)
        return math.ldexp(round(mantissa * 2**24) / 2**24, exponent)


class SimulateFormat:
    """The formats that matmuls are rounded to, as in :func:`simulate_format`."""

    def __init__(
        self,
        operand_format: FormatLike,
        gradient_format: FormatLike,
        *,
        rounding: Rounding = "nearest",
        saturate: bool | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        seed: int = 0,
        grid: Grid = "fixed",
    ) -> None:
        check_rounding(rounding)
        check_grid(grid)
        if saturate is not None:
            check_flag("saturate", saturate)
        check_count("seed", seed, least=0)
        given = f"operand_format={shown(operand_format)}"
        self.operand_format = checked_format(operand_format, given=given)  # format of the operands
        given = f"gradient_format={shown(gradient_format)}"
        # Format of the gradients.
        self.gradient_format = checked_format(gradient_format, given=given)
        self.rounding = rounding  # ``"nearest"`` or ``"stochastic"``
        self.saturate = saturate
        # Moves the numbers of the formats. ``None`` if they stay.
        self.moving_grid = MovingGrid() if grid == "moving" else None
        self.patterns = NamePatterns(include, exclude)
        self.seed = seed  # of stochastic rounding

    def summary(self) -> str:
        """Describe the formats and the rounding."""
        formats = f"Operands rounded to {self.operand_format}, gradients to {self.gradient_format}"
        grid = "" if self.moving_grid is None else ", moving grid"
        return f"{formats} ({self.rounding}{grid})"

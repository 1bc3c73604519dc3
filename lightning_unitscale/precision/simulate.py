"""Simulate matrix products in a number format: round what they read, compute them wide.

An accumulation in FP32 of products of FP8 numbers is what FP8 hardware does, so rounding the three
tensors that meet in a product and its gradients is all there is to simulate.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from lightning_unitscale.arguments import check_count, check_flag, shown
from lightning_unitscale.graph.name_patterns import NamePatterns
from lightning_unitscale.precision.dither import Grid, MovingGrid, check_grid
from lightning_unitscale.quantize import FormatLike, Rounding, check_rounding, checked_format

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
            f"{given}: {len(setting)} formats; expected 'fp8', a format, or a pair of formats, of "
            "operands and of gradients; pass for example ('E4M3FN', 'E5M2')."
        )
    for format in setting:
        checked_format(format, given=f"{given}: {shown(format)}")
    return setting[0], setting[1]


class SimulateFormat:
    """What products are rounded to: the arguments of :func:`simulate_format`."""

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
        # What moves the numbers of the formats; ``None`` where they stay.
        self.moving_grid = MovingGrid() if grid == "moving" else None
        self.patterns = NamePatterns(include, exclude)
        self.seed = seed  # of stochastic rounding

    @property
    def rounding_text(self) -> str:
        """The way of rounding, in words."""
        return self.rounding if self.moving_grid is None else f"{self.rounding}, moving grid"

    def summary(self) -> str:
        """What is rounded to what, and how."""
        formats = f"Operands rounded to {self.operand_format}, gradients to {self.gradient_format}"
        return f"{formats} ({self.rounding_text})"

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulateFormat:
        new = copy.copy(self)
        memo[id(self)] = new
        new.moving_grid = copy.copy(self.moving_grid)
        return new

"""What became of units in a run, one line each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_unitscale.callbacks.packages import rank_zero_info
from lightning_unitscale.dispatch.coverage import listed
from lightning_unitscale.lossless.measured import Unrepresentable
from lightning_unitscale.precision.fp8 import WIDE_GRADIENT


class UnitEvents:
    """Records when new units were taken, and why.

    Attributes:
        lines: The events, for ``explain()``.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def new_units(self, num_changed: int, when: str, outside: Mapping[str, float]) -> None:
        """Record that units have changed."""
        worst = sorted(outside.items(), key=lambda item: -abs(math.log2(item[1])))[:3]
        reason = ", ".join(f"{name} at RMS {rms:.3g}" for name, rms in worst)
        event = f"New units for {num_changed} tensors at {when}"
        self.lines.append(f"{event}: {reason}" if reason else event)
        if outside:
            rank_zero_info(f"UnitScaleCallback: {self.lines[-1]}")

    def late_units(self, names: Sequence[str], when: str) -> None:
        """Record that tensors that gave no unit before have one."""
        if names:
            self.lines.append(f"First units for {len(names)} tensors at {when}: {listed(names)}")

    def unrepresentable(self, new: Unrepresentable, when: str) -> None:
        """Record what left FP8, or its finer format."""
        for what, reasons in (
            ("Out of FP8", new.products),
            (f"Gradients in {WIDE_GRADIENT}", new.gradients),
        ):
            if reasons:
                listed = "; ".join(f"{name}, since {why}" for name, why in reasons.items())
                self.lines.append(f"{what} from {when} on: {listed}")
                rank_zero_info(f"UnitScaleCallback: {self.lines[-1]}")

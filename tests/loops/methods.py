"""The methods of a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_unitscale import ScaleMonitor, UnitScaleCallback

METHODS: dict[str, Callable[[], list[Any]]] = {
    "plain": lambda: [],
    "monitor": lambda: [ScaleMonitor(every_n_steps=2)],
    "lossless": lambda: [UnitScaleCallback()],
    "both": lambda: [UnitScaleCallback(), ScaleMonitor(every_n_steps=2)],
    "fp8": lambda: [UnitScaleCallback(simulate="fp8")],
    "captured": lambda: [UnitScaleCallback(remat="min_cut")],
    "u-mup": lambda: [UnitScaleCallback("u-mup", lr_scaling=None)],
}
# They change what is computed.
CHANGING = ("fp8", "u-mup")

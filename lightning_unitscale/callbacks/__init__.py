"""Lightning callbacks: ``Trainer(callbacks=[UnitScaleCallback(), ScaleMonitor()])``."""

from lightning_unitscale.callbacks.alert_actions import ScaleViolation, ScaleWarning
from lightning_unitscale.callbacks.memory_budget import RematCallback
from lightning_unitscale.callbacks.options import FP8, Rules, Simulate
from lightning_unitscale.callbacks.precision_plugin import UnitScaledPrecision
from lightning_unitscale.callbacks.scale_monitor import ScaleMonitor
from lightning_unitscale.callbacks.unit_scale import UnitScaleCallback

__all__ = [
    "FP8",
    "RematCallback",
    "Rules",
    "ScaleMonitor",
    "ScaleViolation",
    "ScaleWarning",
    "Simulate",
    "UnitScaleCallback",
    "UnitScaledPrecision",
]

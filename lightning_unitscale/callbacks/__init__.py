"""Lightning callbacks: ``Trainer(callbacks=[UnitScaleCallback(), ScaleMonitor()])``."""

from lightning_unitscale.callbacks.remat import RematCallback
from lightning_unitscale.callbacks.scale_alerts import ScaleViolation, ScaleWarning
from lightning_unitscale.callbacks.scale_monitor import ScaleMonitor
from lightning_unitscale.callbacks.unit_scale import UnitScaleCallback

__all__ = [
    "RematCallback",
    "ScaleMonitor",
    "ScaleViolation",
    "ScaleWarning",
    "UnitScaleCallback",
]

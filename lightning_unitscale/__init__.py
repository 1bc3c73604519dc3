"""Unit scaling, scale tracking, rematerialization and pipelines for any LightningModule.

Names are imported when they are first used. TensorBoard executes this package at its start to find
the dashboard, and must not wait for torch or Lightning. For the same reason
``Trainer(strategy="pipeline")`` is registered when Lightning is imported, by a function that
imports the strategy at its first use.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_unitscale.patching import when_imported

if TYPE_CHECKING:
    from lightning_unitscale.callbacks import (
        FP8,
        RematCallback,
        Rules,
        ScaleMonitor,
        Simulate,
        UnitScaleCallback,
        UnitScaledPrecision,
    )
    from lightning_unitscale.loops import attach
    from lightning_unitscale.loops.hugging_face import HFCallback
    from lightning_unitscale.precision import precision_report
    from lightning_unitscale.strategies import PipelineStrategy

__version__ = "0.1.0"

# public name -> the module that defines it
_EXPORTS = {
    "FP8": "lightning_unitscale.callbacks",
    "HFCallback": "lightning_unitscale.loops.hugging_face",
    "PipelineStrategy": "lightning_unitscale.strategies",
    "RematCallback": "lightning_unitscale.callbacks",
    "Rules": "lightning_unitscale.callbacks",
    "ScaleMonitor": "lightning_unitscale.callbacks",
    "Simulate": "lightning_unitscale.callbacks",
    "UnitScaleCallback": "lightning_unitscale.callbacks",
    "UnitScaledPrecision": "lightning_unitscale.callbacks",
    "attach": "lightning_unitscale.loops",
    "precision_report": "lightning_unitscale.precision",
}
_SUBMODULES = frozenset(
    {
        "callbacks",
        "cli",
        "formats",
        "functional",
        "loops",
        "optim",
        "pipeline",
        "precision",
        "profiler",
        "quantize",
        "remat",
        "scales",
        "strategies",
        "tensorboard",
        "transforms",
    }
)

__all__ = [
    "FP8",
    "HFCallback",
    "PipelineStrategy",
    "RematCallback",
    "Rules",
    "ScaleMonitor",
    "Simulate",
    "UnitScaleCallback",
    "UnitScaledPrecision",
    "__version__",
    "attach",
    "precision_report",
]


def _register(module: ModuleType) -> None:
    registry = getattr(module, "StrategyRegistry", None)
    # Another package may have registered the name, or a later Lightning may have another registry.
    if registry is not None and "pipeline" not in registry:
        registry.register(
            "pipeline",
            _pipeline_strategy,
            description="One module over several devices, four microbatches, by 1F1B",
            num_microbatches=4,
        )


def _pipeline_strategy(**options: Any) -> Any:
    from lightning_unitscale.strategies import PipelineStrategy

    return PipelineStrategy(**options)


# The module with Lightning's registry of strategies (checked on Lightning 2.6).
when_imported("lightning.pytorch.strategies", _register)


def __getattr__(name: str) -> Any:
    try:
        if name in _EXPORTS:
            value = getattr(import_module(_EXPORTS[name]), name)
        elif name in _SUBMODULES:
            value = import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    except ModuleNotFoundError as error:
        # ``import *``, ``hasattr`` and ``inspect`` ask for names without using them.
        if name in _EXPORTS:
            return _unavailable(name, error)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {error}") from error
    globals()[name] = value  # the next access skips this function
    return value


def _unavailable(name: str, error: ModuleNotFoundError) -> type:
    """Return a class that raises when it is called, because its packages are missing."""

    def init(self: object, *args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError(
            f"{name}: {error}. Expected an environment that has it. Install it.", name=error.name
        ) from error

    return type(name, (), {"__init__": init, "__doc__": f"Not available here: {error}."})


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_SUBMODULES})

"""Give ``Trainer(strategy="pipeline")`` its name without an import of Lightning.

Lightning's registry asks for a callable and calls it when the name is used, so a function that
imports the strategy then is enough. If Lightning is not imported yet, the name waits for it.
"""

from types import ModuleType
from typing import Any

from lightning_unitscale.patching import when_imported

# The module with Lightning's registry of strategies (checked on Lightning 2.6).
_REGISTRY = "lightning.pytorch.strategies"
_NAME = "pipeline"


def register_strategies() -> None:
    """Register the name now, or as soon as Lightning's registry is imported. Idempotent."""
    when_imported(_REGISTRY, _register)


def _register(module: ModuleType) -> None:
    registry = getattr(module, "StrategyRegistry", None)
    # Another package may have taken the name, or Lightning may have another registry one day.
    if registry is not None and _NAME not in registry:
        registry.register(
            _NAME,
            _pipeline_strategy,
            description="One module over several devices, four microbatches, by 1F1B",
            num_microbatches=4,
        )


def _pipeline_strategy(**options: Any) -> Any:
    from lightning_unitscale.strategies import PipelineStrategy

    return PipelineStrategy(**options)

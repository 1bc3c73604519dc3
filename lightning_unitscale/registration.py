"""Give ``Trainer(strategy="pipeline")`` its name without an import of Lightning.

Lightning's registry asks for a callable and calls it when the name is used, so a function that
imports the strategy then is enough. If Lightning is not imported yet, the name waits for it: a
finder at the front of ``sys.meta_path`` that answers for one module, once.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The module with Lightning's registry of strategies (checked on Lightning 2.6).
_REGISTRY = "lightning.pytorch.strategies"
_NAME = "pipeline"


def register_strategies() -> None:
    """Register the name now, or as soon as Lightning's registry is imported. Idempotent."""
    module = sys.modules.get(_REGISTRY)
    if module is not None:
        _register(module)
    elif not any(isinstance(finder, _WaitForRegistry) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WaitForRegistry())


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


class _WaitForRegistry:
    """Finds the registry's module as the other finders do, and registers once it has run."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, whose loader registers; nothing for all other modules."""
        if fullname != _REGISTRY or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        loader, run = spec.loader, spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register(module)

        # On the one object that loads this module: whoever asks it for more gets its own answers.
        loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec

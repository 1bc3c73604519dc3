"""Lightning strategies."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_unitscale.pipeline.strategy import PipelineStrategy

__all__ = ["PipelineStrategy"]


def __getattr__(name: str) -> Any:
    # Training on one device must not load the pipeline's engine.
    if name == "PipelineStrategy":
        from lightning_unitscale.pipeline.strategy import PipelineStrategy

        return PipelineStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Lightning strategies."""

from lightning_unitscale.strategies.pipeline import PipelineStrategy

__all__ = ["PipelineStrategy"]

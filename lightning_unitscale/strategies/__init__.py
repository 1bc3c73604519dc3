"""Lightning strategies. Importing this registers ``Trainer(strategy="pipeline")``."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_unitscale.strategies.pipeline import PipelineStrategy

__all__ = ["PipelineStrategy"]

if "pipeline" not in StrategyRegistry:
    StrategyRegistry.register(
        "pipeline",
        PipelineStrategy,
        description="One module over several devices, four microbatches, by 1F1B",
        num_microbatches=4,
    )

"""Which modules and Trainers the strategy can train; others are refused before anything runs."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_unitscale.graph.steps import steps_of
from lightning_unitscale.pipeline.schedules import Schedule
from lightning_unitscale.strategies.captured_steps import refuse_steps


def refuse_unsupported(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    precision: Precision,
    capture: str,
    schedule: Schedule,
) -> None:
    """Refuse what cannot run as a pipeline.

    Args:
        trainer: The Trainer.
        module: The module.
        precision: The Trainer's precision plugin.
        capture: The strategy's argument.
        schedule: The strategy's schedule.

    Raises:
        MisconfigurationException: With the reason.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "PipelineStrategy: automatic_optimization=False; expected automatic optimization: "
            "the strategy runs forward and backward together."
        )
    trains = trainer.state.fn == TrainerFn.FITTING
    steps = steps_of(module)
    if steps is not None and trains:
        refuse_steps(steps, capture, schedule)
    if isinstance(precision, MixedPrecision) and precision.scaler:
        raise MisconfigurationException(
            "PipelineStrategy: precision='16-mixed' scales the loss outside of the step, where "
            "the pipeline's backward has run already; expected '32-true' or 'bf16-mixed'."
        )
    normalized = [
        name
        for name, one in module.named_modules()
        if isinstance(one, nn.modules.batchnorm._BatchNorm) and one.track_running_stats
    ]
    if normalized and trains:
        raise MisconfigurationException(
            f"PipelineStrategy: {normalized[0]} takes its statistics over each microbatch, not "
            "over the batch; expected normalization of single samples; use GroupNorm or "
            "LayerNorm."
        )

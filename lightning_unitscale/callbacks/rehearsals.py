"""Rehearsals of a Trainer's captured steps: they are measured and leave no trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_unitscale.callbacks.distributed import num_microbatches, rehearsed, rehearsing
from lightning_unitscale.callbacks.steps import (
    loss_scale,
    step_arguments,
    step_context,
    takes_iterator,
)
from lightning_unitscale.capture.steps import ModuleSteps
from lightning_unitscale.lossless.rehearsal import Reduce, calibrate
from lightning_unitscale.lossless.rewrite import LosslessUnitScale

if TYPE_CHECKING:
    import lightning.pytorch as pl


def can_be_rehearsed(module: pl.LightningModule) -> bool:
    """Whether a training step neither updates weights nor consumes batches by itself."""
    return module.automatic_optimization and not takes_iterator(module)


def rehearse_training(
    trainer: pl.Trainer,
    steps: ModuleSteps,
    rewrite: LosslessUnitScale,
    batch: Any,
    batch_idx: int,
    results: Reduce,
) -> Mapping[str, float] | None:
    """Run a training step forward and backward to measure units, and undo the rest."""
    batch = rehearsed(trainer, batch)
    arguments = step_arguments(trainer.lightning_module, "training_step", batch, batch_idx)
    accumulated = trainer.accumulate_grad_batches * num_microbatches(trainer)
    with (
        trainer.precision_plugin.train_step_context(),
        rehearsing(trainer),
        steps.gathered(),
    ):
        return calibrate(
            steps.steps["training_step"],
            rewrite,
            arguments,
            {},
            seed_gradient=loss_scale(trainer) / accumulated,
            results=results,
        )


def rehearse_evaluation(
    trainer: pl.Trainer,
    steps: ModuleSteps,
    rewrite: LosslessUnitScale,
    name: str,
    batch: tuple[Any, ...],
    results: Reduce,
) -> None:
    """Run an evaluation step to measure the units of its forward pass."""
    arguments = step_arguments(trainer.lightning_module, name, *batch)
    with step_context(trainer, name), steps.gathered():
        step = steps.steps[name]
        calibrate(step, rewrite, arguments, {}, results=results, backward=False)

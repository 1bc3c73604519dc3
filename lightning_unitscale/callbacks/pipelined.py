"""What a callback has to know of a Trainer whose strategy runs its steps as a pipeline.

There, what is captured, cut and run is the step of one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

if TYPE_CHECKING:
    from lightning_unitscale.strategies.pipeline import PipelineStrategy


def pipeline_of(trainer: pl.Trainer) -> PipelineStrategy | None:
    """The strategy, if it cuts training steps into stages."""
    # Not by its class: whoever trains on one device need not load the pipeline's engine.
    is_one = hasattr(trainer.strategy, "num_microbatches")
    return cast("PipelineStrategy", trainer.strategy) if is_one else None


def num_microbatches(trainer: pl.Trainer) -> int:
    """Microbatches of a batch, 1 without a pipeline."""
    strategy = pipeline_of(trainer)
    return 1 if strategy is None else strategy.num_microbatches


def num_replicas(trainer: pl.Trainer) -> int:
    """Ranks with data of their own, over whose gradients the mean is taken."""
    strategy = pipeline_of(trainer)
    return trainer.world_size if strategy is None else strategy.data_parallel


def rehearsed(trainer: pl.Trainer, batch: Any) -> Any:
    """The part of a training batch on which a step is rehearsed: its first microbatch.

    Every rank rehearses the whole step on it, before the first step frees what others own. A
    rehearsal on one rank alone would take as long, and the others would wait.
    """
    if pipeline_of(trainer) is None:
        return batch
    from lightning_unitscale.pipeline.microbatches import split_evenly

    return split_evenly(batch, num_microbatches(trainer))[0]


def rehearsing(trainer: pl.Trainer) -> AbstractContextManager[Any]:
    """Entered where a training step is rehearsed: what is captured there is what will be cut."""
    if pipeline_of(trainer) is None:
        return nullcontext()
    from lightning_unitscale.pipeline.step_program import static_shapes

    return static_shapes()


def num_gradient_elements(trainer: pl.Trainer, parameters: Iterable[Tensor]) -> int:
    """Elements of those parameters that have a gradient, those of other stages included."""
    strategy = pipeline_of(trainer)
    if strategy is not None:
        return strategy.num_gradient_elements(parameters)
    return sum(one.numel() for one in parameters if one.grad is not None)


def refuse_live(trainer: pl.Trainer, why: str) -> None:
    """Refuse to measure units while the step runs.

    Raises:
        MisconfigurationException: If the strategy is a pipeline.
    """
    if pipeline_of(trainer) is not None:
        raise MisconfigurationException(
            f"UnitScaleCallback with PipelineStrategy: the units of "
            f"{type(trainer.lightning_module).__name__}.training_step are measured before it is "
            f"cut, and {why}; expected a step that takes a batch and returns its loss; change it."
        )

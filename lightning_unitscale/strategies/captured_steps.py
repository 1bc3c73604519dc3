"""Which of the changes that callbacks make to a module's steps a pipeline can be cut from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_unitscale.graph.steps import ModuleSteps, steps_of
from lightning_unitscale.pipeline.schedules import Schedule
from lightning_unitscale.remat.step_partitioner import StepPartitioner
from lightning_unitscale.strategies.stage_remat import check_schedule


def refuse_steps(steps: ModuleSteps, capture: str, schedule: Schedule) -> None:
    """Refuse steps that the strategy cannot run as a pipeline, before anything has run.

    Args:
        steps: The steps of the module, with what callbacks have asked of them.
        capture: The strategy's argument.
        schedule: The strategy's schedule.

    Raises:
        MisconfigurationException: With the reason.
    """
    if capture == "forward":
        raise MisconfigurationException(
            f"PipelineStrategy(capture='forward') with {_names(steps)}: they rewrite and observe "
            "training_step as one graph, and forward alone is captured here; expected "
            "capture='auto' or 'step'; change it, or leave the callbacks out."
        )
    if isinstance(steps.partition_fn, StepPartitioner):
        check_schedule(steps.partition_fn.budget, schedule)
    if steps.executor == "inductor":
        raise MisconfigurationException(
            "PipelineStrategy with compile=True: the stages run operation by operation; expected "
            "compile=False; leave it out."
        )


class PlainSteps(ModuleSteps):
    """Captures the user's own methods beside what callbacks have captured of them."""

    @override
    def original(self, name: str) -> Callable[..., Any]:
        """The user's own method, also where captured steps stand in its place."""
        known = steps_of(self.module)
        if known is None or name not in known.steps:
            return super().original(name)
        return known.original(name)


def not_one_graph(steps: ModuleSteps, reason: Exception) -> MisconfigurationException:
    """What to raise where only ``forward`` could be a pipeline, and callbacks want the step."""
    return MisconfigurationException(
        f"PipelineStrategy with {_names(steps)}: the step cannot be cut, and of forward alone "
        f"the callbacks would see a part: {reason}"
    )


def _names(steps: ModuleSteps) -> str:
    return ", ".join(one for one in steps.owners if one != "PipelinedStep") or "captured steps"

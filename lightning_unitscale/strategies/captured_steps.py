"""Which of the changes that callbacks make to a module's steps a pipeline can be cut from."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_unitscale.graph.steps import ModuleSteps


def refuse_steps(steps: ModuleSteps, capture: str) -> None:
    """Refuse steps that the strategy cannot run as a pipeline, before anything has run.

    Args:
        steps: The steps of the module, with what callbacks have asked of them.
        capture: The strategy's argument.

    Raises:
        MisconfigurationException: With the reason.
    """
    if capture == "forward":
        raise MisconfigurationException(
            f"PipelineStrategy(capture='forward') with {_names(steps)}: they rewrite and observe "
            "training_step as one graph, and forward alone is captured here; expected "
            "capture='auto' or 'step'; change it, or leave the callbacks out."
        )
    if steps.partition_fn is not None:
        raise MisconfigurationException(
            "PipelineStrategy with a memory budget (RematCallback, UnitScaleCallback(remat=...)): "
            "a budget is planned for one graph on one device, and here every rank keeps several "
            "microbatches of its stages; expected no budget; leave it out, and use more "
            "microbatches or the schedule 1F1B for less memory."
        )
    if steps.executor != "eager":
        raise MisconfigurationException(
            "PipelineStrategy with compile=True: the stages run operation by operation; expected "
            "compile=False; leave it out."
        )


def not_one_graph(steps: ModuleSteps, reason: Exception) -> MisconfigurationException:
    """What to raise where only ``forward`` could be a pipeline, and callbacks want the step."""
    return MisconfigurationException(
        f"PipelineStrategy with {_names(steps)}: the step cannot be cut, and of forward alone "
        f"the callbacks would see a part: {reason}"
    )


def _names(steps: ModuleSteps) -> str:
    return ", ".join(one for one in steps.owners if one != "PipelinedStep") or "captured steps"

"""Run a ``training_step`` uncaptured if the Trainer's work around it needs that."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lightning_unitscale.callbacks.packages import is_overridden
from lightning_unitscale.capture.fallback import RECORDED
from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.capture.side_effects import find_recorded_pass
from lightning_unitscale.patching import Replacement, shadowed

if TYPE_CHECKING:
    import lightning.pytorch as pl

_STEP = "training_step"
# Hooks between a step and its optimizer, on the loss or on gradients.
_AROUND_BACKWARD = (
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)


def keep_plain_where_recorded(steps: ModuleSteps, module: pl.LightningModule) -> None:
    """Run ``training_step`` as it is if gradients of its gradients are taken outside of it.

    The step also runs as it is if such gradients inside of it might be found too late. A step that
    updates weights itself cannot be undone. A step that measures units runs in an interpreter
    first, which adds gradients in another order.
    """
    step = steps.steps.get(_STEP)
    if step is None or steps.executor == "eager" or steps.changes_function:
        return
    kind = type(module)
    methods = [getattr(kind, name) for name in _AROUND_BACKWARD if is_overridden(name, module)]
    if steps.passes or not module.automatic_optimization:
        methods.append(step.__wrapped__)
    for method in methods:
        if (place := find_recorded_pass(module, method)) is not None:
            step.fallback.stay_plain(f"{RECORDED} at {place}")
            return


def falling_back_in_backward(
    steps: ModuleSteps, module: pl.LightningModule
) -> AbstractContextManager[None]:
    """Let the first backward pass fail within this context. The step then runs as it is."""
    step, run = steps.steps.get(_STEP), module.backward

    def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        def backpropagate(loss: Any) -> None:
            run(loss, *args, **kwargs)

        if step is None or not module.automatic_optimization:
            backpropagate(loss)  # within the step, which is undone as a whole
            return
        hook = module._current_fx_name
        step.fallback.through_backward(backpropagate, loss)
        module._current_fx_name = hook  # an attribute, so it is restored with the others

    return shadowed(module, backward=Replacement(run, backward))

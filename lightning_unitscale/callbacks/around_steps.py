"""Exclude code outside the model, such as loggers, from captured steps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_unitscale.callbacks.packages import PACKAGES, is_overridden, trainer_packages
from lightning_unitscale.capture.fallback import RECORDED
from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.capture.side_effects import find_recorded_pass, functions_of, names_in
from lightning_unitscale.patching import Replacement, shadowed
from lightning_unitscale.rules.unit_weights import zero_gradients

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
# Names of a Trainer's loggers, and prefixes of log methods: of loggers, TensorBoard's writer and a
# W&B run.
_LOGGERS = frozenset({"logger", "loggers"})
_PREFIXES = ("log", "add_")


def keep_plain_where_recorded(steps: ModuleSteps, module: pl.LightningModule) -> None:
    """Run ``training_step`` uncaptured if code outside it takes gradients of gradients."""
    # The step also runs uncaptured if such gradients inside it might be found too late. A step that
    # updates weights itself cannot be undone. A step that measures units runs in an interpreter
    # first, which adds gradients in another order.
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


@contextmanager
def around_backward_passes(steps: ModuleSteps, module: pl.LightningModule) -> Iterator[None]:
    """Keep the tensors that backward passes need, and let the first pass fail, in this context."""
    step, run, between = steps.steps.get(_STEP), module.backward, ExitStack()

    def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        between.close()

        def backpropagate(loss: Any) -> None:
            run(loss, *args, **kwargs)

        if step is None or not module.automatic_optimization:
            backpropagate(loss)  # it is inside the step, which is undone as a whole
            return
        hook = module._current_fx_name
        step.fallback.through_backward(backpropagate, loss)
        module._current_fx_name = hook  # an attribute is restored with the others

    with between, shadowed(module, backward=Replacement(run, backward)):
        if step is not None and module.automatic_optimization:
            step.until_backward = between
        yield


@contextmanager
def untraced_trainers() -> Iterator[None]:
    """Leave Trainers that run within captured steps uncaptured, in this context."""
    # Dynamo would trace a whole training, its optimizer included.
    names = ("__init__", "fit", "validate", "test", "predict")
    with ExitStack() as stack:
        for package in trainer_packages():
            kind = package.Trainer
            methods = {name: torch.compiler.disable(getattr(kind, name)) for name in names}
            stack.enter_context(shadowed(kind, **methods))
        yield


@functools.cache
def _names_in_code(kind: type) -> frozenset[str]:
    """Return the names in the code of the methods of a user's class and its bases."""
    own = (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in PACKAGES)
    functions = (function for base in own for function in functions_of(base))
    return frozenset(name for function in functions for name in names_in(function))


@functools.cache
def _log_methods(kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for name in dir(kind)
        if name.startswith(_PREFIXES) and inspect.isfunction(inspect.getattr_static(kind, name))
    )


def untraced_calls(module: nn.Module) -> Iterator[Any]:
    """Yield calls of a step outside its model: of loggers, and of manual optimization."""
    trainer: Any = getattr(module, "_trainer", None)
    if trainer is None:
        return
    kind: Any = type(module)
    names = _names_in_code(kind)
    for logger in trainer.loggers if names & _LOGGERS else ():
        # The experiment is read only if the module does, since reading it creates files.
        experiments = [getattr(logger, "experiment", None)] if "experiment" in names else []
        for target in (logger, *experiments):
            if hasattr(target, "__dict__"):
                kind = type(target)
                yield from ((target, name) for name in _log_methods(kind))
    yield from ((optimizer, "step") for optimizer in _own_optimizers(module))
    if module.automatic_optimization or not trainer.training:
        return
    yield module, "manual_backward", zero_gradients
    for name in ("clip_gradients", "toggle_optimizer", "untoggle_optimizer"):
        yield module, name
    # The wrapped optimizers that self.optimizers() returns, and the unwrapped ones.
    optimizers = (*trainer.strategy._lightning_optimizers, *trainer.strategy.optimizers)
    schedulers = (config.scheduler for config in trainer.strategy.lr_scheduler_configs)
    yield from ((stepped, "step") for stepped in (*optimizers, *schedulers))


def _own_optimizers(module: nn.Module) -> Iterator[Optimizer]:
    """Yield optimizers that are attributes of the module, alone or in a container."""
    for value in vars(module).values():
        if isinstance(value, dict):
            items: Iterable[Any] = value.values()
        else:
            items = value if isinstance(value, (list, tuple)) else (value,)
        # Only the first item is checked, so that a list of a million samples costs nothing.
        if isinstance(next(iter(items), None), Optimizer):
            yield from (item for item in items if isinstance(item, Optimizer))

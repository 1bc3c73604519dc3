"""What the callbacks share: the captured steps of a LightningModule, and where a step stands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer

from lightning_unitscale.callbacks.logging_calls import logging_calls
from lightning_unitscale.callbacks.pipelined import pipeline_of
from lightning_unitscale.graph.capture import is_compiled
from lightning_unitscale.graph.captured_step import CapturedStep
from lightning_unitscale.graph.steps import LIGHTNING_STEPS, ModuleSteps, steps_of
from lightning_unitscale.shadowing import nothing, shadowed
from lightning_unitscale.transforms.rules.zero_gradients import zero_gradients


def captures_steps(trainer: pl.Trainer) -> bool:
    """Whether the steps of a Trainer's module run as captured graphs.

    A strategy that cuts them, or a callback that rewrites them, says so.
    """
    if pipeline_of(trainer) is not None:
        return True
    return any(
        getattr(one, "captures_steps", lambda _: False)(trainer) for one in all_callbacks(trainer)
    )


def check_module(trainer: pl.Trainer, module: pl.LightningModule, owner: pl.Callback) -> str:
    """Name of the owner's class, if it is in the Trainer once and the module is one of Lightning's.

    Raises:
        MisconfigurationException: If not.
    """
    name = type(owner).__name__
    if not isinstance(module, pl.LightningModule):
        raise MisconfigurationException(
            f"{name}: {type(module).__name__} is no lightning.pytorch.LightningModule; expected "
            "one; import lightning.pytorch instead of pytorch_lightning, for the Trainer as well."
        )
    twins = [one for one in all_callbacks(trainer) if type(one) is type(owner)]
    if len(twins) > 1:
        raise MisconfigurationException(
            f"callbacks: {name} is given {len(twins)} times; expected it once; remove the others."
        )
    return name


def attach_steps(
    trainer: pl.Trainer, module: pl.LightningModule, owner: pl.Callback
) -> ModuleSteps:
    """The captured steps of ``module``, put in place of its own by the first callback that asks.

    Raises:
        MisconfigurationException: If the module is compiled already or no module of
            ``lightning.pytorch``, or ``owner``'s class is in the Trainer twice.
    """
    name = check_module(trainer, module, owner)
    if is_compiled(module):
        raise MisconfigurationException(
            f"{name}: the LightningModule {type(module).__name__} is compiled already, so its "
            "steps cannot be captured; expected a plain module; leave out torch.compile and pass "
            "UnitScaleCallback(compile=True) instead."
        )
    steps = steps_of(module)
    if steps is None:
        steps = ModuleSteps(
            module, existing_steps(module), defer=("log", "log_dict"), untraced=_untraced
        )
    steps.attach(name)
    return steps


def step_arguments(
    module: pl.LightningModule, step: str, batch: Any, batch_idx: int, dataloader_idx: int = 0
) -> tuple[Any, ...]:
    """Positional arguments with which Lightning calls a step, or a hook of a batch."""
    hook = getattr(module, step)
    arguments: list[Any] = [batch]
    if is_param_in_hook_signature(hook, "batch_idx", min_args=2):
        arguments.append(batch_idx)
    if step in {"training_step", "on_train_batch_start"}:
        return tuple(arguments)
    if is_param_in_hook_signature(hook, "dataloader_idx", min_args=3):
        arguments.append(dataloader_idx)
    return tuple(arguments)


@contextlib.contextmanager
def starting_batch(
    module: pl.LightningModule, step: CapturedStep, batch_idx: int, dataloader_idx: int = 0
) -> Iterator[None]:
    """Within this context a rehearsal of the step runs the module's hook for the batch first.

    Lightning calls the callbacks before the module, so ``on_train_batch_start`` of the module has
    not set yet what the step is going to read.
    """
    name = f"on_{step.name.removesuffix('_step').replace('training', 'train')}_batch_start"

    def start(batch: Any, *_: Any) -> None:
        arguments = step_arguments(module, name, batch, batch_idx, dataloader_idx)
        # The real call logs.
        with shadowed(module, log=nothing, log_dict=nothing):
            getattr(module, name)(*arguments)

    step.before_rehearsal = start if is_overridden(name, module) else None
    try:
        yield
    finally:
        step.before_rehearsal = None


def takes_iterator(module: pl.LightningModule) -> bool:
    """Whether ``training_step`` pulls its own batches, so that it cannot be rehearsed."""
    return is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)


def optimizer_step_index(trainer: pl.Trainer) -> int:
    """The step axis of Lightning's own callbacks, so that charts line up with the loss."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def has_stepped(trainer: pl.Trainer, module: pl.LightningModule, global_step_before: int) -> bool:
    """Whether the batch that has just run completed an optimizer step.

    Under manual optimization there is no accumulation that Lightning knows of, and it counts only
    the steps of optimizers in its own wrapping: every batch is one.
    """
    return not module.automatic_optimization or trainer.global_step != global_step_before


def loss_scale(trainer: pl.Trainer) -> float:
    """Factor that the precision plugin puts on the loss, 1 without a gradient scaler."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


def _untraced(module: nn.Module) -> Iterator[Any]:
    """What a step calls beside its model: its logger, and optimizers under manual optimization."""
    assert isinstance(module, pl.LightningModule)
    trainer = module._trainer
    if trainer is None:
        return
    yield from logging_calls(module, trainer)
    yield from ((one, "step") for one in _own_optimizers(module))
    if module.automatic_optimization or not trainer.training:
        return
    yield module, "manual_backward", zero_gradients
    for name in ("clip_gradients", "toggle_optimizer", "untoggle_optimizer"):
        yield module, name
    # The wrapped optimizers as self.optimizers() gives them, and those without their wrapping.
    optimizers = (*trainer.strategy._lightning_optimizers, *trainer.strategy.optimizers)
    schedulers = (config.scheduler for config in trainer.strategy.lr_scheduler_configs)
    for one in (*optimizers, *schedulers):
        yield one, "step"


def _own_optimizers(module: nn.Module) -> Iterator[Optimizer]:
    """Optimizers that are attributes of the module, alone or several in a container."""
    for value in vars(module).values():
        if isinstance(value, dict):
            several: Iterable[Any] = value.values()
        else:
            several = value if isinstance(value, (list, tuple)) else (value,)
        # Of one kind, as a rule: a list of a million samples is not walked at every step.
        if isinstance(next(iter(several), None), Optimizer):
            yield from (one for one in several if isinstance(one, Optimizer))


def existing_steps(module: pl.LightningModule) -> list[str]:
    """Names of the steps that a module has."""
    # The default predict_step calls forward, which is worth capturing as well.
    return [
        name
        for name in LIGHTNING_STEPS
        if is_overridden(name, module)
        or (name == "predict_step" and is_overridden("forward", module))
    ]


def all_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Callbacks of a Trainer."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks

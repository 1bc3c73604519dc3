"""Adapt a Lightning Trainer to the loop interface of callbacks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_unitscale.callbacks.distributed import num_parts
from lightning_unitscale.callbacks.lightning_steps import existing_steps
from lightning_unitscale.callbacks.packages import is_lightning
from lightning_unitscale.compiling import is_compiling
from lightning_unitscale.loops.loop import Loop, StepCaller
from lightning_unitscale.patching import Replacement, shadowed

if TYPE_CHECKING:
    import lightning.pytorch as pl


class LightningLoop(Loop):
    """The loops of a Trainer."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.module: pl.LightningModule = module
        self.steps = tuple(existing_steps(module))
        self.training_step = "training_step"
        self._called = "training_step"  # the method that a training batch calls first
        if module._compiled_call_impl is not None and is_lightning(trainer.strategy, "DDPStrategy"):
            # DDP calls the module, and so the whole compiled step of the module's ``compile()``.
            self._called = "_compiled_call_impl"
            self.steps = (*self.steps, self._called)
        self.trainer = trainer
        self.is_fitting = trainer.state.fn == "fit"
        self._global_step_before = trainer.global_step

    @property
    @override
    def callbacks(self) -> Sequence[Any]:
        callbacks: Sequence[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    @override
    def begin_batch(self) -> None:
        self._global_step_before = self.trainer.global_step

    @property
    @override
    def step_index(self) -> int:
        # The axis of Lightning's own callbacks, so that charts line up with the loss.
        return self.trainer.fit_loop.epoch_loop._batches_that_stepped

    @property
    @override
    def is_last_step(self) -> bool:
        trainer = self.trainer
        if trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps:
            return True
        epochs = trainer.max_epochs
        if epochs is None or epochs == -1 or trainer.current_epoch + 1 < epochs:
            return False
        # The first of accumulated batches, or the last of all, if their number is not known.
        number, accumulated = trainer.num_training_batches, trainer.accumulate_grad_batches
        first = number if number == math.inf else (number - 1) // accumulated * accumulated
        return trainer.is_last_batch or trainer.fit_loop.epoch_loop.batch_idx >= first

    @property
    @override
    def has_stepped(self) -> bool:
        # Under manual optimization Lightning has no accumulation, and counts only the steps of
        # wrapped optimizers. So every batch counts as a step.
        has_counted = self.trainer.global_step != self._global_step_before
        return not self.module.automatic_optimization or has_counted

    @property
    @override
    def device(self) -> torch.device:
        return self.trainer.strategy.root_device

    @property
    @override
    def scaler(self) -> Any:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    @property
    @override
    def num_parts(self) -> int:
        return num_parts(self.trainer)

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.trainer.is_global_zero

    @property
    @override
    def loggers(self) -> Sequence[Any]:
        return self.trainer.loggers

    @override
    def keep_metrics(self, numbers: Mapping[str, float]) -> None:
        if not self.trainer.barebones:
            # On the host, because a copy to a device would wait for it. `log_dict` takes half a
            # millisecond for each number.
            tensors = {name: torch.tensor(number) for name, number in numbers.items()}
            self.trainer.callback_metrics.update(tensors)

    @override
    def running_steps_by(self, call: StepCaller) -> AbstractContextManager[None]:
        method = getattr(self.module, self._called)

        def run(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs) if is_compiling() else call(method, args, kwargs)

        step = Replacement(method, run)
        # Lightning reads parameters one wrapper down, where the step may be wrapped already.
        step.__wrapped__ = getattr(method, "__wrapped__", method)
        return shadowed(self.module, **{self._called: step})

    @override
    def stop(self) -> None:
        self.trainer.should_stop = True

"""Run callbacks in Hugging Face's ``Trainer``."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from lightning_unitscale.arguments import check_instance
from lightning_unitscale.loops.attach import Attachment, attach
from lightning_unitscale.loops.loggers import NumberWriter, WandbWriter, mlflow_run
from lightning_unitscale.loops.loop import LoopCallback, given_callbacks
from lightning_unitscale.patching import Replacement, Shadow, base_when_imported

if TYPE_CHECKING:
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
else:
    # Its package is not imported here, because it is optional and its import takes seconds.
    TrainerCallback = base_when_imported("TrainerCallback", "transformers.trainer_callback")

# Name of the file in the folder of a checkpoint.
_STATE = "lightning_unitscale.pt"
_SCALES = "scales"


class HFCallback(TrainerCallback):
    """Callbacks for ``transformers.Trainer(callbacks=[HFCallback([...])])``.

    ``ScaleMonitor`` also writes to W&B, Trackio and MLflow if ``report_to`` names them. Each
    checkpoint has the callbacks' state in a file, ``lightning_unitscale.pt``. A resumed training
    continues from it.

    Args:
        callbacks: As for :func:`lightning_unitscale.attach`, at least one.
        log_dir: Folder of TensorBoard's event files for ``ScaleMonitor``. The default is ``scales``
            in the Trainer's ``output_dir``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If there is no callback, or two of them set the same option.

    Attributes:
        attachment: The attachment of the callbacks while the Trainer trains.
    """

    def __init__(
        self,
        callbacks: LoopCallback | Iterable[LoopCallback] = (),
        *,
        log_dir: str | Path | None = None,
    ) -> None:
        self._callbacks = given_callbacks(callbacks)
        # The Trainer makes an instance if it gets a class.
        if not self._callbacks:
            raise ValueError(
                "callbacks=(): HFCallback needs at least one callback. Expected "
                "UnitScaleCallback(), ScaleMonitor() or both. Write "
                "HFCallback([UnitScaleCallback(), ScaleMonitor()])."
            )
        if log_dir is not None:
            expected = "the path of a folder"
            check_instance("log_dir", log_dir, (str, PathLike), expected, "pass its path")
        self._log_dir = log_dir
        self.attachment: Attachment | None = None
        self._training: Shadow | None = None

    @override
    def on_init_end(self, *_: Any, **__: Any) -> None:
        trainer = _trainer()
        if trainer is not None:
            train = Replacement(trainer.train, functools.partial(self._train, trainer.train))
            self._training = Shadow(trainer, "train", train)

    @override
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self._detach()  # the attachment of a training that an exception has ended
        self.attachment = attach(
            _trained(model, optimizer),
            optimizer,
            self._callbacks,
            log_dir=self._log_dir or _folder(args) / _SCALES,
            loggers=_writers(args) if state.is_world_process_zero else (),
            scaler=getattr(optimizer, "scaler", None),
        )
        saved = _checkpoint(args, state) / _STATE
        if state.global_step and saved.exists():
            self.attachment.load_state_dict(torch.load(saved, weights_only=True))
        # Trainers of other packages call the same callbacks and may not have it.
        if num_steps := getattr(state, "max_steps", 0):
            self.attachment.num_steps = self.attachment.step_index + num_steps - state.global_step

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.attachment is not None and self.attachment.should_stop:
            control.should_training_stop = True

    @override
    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        folder = _checkpoint(args, state)
        if self.attachment is not None and self.attachment.is_global_zero and folder.exists():
            torch.save(self.attachment.state_dict(), folder / _STATE)

    @override
    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._detach()

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a Trainer's ``train``, which reports no exception to its callbacks."""
        try:
            return train(*args, **kwargs)
        except BaseException as error:
            if self.attachment is not None:
                self.attachment.__exit__(type(error), error, error.__traceback__)
                self.attachment = None
            raise

    def _detach(self) -> None:
        if self.attachment is not None:
            self.attachment.detach()
            self.attachment = None


def _writers(args: TrainingArguments) -> list[NumberWriter]:
    """Return writers to the current runs of the Trainer's own callbacks, on their axis."""
    reports = args.report_to or ()
    writers: list[NumberWriter] = [
        WandbWriter(functools.partial(_log, import_module(name)), name)
        for name in ("wandb", "trackio")
        if name in reports
    ]
    if "mlflow" in reports:
        mlflow = import_module("mlflow")
        # The Trainer's callback ends its run after a first training, and would begin another one at
        # its first log of a second training.
        run = mlflow.active_run() or mlflow.start_run(run_name=args.run_name)
        writers.append(mlflow_run(run))
    return writers


def _log(package: Any, values: Mapping[str, Any], step: int) -> None:
    # The Trainer's own callback ends Trackio's run before it calls other callbacks.
    if package.__name__ != "trackio" or package.context_vars.current_run.get() is not None:
        package.log({**values, "train/global_step": step})


def _trained(model: Any, optimizer: Any) -> Any:
    """Return the module with the optimizer's parameters. Some packages pass its container."""
    if isinstance(model, nn.Module):
        # The Trainer calls a compiled model instead of the model.
        trainer = _trainer()
        wrapped: Any = None if trainer is None else trainer.model_wrapped
        return wrapped if hasattr(wrapped, "_orig_mod") else model
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for value in getattr(model, "__dict__", {}).values():
        if isinstance(value, nn.Module) and not params.isdisjoint(map(id, value.parameters())):
            return value
    return model


def _trainer() -> Trainer | None:
    """Return the Trainer that calls a callback."""
    kind = import_module("transformers").Trainer
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(sys._getframe()))
    return next((caller for caller in callers if isinstance(caller, kind)), None)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return _folder(args) / f"checkpoint-{state.global_step}"


def _folder(args: TrainingArguments) -> Path:
    return Path(args.output_dir or ".")

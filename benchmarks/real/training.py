"""Run a training of a project with or without the callbacks, and return its results."""

from __future__ import annotations

import importlib
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback
from lightning_unitscale.capture.breaks import joined_reasons
from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.capture.step_messages import NO_REASON
from lightning_unitscale.matmuls.coverage import Coverage

from .project import Project

VARIANTS: dict[str, Callable[[], list[pl.Callback]]] = {
    "plain": list,
    "again": list,
    "monitor": lambda: [ScaleMonitor(every_n_steps=5)],
    "default": lambda: [UnitScaleCallback()],
    "both": lambda: [UnitScaleCallback(), ScaleMonitor(every_n_steps=5)],
    "fp8": lambda: [UnitScaleCallback(simulate="fp8")],
    "remat": lambda: [RematCallback("min_cut")],
    "rules": lambda: [UnitScaleCallback("u-mup")],
}


@dataclass
class Run:
    """What one training run computed and what it took.

    Attributes:
        losses: What ``training_step`` returned, step by step.
        logs: What had been logged after each step, and at the end.
        state: The module's final parameters and buffers.
        seconds: CPU time of each step, from one batch's start to the next's.
        peak_bytes: Largest resident memory less that before training.
        coverage: What became of the products, where there was unit scaling.
        parts: Calls of captured graphs in the last step; ``None`` where no step is captured.
        uncaptured: Why a step that callbacks want captured runs as it is, if it does.
        warnings: The first lines of all warnings.
    """

    losses: list[Tensor] = field(default_factory=list)
    logs: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    coverage: Coverage | None = None
    parts: int | None = None
    uncaptured: str = ""
    warnings: set[str] = field(default_factory=set)


class _Recorder(pl.Callback):
    """Fills in a run and ends it after a number of batches, however many optimizers step."""

    def __init__(self, run: Run, steps: int) -> None:
        self.run, self.steps = run, steps
        self._starts: list[float] = []

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # CPU time, and not the clock's: the machine may do other things besides.
        self._starts.append(time.process_time())

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self.run.losses.append(loss.detach().clone())
        self._note_logs(trainer)
        if (steps := steps_of(pl_module)) is not None:
            step = steps.steps["training_step"]
            self.run.parts = step.num_graph_calls
            self.run.uncaptured = step.fallback.reason or (
                f"it is called with a {step.refused}, which Dynamo does not follow"
                if step.refused
                else ""
                if step.num_graph_calls
                else joined_reasons(step.graph_breaks) or NO_REASON
            )
        if len(self._starts) == self.steps:
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note_logs(trainer)
        ends = [*self._starts[1:], time.process_time()]
        self.run.seconds = [end - start for start, end in zip(self._starts, ends, strict=True)]

    def _note_logs(self, trainer: pl.Trainer) -> None:
        self.run.logs.append(
            {name: value.detach().clone() for name, value in trainer.callback_metrics.items()}
        )


def train(project: Project, variant: str, steps: int) -> Run:
    """Train from a fixed seed: equal variants draw equal weights, batches and random numbers."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    run = Run()
    callbacks = VARIANTS[variant]()
    pl.seed_everything(1, verbose=False)
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        module, batches = project.make()
        pl.seed_everything(2, verbose=False)
        package = _package_of(module)
        trainer = package.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=steps,
            limit_val_batches=0,
            logger=package.loggers.TensorBoardLogger(folder),
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            # First, so that what the others do at a batch's start is part of its step.
            callbacks=[_Recorder(run, steps), *callbacks],
            **project.trainer,
        )
        before = _resident_bytes()
        trainer.fit(module, batches)
        run.peak_bytes = _peak_bytes() - before
    run.state = {
        name: value.detach().clone()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    for callback in callbacks:
        if isinstance(callback, UnitScaleCallback):
            run.coverage = callback.coverage
    run.warnings = {f"{w.category.__name__}: {w.message}".splitlines()[0] for w in caught}
    return run


def _package_of(module: pl.LightningModule) -> Any:
    """``lightning.pytorch`` or ``pytorch_lightning``, whichever the module's class is made from."""
    bases = type(module).__mro__
    own = next(base for base in bases if base.__name__ == "LightningModule")
    return importlib.import_module(own.__module__.partition(".core")[0])


def _resident_bytes() -> int:
    """Resident memory now; the peak counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak_bytes() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    raise RuntimeError(f"{key}: not in /proc/self/status. Expected a Linux kernel.")

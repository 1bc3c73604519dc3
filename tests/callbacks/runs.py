"""Run a Trainer, and return everything that this package's callbacks must not change."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.callbacks.lightning_steps import StepsCallback
from tests.helpers import assert_same_bits

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
}


def both() -> list[pl.Callback]:
    """The two callbacks, the monitor on every third step."""
    return [UnitScaleCallback(), ScaleMonitor(every_n_steps=3)]


ARRANGEMENTS: dict[str, Callable[[], list[pl.Callback]]] = {
    "unit scale": lambda: [UnitScaleCallback()],
    "unit scale, captured": lambda: [UnitScaleCallback(), Capturing()],
    "monitor": lambda: [ScaleMonitor(every_n_steps=2)],
    "both": both,
    "both, reversed": lambda: both()[::-1],
    "both, captured": lambda: [*both(), Capturing()],
}
# The first tier has both together.
ARRANGED = pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=[] if how == "both" else [pytest.mark.slow]) for how in ARRANGEMENTS],
)
# Units of matmuls as they run, and in the second tier units in captured steps.
BOTH_WAYS = pytest.mark.parametrize(
    "captured",
    [
        pytest.param({}, id="dispatcher"),
        pytest.param({"remat": "min_cut"}, id="captured", marks=pytest.mark.slow),
    ],
)


def unit_scale_of(callbacks: Sequence[pl.Callback]) -> UnitScaleCallback:
    return next(one for one in callbacks if isinstance(one, UnitScaleCallback))


def monitor_of(callbacks: Sequence[pl.Callback]) -> ScaleMonitor:
    return next(one for one in callbacks if isinstance(one, ScaleMonitor))


class Rows(Dataset[Any]):
    """Fixed random rows: ``make(generator)`` is one sample."""

    def __init__(self, length: int, make: Callable[[torch.Generator], Any]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.rows = [make(generator) for _ in range(length)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def pair(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Six numbers, much smaller than 1, and two to predict."""
    x = torch.randn(6, generator=generator)
    return x * 0.01, torch.stack([x.sum(), x.prod()])


def loader(
    length: int = 16,
    batch_size: int = 4,
    make: Callable[[torch.Generator], Any] = pair,
    **options: Any,
) -> DataLoader[Any]:
    return DataLoader(Rows(length, make), batch_size=batch_size, **options)


class MemoryLogger(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name = "memory"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def of_the_user(self) -> list[tuple[int | None, dict[str, float]]]:
        """Rows without those that this package wrote."""
        return [row for row in self.rows if not all(k.startswith("scales/") for k in row[1])]


@dataclass
class Run:
    """Everything that a training leaves behind."""

    trainer: pl.Trainer
    module: pl.LightningModule
    outputs: list[Any]
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    logged: list[Any] = field(default_factory=list)
    random_states: list[Any] = field(default_factory=list)
    returned: Any = None

    def compared(self) -> tuple[Any, ...]:
        return (
            sorted(self.module.__dict__),
            self.outputs,
            self.weights,
            self.optimizers,
            self.metrics,
            self.logged,
            self.random_states,
            self.returned,
        )


class Capturing(StepsCallback):
    """Has the steps captured, and does nothing to them."""

    def captures_steps(self, trainer: pl.Trainer) -> bool:
        return True


class Recorder(pl.Callback):
    """Keeps what every step returned."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.outputs.append(_copied(outputs))

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self.outputs.append(_copied(outputs))

    on_test_batch_end = on_validation_batch_end


def run(
    make_module: Callable[[], pl.LightningModule],
    callbacks: Sequence[pl.Callback] = (),
    *,
    data: Any = None,
    entry: str = "fit",
    entry_options: dict[str, Any] | None = None,
    others: Callable[[], list[pl.Callback]] = list,
    **options: Any,
) -> Run:
    """One entry point of a seeded Trainer: ``fit``, ``validate``, ``test`` or ``predict``."""
    pl.seed_everything(11, verbose=False)
    module, recorder, memory = make_module(), Recorder(), MemoryLogger()
    folder = tempfile.mkdtemp(dir=".")
    options = {**QUIET, "logger": memory, "max_steps": 6, "default_root_dir": folder, **options}
    if options.get("barebones"):
        options = {k: v for k, v in options.items() if k not in BAREBONES_REFUSES}
    trainer = pl.Trainer(callbacks=[*callbacks, recorder, *others()], **options)
    given = loader() if data is None else data()
    returned = getattr(trainer, entry)(module, given, **(entry_options or {}))
    result = Run(trainer, module, recorder.outputs)
    result.weights = _copied(dict(module.state_dict()))
    result.optimizers = [_copied(one.state_dict()) for one in trainer.optimizers]
    metrics = trainer.callback_metrics.items()
    result.metrics = {k: value for k, value in metrics if not k.startswith("scales/")}
    result.logged = _without_clock(memory.of_the_user)
    result.random_states = [
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    ]
    result.returned = returned
    return result


BAREBONES_REFUSES = {"logger", "log_every_n_steps", "num_sanity_val_steps", "enable_checkpointing"}
BAREBONES_REFUSES |= {"enable_progress_bar", "enable_model_summary"}


def assert_same_run(
    make_module: Callable[[], pl.LightningModule],
    make_callbacks: Callable[[], list[pl.Callback]] = both,
    **options: Any,
) -> tuple[Run, list[pl.Callback]]:
    """A run with the callbacks is the run without them, bit for bit; returns the former."""
    plain = run(make_module, **options)
    callbacks = make_callbacks()
    with_them = run(make_module, callbacks, **options)
    assert_same_bits(with_them.compared(), plain.compared())
    return with_them, callbacks


def matmuls_run(callbacks: Sequence[pl.Callback]) -> int:
    """How many tensors have units: proof that the step was rewritten and not just left alone."""
    return len(unit_scale_of(callbacks).gauge)


def snapshots(callbacks: Sequence[pl.Callback]) -> Iterator[Any]:
    return iter(monitor_of(callbacks).snapshots)


def _copied(value: Any) -> Any:
    return tree_map(lambda one: one.detach().clone() if isinstance(one, Tensor) else one, value)


def _without_clock(rows: list[Any]) -> list[Any]:
    """Logged rows as tensors, whose bits can be compared even where they are NaN."""
    return [
        (step, {k: torch.tensor(v, dtype=torch.float64) for k, v in row.items() if "time" not in k})
        for step, row in rows
    ]

"""Modes and options of the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from tests.callbacks.modules import Evaluated, Regression, adamw
from tests.callbacks.runs import (
    ARRANGEMENTS,
    BOTH_WAYS,
    QUIET,
    assert_same_run,
    both,
    loader,
    monitor_of,
    run,
    unit_scale_of,
)
from tests.helpers import assert_same_bits

WITH_VALIDATION = {"val_dataloaders": loader(6)}


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize(
    "options",
    [
        {"overfit_batches": 2, "max_steps": 6},
        {"limit_train_batches": 0.5, "max_epochs": 2, "max_steps": -1},
        {"barebones": True},
        {"detect_anomaly": True},
        {"profiler": "simple"},
        {"inference_mode": False, "num_sanity_val_steps": 1},
        {"deterministic": True},
        {"reload_dataloaders_every_n_epochs": 1},
        {"max_time": "00:01:00:00"},
        {"min_epochs": 2, "max_epochs": 3, "max_steps": -1},
        {"enable_progress_bar": True, "enable_model_summary": True},
        {"limit_val_batches": 0},
        {"devices": "auto", "accelerator": "auto"},
    ],
    ids=lambda options: ",".join(options),
)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.filterwarnings("ignore:You are overriding")
@pytest.mark.filterwarnings("ignore:.*barebones")
def test_trainer_options_are_bit_identical(options: dict[str, Any]) -> None:
    assert_same_run(Evaluated, entry_options=WITH_VALIDATION, **options)


@pytest.mark.parametrize("fast", [True, 3])
def test_fast_dev_run(fast: Any) -> None:
    _, callbacks = assert_same_run(Evaluated, fast_dev_run=fast, entry_options=WITH_VALIDATION)
    assert len(unit_scale_of(callbacks).gauge) >= 4
    assert monitor_of(callbacks).snapshots


@BOTH_WAYS
@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_evaluation_without_fit_has_units(entry: str, captured: dict[str, Any]) -> None:
    _, callbacks = assert_same_run(
        Evaluated,
        lambda: [UnitScaleCallback(**captured), ScaleMonitor()],
        entry=entry,
        data=lambda: loader(10),
    )
    # A forward pass shows forward units only.
    assert unit_scale_of(callbacks).gauge.pair("first.linear:input").log2_sigma < -4
    assert not any(pair.log2_gamma for pair in unit_scale_of(callbacks).gauge.values())
    assert not monitor_of(callbacks).snapshots


def test_evaluation_without_a_predict_step_or_with_several_loaders() -> None:
    class Several(Evaluated):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log(f"val_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    found, _ = assert_same_run(Several, entry="validate", data=lambda: [loader(8), loader(6)])
    assert {"val_0", "val_1"} <= set(found.metrics)


def test_module_that_only_has_forward_can_predict() -> None:
    class Forward(Regression):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch[0])

    found, callbacks = assert_same_run(Forward, entry="predict")
    assert len(found.returned) == 4
    assert len(unit_scale_of(callbacks).gauge) >= 2


def _fitted(callbacks: list[pl.Callback], *, again: bool, **options: Any) -> Any:
    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(callbacks=callbacks, max_epochs=1, **{**QUIET, **options})
    module = Evaluated(adamw)
    trainer.fit(module, loader(), loader(4))
    trainer.test(module, loader(4), verbose=False)
    second = module if again else Evaluated(adamw)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, loader(24), loader(4))
    metrics = trainer.validate(second, loader(8), verbose=False)
    predictions = trainer.predict(second, loader(8))
    third = pl.Trainer(callbacks=callbacks, max_epochs=1, **QUIET)
    third.fit(second, loader(8), loader(4))
    return dict(module.state_dict()), dict(second.state_dict()), metrics, predictions


@pytest.mark.slow_cases
@pytest.mark.parametrize("how", ["both", "both, captured", "both, reversed"])
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger")
def test_several_runs_with_the_same_callbacks(again: bool, how: str) -> None:
    expected = _fitted([], again=again)
    callbacks = ARRANGEMENTS[how]()
    assert_same_bits(_fitted(callbacks, again=again), expected)
    steps = [one.step for one in monitor_of(callbacks).snapshots]
    assert steps[:3] == [0, 1, 3]
    assert len(steps) > 3


def test_data_module() -> None:
    class Data(pl.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.rows = loader(12)

        def train_dataloader(self) -> Any:
            return self.rows

        val_dataloader = train_dataloader

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]

    assert_same_run(Evaluated, data=Data)


def test_no_loader_for_validation() -> None:
    with pytest.warns(UserWarning, match="have no `val_dataloader`"):
        assert_same_run(Evaluated, max_steps=2)


def test_double_as_the_default_type() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert_same_run(lambda: Regression(adamw).double(), data=lambda: loader(collate_fn=_double))
    finally:
        torch.set_default_dtype(torch.float32)


def _double(samples: list[Any]) -> Any:
    return [torch.stack(one).double() for one in zip(*samples, strict=True)]


def test_combined_loader() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch["a"]) + self.loss(batch["b"])

    assert_same_run(
        lambda: type("Combined", (Regression,), {"training_step": step})(),
        data=lambda: {"a": loader(16), "b": loader(8)},
    )


@pytest.mark.parametrize("how", ["both", "both, reversed"])
def test_several_loggers_are_bit_identical(tmp_path: Path, how: str) -> None:
    loggers = [TensorBoardLogger(tmp_path, name="board"), CSVLogger(tmp_path, name="csv")]
    callbacks = ARRANGEMENTS[how]()
    found = run(Evaluated, callbacks, entry_options=WITH_VALIDATION, logger=loggers)
    plain = run(Evaluated, entry_options=WITH_VALIDATION, logger=False)
    assert_same_bits(found.compared(), plain.compared())


def _lr_find(callbacks: list[pl.Callback]) -> Any:
    pl.seed_everything(3, verbose=False)

    def configure(module: Any) -> Any:
        return torch.optim.SGD(module.parameters(), lr=module.lr)

    module = Evaluated(configure)
    module.lr = 0.1
    trainer = pl.Trainer(callbacks=callbacks, max_epochs=1, **QUIET)
    found = Tuner(trainer).lr_find(module, loader(40), num_training=20)
    trainer.fit(module, loader())
    return found.results, module.lr, dict(module.state_dict())


@pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_learning_rate_finder() -> None:
    assert_same_bits(_lr_find(both()), _lr_find([]))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_learning_rate_finder_as_a_callback() -> None:
    def make() -> Regression:
        module = Regression(lambda one: torch.optim.SGD(one.parameters(), lr=one.lr))
        module.lr = 0.1
        return module

    assert_same_run(
        make,
        others=lambda: [LearningRateFinder(num_training_steps=10)],
        data=lambda: loader(60),
        enable_checkpointing=True,
        max_epochs=1,
        max_steps=-1,
    )


def _batch_size(callbacks: list[pl.Callback]) -> Any:
    class Data(pl.LightningDataModule):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return loader(64, self.batch_size)

    pl.seed_everything(3, verbose=False)
    module, data = Regression(), Data()
    trainer = pl.Trainer(callbacks=callbacks, max_epochs=1, **QUIET)
    found = Tuner(trainer).scale_batch_size(module, datamodule=data, max_trials=3)
    trainer.fit(module, datamodule=data)
    return found, dict(module.state_dict())


@pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger")
def test_batch_size_finder() -> None:
    assert_same_bits(_batch_size(both()), _batch_size([]))

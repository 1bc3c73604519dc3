"""This package's callbacks together with Lightning's own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from torch import nn

from lightning_unitscale import UnitScaleCallback
from tests.callbacks.modules import Evaluated, Regression, adamw
from tests.callbacks.runs import (
    ARRANGEMENTS,
    Capturing,
    assert_same_run,
    loader,
    run,
    unit_scale_of,
)
from tests.helpers import assert_same_bits


class Prefixed(Regression):
    """A module with a backbone, which ``BackboneFinetuning`` requires."""

    def __init__(self) -> None:
        super().__init__(lambda one: torch.optim.SGD(filter(_trains, one.parameters()), lr=0.1))
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: Any) -> Any:
        return super().forward(self.backbone(x))


def _trains(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _finetuning() -> pl.Callback:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)


OTHERS: dict[str, Any] = {
    "checkpoint": lambda: [
        ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True),
        ModelCheckpoint(every_n_train_steps=2, filename="often-{step}", save_top_k=-1),
    ],
    "early stopping": lambda: [EarlyStopping("val_loss", patience=1, min_delta=100.0)],
    "learning rate": lambda: [LearningRateMonitor(log_momentum=True), ModelSummary(2)],
    "accumulation": lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 3: 3})],
    "SWA": lambda: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)],
    "EMA": lambda: [EMAWeightAveraging(decay=0.9)],
    "averaging": lambda: [WeightAveraging(use_buffers=True)],
    "others": lambda: [
        Timer(),
        LambdaCallback(on_train_batch_end=lambda *_: None),
    ],
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("how", ["both", "both, captured"])
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_lightning_callbacks_are_bit_identical(name: str, how: str) -> None:
    found, callbacks = assert_same_run(
        lambda: Evaluated(adamw) if name != "SWA" else Evaluated(),
        ARRANGEMENTS[how],
        others=OTHERS[name],
        max_epochs=4,
        max_steps=-1,
        entry_options={"val_dataloaders": loader(6)},
        enable_checkpointing=True,
        data=lambda: loader(10),
    )
    assert len(unit_scale_of(callbacks).gauge) >= 4
    if name == "early stopping":
        assert found.trainer.current_epoch == 2


@pytest.mark.parametrize("how", ["both", "both, captured"])
def test_backbone_finetuning_is_bit_identical(how: str) -> None:
    assert_same_run(
        Prefixed,
        ARRANGEMENTS[how],
        others=lambda: [_finetuning()],
        max_epochs=3,
        max_steps=-1,
        data=lambda: loader(8),
    )


@pytest.mark.parametrize("is_first", [True, False])
def test_callback_that_wraps_training_step(is_first: bool) -> None:
    class Wrapping(pl.Callback):
        """Counts calls of the step, put on the instance before or after ours."""

        def __init__(self) -> None:
            self.calls = 0

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            own = pl_module.training_step

            def counted(*args: Any) -> Any:
                self.calls += 1
                return own(*args)

            pl_module.training_step = counted

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            del pl_module.training_step

    plain = run(Regression)
    wrapping, ours = Wrapping(), UnitScaleCallback()
    found = run(Regression, [wrapping, ours] if is_first else [ours, wrapping])
    assert_same_bits(found.compared(), plain.compared())
    assert len(ours.gauge) >= 4
    assert wrapping.calls == 6


def test_captured_steps_have_same_units_and_coverage() -> None:
    """Matmuls have the same names and units then."""
    _, dispatched = assert_same_run(Regression, lambda: [UnitScaleCallback()])
    _, captured = assert_same_run(Regression, lambda: [UnitScaleCallback(), Capturing()])
    assert unit_scale_of(dispatched).coverage.counts
    assert unit_scale_of(captured).coverage == unit_scale_of(dispatched).coverage
    assert unit_scale_of(captured).gauge == unit_scale_of(dispatched).gauge

"""The monitor reports violations in a training, and acts on them."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.callbacks import ScaleViolation
from lightning_unitscale.formats import FP16
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.scales.violations import default_thresholds, format_violations
from lightning_unitscale.tensorboard.history import read_run
from lightning_unitscale.tensorboard.run_report import write_report
from tests.callbacks.injected import (
    FAULT_STEP,
    NUM_STEPS,
    Stack,
    nan_bias,
    overflow,
    overflow_relu,
    train,
)
from tests.callbacks.modules import Regression
from tests.callbacks.runs import loader, run


def test_healthy_run_has_no_alerts() -> None:
    monitor = ScaleMonitor(every_n_steps=2, on_violation="raise")
    trainer, warned = train(monitor)
    assert trainer.global_step == NUM_STEPS
    assert monitor.alerts == () and warned == []


class Offset(Stack):
    """A loss beyond FP16, whose gradients are far inside."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 1e6


@pytest.mark.parametrize("accumulate", [1, 4])
def test_large_loss_is_not_a_violation(accumulate: int) -> None:
    monitor = ScaleMonitor(every_n_steps=1)
    options = {"max_steps": 3, "accumulate_grad_batches": accumulate}
    run(Offset, [monitor], data=lambda: loader(192), **options)
    assert len(monitor.snapshots) == 3
    assert monitor.snapshots[0].statistics("add").abs_max > 1e6  # type: ignore[union-attr]
    assert monitor.alerts == ()


@pytest.mark.slow
def test_overflow_alert_has_tensor_and_step(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, "run")
    monitor = ScaleMonitor(every_n_steps=5, on_violation="warn")
    # Two steps later the loss is NaN.
    _, warned = train(monitor, overflow_relu, logger=logger, max_steps=FAULT_STEP + 2)
    first, second, *_ = monitor.alerts
    for one, name in ((first, "blocks.1.up.weight"), (second, "blocks.1.relu")):
        assert (one.step, one.tensor) == (FAULT_STEP, name)
        assert (one.kind, one.format, one.direction) == ("overflow", "E4M3FN", "forward")
    assert (second.module, second.op) == ("blocks.1", "relu")
    snapshot = next(item for item in monitor.snapshots if item.step == FAULT_STEP)
    statistics = snapshot.statistics(second.tensor)
    assert statistics is not None
    assert second.value == statistics.fraction("E4M3FN", "overflow") > 0.25
    # No matmul reads the result of the layer, which is not put into a format.
    made = snapshot.statistics("blocks.1.up.linear")
    assert made is not None
    assert made.fraction("E4M3FN", "overflow") > 0.5
    (cause,) = second.inputs
    assert cause.tensor == "blocks.1.up.linear"
    assert cause.log2_rms == pytest.approx(made.log2_rms)
    assert 2**cause.log2_amax == pytest.approx(made.abs_max)
    # Said once, although it lasted for two samples.
    told = [(one.kind, one.tensor, one.direction, one.format) for one in monitor.alerts]
    assert len(set(told)) == len(told)
    message = warned[0]
    lost = r"\S+ % of the elements overflow E4M3FN \(allowed: 0\.1 %\)"
    assert re.search(rf"step 10: blocks\.1\.up\.weight: {lost}", message)
    assert f"blocks.1.up.linear (RMS 2^{made.log2_rms:.1f}, max" in message
    written = read_run(logger.log_dir).alerts()
    assert [str(one) for one in written] == [str(one) for one in monitor.alerts]
    assert written == monitor.alerts
    report = write_report([logger.log_dir], tmp_path / "report")
    assert f"{len(told)} alerts:\nstep 10: blocks.1.up.weight" in next(iter(report.tables.values()))
    assert "step 10: blocks.1.up.weight" in report.page.read_text()


def test_nan_alert_has_tensor_and_step() -> None:
    monitor = ScaleMonitor(every_n_steps=5)
    _, warned = train(monitor, nan_bias)
    (alert,) = monitor.alerts
    assert (alert.kind, alert.step, alert.value) == ("nonfinite", FAULT_STEP, 1.0)
    assert (alert.tensor, alert.direction) == ("blocks.1.down.bias", "forward")
    (message,) = warned
    assert "blocks.1.down.bias" in message and "1 NaN among 16 elements" in message


def test_nan_in_gradient_is_attributed_to_last_tensor() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * torch.nan

    class Module(Regression):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(Broken.apply(torch.sin(self.first(x))))

    monitor = ScaleMonitor(every_n_steps=1, on_violation="raise")
    with pytest.raises(ScaleViolation) as raised:
        run(Module, [monitor], max_steps=2)
    assert (raised.value.step, raised.value.direction) == (0, "backward")
    assert raised.value.tensor == "sin"
    # A gradient is made from the gradient of what the tensor went into.
    assert len(raised.value.alert.inputs) == 1


def test_nan_loss_between_samples_samples_next_step() -> None:
    monitor = ScaleMonitor(every_n_steps=7, on_violation="warn")
    train(monitor, nan_bias)
    assert [one.step for one in monitor.snapshots] == [0, 1, 7, FAULT_STEP + 1, 14, NUM_STEPS - 1]
    loss, first = monitor.alerts
    assert (loss.kind, loss.step) == ("loss", FAULT_STEP)
    assert (first.kind, first.step) == ("nonfinite", FAULT_STEP + 1)


def test_nan_loss_at_last_unsampled_step_is_reported() -> None:
    monitor = ScaleMonitor(every_n_steps=7, on_violation="warn")

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 19

    _, warned = train(monitor, nan_bias, at=18, others=[Stop()])
    assert [(one.kind, one.step) for one in monitor.alerts] == [("loss", 18)]
    assert "step 18: loss" in warned[0]


def test_stop_ends_training_and_saves_checkpoint(tmp_path: Path) -> None:
    monitor = ScaleMonitor(every_n_steps=5, on_violation="stop")
    checkpoint = ModelCheckpoint(tmp_path)
    trainer, warned = train(monitor, overflow, others=[checkpoint], enable_checkpointing=True)
    assert trainer.should_stop and trainer.global_step == FAULT_STEP + 1
    assert len(warned) == 1
    (path,) = tmp_path.glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == FAULT_STEP + 1
    assert not hasattr(trainer.lightning_module.training_step, "__wrapped__")


def test_raised_violation_has_step_and_tensor(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, "run")
    monitor = ScaleMonitor(every_n_steps=1, on_violation="raise")
    with pytest.raises(ScaleViolation, match=r"step 10: blocks\.1\.down\.bias") as raised:
        train(monitor, nan_bias, logger=logger)
    error = raised.value
    assert (error.step, error.tensor, error.module) == (
        FAULT_STEP,
        "blocks.1.down.bias",
        "blocks.1.down",
    )
    assert error.alerts == monitor.alerts and error.alert is error.alerts[0]
    again = pickle.loads(pickle.dumps(error))
    assert again.alerts == error.alerts and str(again) == str(error)
    # The run can be read.
    found = read_run(logger.log_dir)
    assert found.alerts() == monitor.alerts
    assert found.history("forward").steps[-1] == FAULT_STEP


def test_no_action_records_alerts_without_warning() -> None:
    monitor = ScaleMonitor(every_n_steps=5, on_violation=None)
    _, warned = train(monitor, nan_bias)
    assert warned == [] and len(monitor.alerts) == 1
    # Without a reaction, only sampled steps are checked.
    monitor = ScaleMonitor(every_n_steps=7, on_violation=None)
    train(monitor, nan_bias)
    assert [one.step for one in monitor.snapshots] == [0, 1, 7, 14, NUM_STEPS - 1]


def test_thresholds_of_custom_format() -> None:
    formats = {"E3M2": {"flushed": 0.2}, "FP16": 1.0}
    monitor = ScaleMonitor(every_n_steps=1, on_violation="warn", thresholds=formats)
    _, (message,) = train(monitor, max_steps=1)
    assert all((one.format, one.kind) == ("E3M2", "flushed") for one in monitor.alerts)
    snapshot = monitor.snapshots[0]
    expected = {
        (name, direction)
        for direction in ("forward", "backward")
        for name, is_read in zip(snapshot.names, snapshot.read_by_matmuls(direction), strict=True)
        if is_read
        and (found := snapshot.statistics(name, direction, stored=True)) is not None
        and found.fraction("E3M2", "flushed") > 0.2
    }
    assert {(one.tensor, one.direction) for one in monitor.alerts} == expected
    assert len(expected) > 2
    if len(expected) > 8:
        assert message.endswith(f"and {len(expected) - 8} more")


def test_infinite_mask_is_not_a_violation() -> None:
    class Masked(Regression):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            padding = torch.zeros_like(y)
            padding[:, 5:] = -torch.inf
            shares = torch.softmax(y.masked_fill(y > 10, -torch.inf) + padding, dim=-1)
            return self.second(shares)

    monitor = ScaleMonitor(every_n_steps=1, on_violation="raise", trend_steps=None)
    run(Masked, [monitor], max_steps=3)
    infinite = [
        name
        for name in monitor.snapshots[0].names
        if monitor.snapshots[0].statistics(name).infs  # type: ignore[union-attr]
    ]
    assert infinite and not monitor.alerts


def test_infinite_gradients_with_loss_scaler_are_ignored() -> None:
    def module() -> pl.LightningModule:
        return Regression(norm=False)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    monitor = ScaleMonitor(every_n_steps=1, on_violation="raise", thresholds={})
    run(module, [monitor], plugins=plugin, max_steps=1)
    backward = monitor.snapshots[0].column("infs", "backward")
    assert (backward > 0).any() and not monitor.alerts


_NO_OVERFLOW = {"E4M3FN": {"overflow": 0.0}}


@pytest.mark.slow
def test_thresholds_apply_to_stored_values() -> None:
    class Large(Regression):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x * 2.0**20) * 2.0**-20)

    plain = ScaleMonitor(every_n_steps=1, on_violation=None, thresholds=_NO_OVERFLOW)
    scaled = ScaleMonitor(every_n_steps=1, on_violation=None, thresholds=_NO_OVERFLOW)
    run(Large, [plain], max_steps=1)
    run(Large, [UnitScaleCallback(remat="min_cut"), scaled], max_steps=1)
    name = "mul"
    assert name in {one.tensor for one in plain.alerts}
    assert name not in {one.tensor for one in scaled.alerts}


@pytest.mark.slow
def test_format_thresholds_skip_steps_that_measure_units() -> None:
    class Manual(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x * 2.0**20) * 2.0**-20)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.optimizers().step()
            self.optimizers().zero_grad()

    def found(*callbacks: pl.Callback) -> dict[str, int]:
        monitor = ScaleMonitor(every_n_steps=1, on_violation=None, thresholds=_NO_OVERFLOW)
        run(Manual, [*callbacks, monitor], max_steps=3)
        return {one.tensor: one.step for one in reversed(monitor.alerts)}

    assert found()["mul"] == 0
    later = found(UnitScaleCallback(remat="min_cut"))
    assert "mul" not in later
    assert 0 not in later.values()


def test_accumulated_batches_are_one_sample() -> None:
    monitor = ScaleMonitor(every_n_steps=7, on_violation="warn")
    train(monitor, nan_bias, at=2, accumulate_grad_batches=2, max_steps=5)
    loss, first = monitor.alerts
    assert (loss.step, first.step) == (2, 3)
    taken = monitor.snapshots[2]
    assert taken.statistics("first.linear").numel == 2 * 4 * 16  # type: ignore[union-attr]


def test_second_fit_keeps_alerts_and_reports_again() -> None:
    monitor = ScaleMonitor(every_n_steps=1, on_violation="warn")
    for number in (1, 2):
        train(monitor, nan_bias, at=1, max_steps=3)
        assert [one.step for one in monitor.alerts] == [1] * number


def test_raised_violation_restores_module() -> None:
    monitor = ScaleMonitor(every_n_steps=1, on_violation="raise")
    module = Stack(nan_bias, 0)
    trainer = pl.Trainer(
        callbacks=[monitor], logger=False, max_steps=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        default_root_dir=".",
    )  # fmt: skip
    with pytest.warns(UserWarning), pytest.raises(ScaleViolation):
        trainer.fit(module, loader(4))
    assert "training_step" not in module.__dict__


def test_function_is_called_with_new_alerts() -> None:
    calls: list[tuple[Any, ...]] = []
    monitor = ScaleMonitor(every_n_steps=5, on_violation=calls.append)
    trainer, warned = train(monitor, overflow)
    assert trainer.global_step == NUM_STEPS and warned == []
    assert all(type(alerts) is tuple and alerts for alerts in calls)
    assert tuple(alert for alerts in calls for alert in alerts) == monitor.alerts
    assert calls[0][0].tensor == "blocks.1.up.weight"


def test_error_in_function_ends_training(tmp_path: Path) -> None:
    class Mine(Exception):
        pass

    def refuse(alerts: Any) -> None:
        raise Mine(alerts[0].tensor)

    logger = TensorBoardLogger(tmp_path, "run")
    monitor = ScaleMonitor(every_n_steps=5, on_violation=refuse)
    with pytest.raises(Mine, match=r"blocks\.1\.up\.weight"):
        train(monitor, overflow, logger=logger)
    found = read_run(logger.log_dir)
    assert found.alerts() == monitor.alerts
    assert found.history("forward").steps[-1] == FAULT_STEP


def test_function_without_argument_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"^on_violation=.*: it cannot be called with one argument"):
        ScaleMonitor(on_violation=lambda: None)  # type: ignore[arg-type]
    ScaleMonitor(on_violation=print)


def test_tensor_without_unit_has_no_format_alerts() -> None:
    """It is all zero when first met, and has a unit one step after it is not."""
    snapshot = ScaleSnapshot(
        0,
        ("a", "b", "c"),
        *(np.stack([_OVERFLOWING] * 3) for _ in range(2)),
        _LAYOUT,
        operands=(True, True, False),
        matmuls=(False, True, True),
        lacking_units=((True, True), (False, True), (False, False)),
    )
    found = format_violations(snapshot, default_thresholds(_LAYOUT.formats))
    assert [(one.tensor, one.direction) for one in found] == [("b", "forward"), ("c", "backward")]


_LAYOUT = RowLayout((FP16,), histogram=False)
_OVERFLOWING = statistics_row(torch.full((8,), 1e6), _LAYOUT).double().numpy()

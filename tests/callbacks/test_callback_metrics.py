"""Scales in ``trainer.callback_metrics``, for callbacks of Lightning that monitor a metric."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale import ScaleMonitor
from tests.callbacks.runs import QUIET, loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger"),
    pytest.mark.filterwarnings("ignore:.*(barebones|num_workers|workers)"),
]
PACKAGES = pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
GROWS_AT = 6


def _module(package: Any) -> Any:
    class Growing(package.LightningModule):  # type: ignore[misc]
        """A module whose weights leave E4M3 at a step."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == GROWS_AT:
                with torch.no_grad():
                    self.layer.weight.mul_(2.0**13)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return F.mse_loss(self.layer(x), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-12)

    return Growing()


def _fit(package: Any, callbacks: list[Any], **options: Any) -> Any:
    options = {**QUIET, "max_epochs": 5, "default_root_dir": ".", **options}
    trainer = package.Trainer(callbacks=callbacks, **options)
    trainer.fit(_module(package), loader(), loader(4))
    return trainer


class _Seen:
    """Makes a callback that keeps the metrics after each batch."""

    def __new__(cls, package: Any) -> Any:
        class Seen(package.Callback):  # type: ignore[misc]
            def __init__(self) -> None:
                self.metrics: list[dict[str, float]] = []

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                found = trainer.callback_metrics
                self.metrics.append({name: float(value) for name, value in found.items()})

        return Seen()


@PACKAGES
def test_scales_are_in_callback_metrics(name: str) -> None:
    package = import_module(name)
    monitor, seen = ScaleMonitor(every_n_steps=3, on_violation=None), _Seen(package)
    trainer = _fit(package, [monitor, seen], max_steps=10)
    assert [snapshot.step for snapshot in monitor.snapshots] == [0, 1, 3, 6, 9]
    # Steps that are not sampled keep the last numbers, over epochs of four batches.
    sampled = [0, 1, 1, 3, 3, 3, 6, 6, 6, 9]
    by_step = {snapshot.step: snapshot for snapshot in monitor.snapshots}
    for step, metrics in zip(sampled, seen.metrics, strict=True):
        snapshot = by_step[step]
        weight = snapshot.statistics("layer.weight")
        assert weight is not None
        rms = [
            abs(value)
            for direction in ("forward", "backward")
            for value, read in zip(
                snapshot.log2_rms(direction), snapshot.read_by_matmuls(direction), strict=True
            )
            if read
        ]
        assert metrics["scales/log2_rms/worst"] == pytest.approx(max(rms))
        overflow = weight.fraction("E4M3FN", "overflow")
        assert metrics["scales/E4M3FN/overflow_forward"] == pytest.approx(overflow)
        assert {f"scales/FP16/{kind}_backward" for kind in ("overflow", "underflow")} <= set(
            metrics
        )
        assert (metrics["scales/num_violations"] > 0) == (step >= GROWS_AT)
    assert trainer.logged_metrics == {}


@PACKAGES
def test_early_stopping(name: str) -> None:
    package = import_module(name)
    stopping = package.callbacks.EarlyStopping(
        "scales/num_violations", mode="min", patience=1, check_on_train_epoch_end=True
    )
    monitor = ScaleMonitor(every_n_steps=2, on_violation=None)
    trainer = _fit(package, [stopping, monitor])
    # No violation in the first epoch, some at the end of the second, which has the step.
    assert trainer.current_epoch == 1 + 1
    assert stopping.stopped_epoch == 1


@PACKAGES
def test_model_checkpoint_monitors_scales(name: str, tmp_path: Path) -> None:
    package = import_module(name)
    checkpoint = package.callbacks.ModelCheckpoint(
        tmp_path,
        monitor="scales/E4M3FN/overflow_forward",
        mode="min",
        every_n_train_steps=2,
        save_top_k=1,
    )
    monitor = ScaleMonitor(every_n_steps=1, on_violation=None)
    _fit(package, [checkpoint, monitor], max_steps=12, enable_checkpointing=True)
    assert float(checkpoint.best_model_score) == 0.0
    saved = torch.load(checkpoint.best_model_path, weights_only=True)
    assert saved["global_step"] <= GROWS_AT


@PACKAGES
@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"barebones": True}], ids=str)
def test_modes_without_metrics(name: str, options: dict[str, Any]) -> None:
    package = import_module(name)
    kept = ("accelerator", "devices") if "barebones" in options else tuple(QUIET)
    trainer = package.Trainer(
        callbacks=[ScaleMonitor()],
        max_steps=2,
        **{key: QUIET[key] for key in kept},
        **options,
    )
    trainer.fit(_module(package), loader(), loader(4))
    has_metrics = any(key.startswith("scales/") for key in trainer.callback_metrics)
    assert has_metrics == ("fast_dev_run" in options)

"""Modules, Trainers and command lines of ``pytorch_lightning``, the package of the older name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback
from tests.helpers import assert_same_bits
from tests.loops.loops import Net, batches
from tests.loops.methods import METHODS

KINDS: dict[str, Any] = {
    "both": METHODS["both"],
    "everything": lambda: [UnitScaleCallback(remat="min_cut"), ScaleMonitor(every_n_steps=2)],
    "remat": lambda: [RematCallback(1.0)],
}


class Module(pl.LightningModule):
    """Logs, and evaluates."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.net = Net()
        self.net.dropout.p = 0.0  # a run that is resumed draws other numbers
        self.lr = lr
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
        return DataLoader(TensorDataset(x, y), batch_size=8)

    val_dataloader = train_dataloader


def fit(
    callbacks: list[Any], folder: Path, *, ckpt_path: Path | None = None, max_epochs: int = 2
) -> Any:
    pl.seed_everything(1, verbose=False)
    module = Module()
    trainer = pl.Trainer(
        max_epochs=max_epochs,
        callbacks=[*callbacks, pl.callbacks.ModelCheckpoint(folder / "saved", save_last=True)],
        logger=[TensorBoardLogger(folder, "board"), CSVLogger(folder, "csv")],
        accelerator="cpu",
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Data(), ckpt_path=ckpt_path, weights_only=False)
    metrics = trainer.callback_metrics.items()
    own = {name: value for name, value in metrics if not name.startswith("scales/")}
    return module.losses, module.state_dict(), own


@pytest.mark.slow_cases
@pytest.mark.parametrize("how", KINDS)
def test_callbacks_are_bit_identical(how: str, tmp_path: Path) -> None:
    callbacks = KINDS[how]()
    assert_same_bits(fit(callbacks, tmp_path / "with"), fit([], tmp_path / "without"))
    for callback in callbacks:
        if isinstance(callback, ScaleMonitor):
            assert {"net.up.linear", "net.down.linear", "cross_entropy"} <= set(
                callback.snapshots[0].names
            )
            events = EventAccumulator(str(tmp_path / "with" / "board" / "version_0")).Reload()
            assert any(tag.startswith("scales") for tag in events.Tags()["tensors"])
            metrics = (tmp_path / "with" / "csv" / "version_0" / "metrics.csv").read_text()
            assert "scales/FP16/overflow_forward" in metrics
    if how == "both":
        assert callbacks[0].coverage.num_matmuls == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_rule_based_run_resumes(tmp_path: Path) -> None:
    losses, weights, _ = fit([UnitScaleCallback("u-mup")], tmp_path / "whole")
    first, *_ = fit([UnitScaleCallback("u-mup")], tmp_path / "first", max_epochs=1)
    assert not torch.equal(first[0], fit([], tmp_path / "plain", max_epochs=1)[0][0])
    rest, again, _ = fit(
        [UnitScaleCallback("u-mup")],
        tmp_path / "rest",
        ckpt_path=tmp_path / "first" / "saved" / "last.ckpt",
    )
    assert_same_bits(([*first, *rest], again), (losses, weights))


@pytest.mark.slow
def test_lightning_cli_accepts_callbacks(tmp_path: Path) -> None:
    """The command line imports this package through a class path."""
    script = tmp_path / "run.py"
    script.write_text(
        "from pytorch_lightning.cli import LightningCLI\n"
        "from tests.loops.test_pytorch_lightning import Data, Module\n"
        "LightningCLI(Module, Data)\n"
    )
    command = [sys.executable, str(script), "fit", "--trainer.max_steps=3"]
    command += ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    command += ["--trainer.callbacks+=lightning_unitscale.UnitScaleCallback"]
    command += ["--trainer.callbacks+=lightning_unitscale.ScaleMonitor"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "training_step: 5 of 5 matmuls scaled" in done.stdout + done.stderr


def test_pipeline_strategy_is_an_error() -> None:
    """Its Trainer accepts only strategies of its own package, and reports this."""
    from lightning_unitscale import PipelineStrategy

    with pytest.raises(ValueError, match=r"pytorch_lightning\.strategies\.Strategy"):
        pl.Trainer(strategy=PipelineStrategy(num_microbatches=2))  # type: ignore[arg-type]

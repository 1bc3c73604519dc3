"""Longer trainings: ``python -m tests.pipeline.long_run FOLDER RANKS SCHEDULE CASE ...``.

Once per rank; with one rank it trains on one device without the strategy. ``CASE=CHECKPOINT`` goes
on from a checkpoint, and ``CASE@RANK:STEP`` ends a rank before a step as ``kill -9`` does. Every
rank writes what it computed to ``FOLDER/CASE-RANK.pt``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import quiet_rank
from tests.pipeline.pipeline_run import Groups, Recorder, _gpt, _points, _text

BATCH = 16
CHAIN_STEPS = 5
KILL_EPOCHS, KILL_EPOCH_STEPS = 5, 3


class Killed(pl.Callback):
    """Ends a rank as ``kill -9`` does, before a step of the training."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            (Path(trainer.default_root_dir) / "now").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Shown(pl.Callback):
    """Keeps the numbers beside the progress bar."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.numbers = dict(trainer.progress_bar_metrics)


def _chain_data() -> TensorDataset:
    """One epoch of as many steps as each run of the chain makes."""
    return TensorDataset(*_text()[: BATCH * CHAIN_STEPS])


def _kill_data() -> TensorDataset:
    return TensorDataset(*_points()[: BATCH * KILL_EPOCH_STEPS])


def _callbacks(folder: Path) -> dict[str, Any]:
    return {
        "callbacks": [
            EarlyStopping("val_loss", min_delta=0.02, patience=1),
            ModelCheckpoint(folder / "best", "{step}", monitor="val_loss", save_top_k=1),
            TQDMProgressBar(refresh_rate=1),
        ],
        "logger": TensorBoardLogger(folder, "logs", default_hp_metric=False),
        "log_every_n_steps": 1,
        "enable_checkpointing": True,
        "enable_progress_bar": True,
        "max_epochs": 20,
        # In the middle of an epoch of six steps.
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
    }


def _kill(folder: Path) -> dict[str, Any]:
    saving = ModelCheckpoint(folder, "epoch={epoch}", auto_insert_metric_name=False, save_top_k=-1)
    return {
        "callbacks": [saving],
        "enable_checkpointing": True,
        "max_epochs": KILL_EPOCHS,
    }


def _link(num_epochs: int) -> tuple[Any, Any, Any]:
    """A part of one training: an epoch, behind those that another run has made."""
    return _gpt, _chain_data, lambda folder: {"max_epochs": num_epochs, "gradient_clip_val": 0.5}


# Per case: the module, its data, and the Trainer's options for a folder.
CASES: dict[str, tuple[Any, Any, Any]] = {
    "many": (
        _gpt,
        _text,
        lambda folder: {
            "max_steps": 40,
            "gradient_clip_val": 0.5,
            "accumulate_grad_batches": 2,
        },
    ),
    "callbacks": (Groups, _points, _callbacks),
    **{f"chain{number}": _link(number) for number in (1, 2, 3, 4)},
    "killed": (Groups, _kill_data, _kill),
}


def train(folder: Path, num_ranks: int, schedule: str, given: str) -> None:
    """Train and write the results."""
    given, _, resume_from = given.partition("=")
    case, _, killed = given.partition("@")
    make_module, make_data, make_options = CASES[case]
    pl.seed_everything(4, workers=True, verbose=False)
    module, data = make_module(), make_data()
    recorder, shown = Recorder(), Shown()
    options = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        **make_options(folder),
    }
    callbacks = [recorder, shown, *options.pop("callbacks", ())]
    if killed:
        callbacks.append(Killed(*map(int, killed.split(":"))))
    strategy: Any = "auto"
    if num_ranks > 1:
        strategy = PipelineStrategy(
            schedule, num_microbatches=4, process_group_backend="gloo", timeout=60
        )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        callbacks=callbacks,
        limit_val_batches=2,
        use_distributed_sampler=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    loaders = DataLoader(data, BATCH), DataLoader(data, BATCH)
    trainer.fit(module, *loaders, ckpt_path=resume_from or None)
    weights = {name: one.clone() for name, one in module.state_dict().items()}
    trainer.save_checkpoint(folder / f"{case}.ckpt")
    best = trainer.checkpoint_callback
    found = {
        "losses": recorder.losses,
        "weights": weights,
        "metrics": dict(trainer.callback_metrics),
        "shown": shown.numbers,
        "step": trainer.global_step,
        "best": getattr(best, "best_model_path", None),
        "best_score": getattr(best, "best_model_score", None),
    }
    torch.save(found, folder / f"{case}-{trainer.global_rank}.pt")


def main(folder: Path, num_ranks: int, schedule: str, *cases: str) -> None:
    """Train all of the cases, one after the other."""
    quiet_rank()
    for one in cases:
        train(folder, num_ranks, schedule, one)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

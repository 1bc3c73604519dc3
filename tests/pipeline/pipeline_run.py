"""Trainings under PipelineStrategy: ``python -m tests.pipeline.pipeline_run FOLDER CASE ...``.

Run it once per rank, with Lightning's environment variables; with one rank it trains on one device
without the strategy. Every rank writes what it computed to ``FOLDER/CASE-RANK.pt``.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from examples.gpt import GPT
from lightning_unitscale.pipeline import PipelineRunner
from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import quiet_rank
from tests.pipeline.trainers import quiet_trainer

CONTEXT, STEPS = 16, 10


class Recorder(pl.Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def fit_and_save(
    folder: Path,
    case: str,
    trainer: pl.Trainer,
    recorder: Recorder,
    module: pl.LightningModule,
    *loaders: Any,
) -> None:
    """Train, and save losses, metrics, weights and warnings as ``FOLDER/CASE-RANK.pt``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, *loaders)
    found = {
        "losses": recorder.losses,
        "metrics": copy.copy(trainer.callback_metrics),
        "weights": {name: one.clone() for name, one in module.state_dict().items()},
        "warnings": [str(one.message) for one in caught],
    }
    torch.save(found, folder / f"{case}-{trainer.global_rank}.pt")


class Memory(pl.Callback):
    """Counts bytes: before the first step and after every step, and in every validation."""

    def __init__(self) -> None:
        self.parameters: list[int] = []
        self.gradients: list[int] = []
        self.optimizer: list[int] = []
        self.validated: list[int] = []
        self.reads: set[str] = set()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not self.parameters:
            self.parameters.append(_bytes(module.parameters()))

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.parameters.append(_bytes(module.parameters()))
        self.gradients.append(_bytes(one.grad for one in module.parameters()))
        states = [state for one in trainer.optimizers for state in one.state.values()]
        self.optimizer.append(_bytes(one for state in states for one in state.values()))
        for one in module.parameters():
            try:
                one.sum()
            except RuntimeError as error:
                self.reads.add(str(error).partition(": ")[2].partition(" of the pipeline")[0])

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step:
            self.validated.append(_bytes(module.parameters()))

    def found(self, trainer: Any, module: Any) -> dict[str, Any]:
        """All counts, and this rank's final optimizer state, for its own parameters."""
        owned = [one for each in trainer.optimizers for one in each.state]
        sizes = {"whole": _bytes(module.parameters()), "owned": _bytes(owned)}
        counts = ("parameters", "gradients", "optimizer", "validated", "reads")
        found = {name: vars(self)[name] for name in counts}
        return {**found, **sizes, "num_owned": len(owned)}


def _bytes(tensors: Any) -> int:
    storages = {id(one): one.untyped_storage().nbytes() for one in tensors if one is not None}
    return sum(storages.values())


class Ends(pl.Callback):
    """Ends the second rank before its third step: by an error, or as ``kill -9`` does."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 2:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("of the second rank")


class Redraws(pl.Callback):
    """Gives the second rank other weights than the first, after the strategy has been set up."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == 1:
            with torch.no_grad():
                for one in module.parameters():
                    one.mul_(-0.5)


class Groups(pl.LightningModule):
    """Two groups, a schedule of the learning rate, logged metrics, a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(8, 3)
        self.never = nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self.head(self.net(x))
        correct = (logits.argmax(-1) == y).float().mean()
        self.log_dict({"accuracy": correct, "epoch_accuracy": correct}, on_epoch=True)
        return {"loss": F.cross_entropy(logits, y), "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.head(self.net(x)), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.net.parameters(), "lr": 0.05},
            {"params": [*self.head.parameters(), *self.never.parameters()], "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Changing(Groups):
    """Uses another layer in every second epoch, from the second on."""

    odd = False

    def on_train_epoch_start(self) -> None:
        self.odd = bool(self.current_epoch % 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.net(x)
        if self.odd:
            hidden = hidden + self.never(hidden).tanh()
        loss = F.cross_entropy(self.head(hidden), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss


class Branching(Groups):
    """A step that reads its loss, prints it, and logs numbers and a metric object."""

    def __init__(self) -> None:
        super().__init__()
        self.measured = MulticlassAccuracy(3, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x * 2)
        loss = F.cross_entropy(logits, y)
        if loss.item() > 0:
            loss = 3 * loss
        print("the loss is", loss.item())
        self.log("number", loss.item(), on_epoch=True)
        self.log_dict({"accuracy": (logits.argmax(-1) == y).float().mean()}, prog_bar=True)
        self.measured(logits, y)
        self.log("measured", self.measured, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}


def _text() -> TensorDataset:
    data = torch.randint(256, (160, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(data[:, :-1], data[:, 1:])


def _points() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(96, 8, generator=generator)
    return TensorDataset(x, (x[:, :3]).argmax(-1))


def _few() -> TensorDataset:
    """Two batches of 16 and a smaller one of 8."""
    return TensorDataset(*_points()[:40])


def _gpt() -> pl.LightningModule:
    return GPT(width=16, depth=1, num_heads=2, context=CONTEXT, warmup_steps=2, decay_steps=40)


CASES: dict[str, dict[str, Any]] = {
    "gpt": {"module": _gpt, "data": _text, "clip": 0.5, "saves": True},
    "gpt-v": {"module": _gpt, "data": _text, "schedule": "ZBVZeroBubble", "clip": 0.5},
    "groups": {"module": Groups, "data": _points, "accumulate": 2, "clip": 0.01, "redraws": True},
    "gpt-kept": {"module": _gpt, "data": _text, "clip": 0.5, "free_unowned": False},
    "changes": {"module": Changing, "data": _few, "clip": 0.5},
    "branches": {"module": Branching, "data": _few, "clip": 0.5},
    "branches-v": {"module": Branching, "data": _few, "clip": 0.5, "schedule": "ZBVZeroBubble"},
    "bf16": {"module": Groups, "data": _points, "clip": 1.0, "precision": "bf16-mixed"},
    "killed": {"module": Groups, "data": _points, "clip": 1.0, "ends": "killed"},
    "raises": {"module": Groups, "data": _points, "clip": 1.0, "ends": "raises"},
    "resumed": {"module": _gpt, "data": _text, "clip": 0.5, "resume": "gpt", "steps": 2 * STEPS},
}


def train(folder: Path, case: str, num_ranks: int, resume_from: str) -> None:
    """Train and write the results."""
    options = CASES[case]
    pl.seed_everything(4, workers=True, verbose=False)
    module = options["module"]()
    if int(os.environ.get("LOCAL_RANK", "0")):
        # The strategy gives all ranks the first one's weights.
        with torch.no_grad():
            for one in module.parameters():
                one.add_(1.0)
    recorder, memory = Recorder(), Memory()
    saving = pl.callbacks.ModelCheckpoint(
        folder, f"{case}-ended", every_n_train_steps=1000, save_on_exception=True
    )
    ending = [Ends(options["ends"]), saving] if "ends" in options else []
    if options.get("saves"):
        # In the middle of the training, where most weights are on one rank alone.
        saving = pl.callbacks.ModelCheckpoint(
            folder, f"{case}-{{step}}", every_n_train_steps=STEPS // 2, save_top_k=-1
        )
        ending = [saving]
    if options.get("redraws"):
        ending = [Redraws()]
    strategy: Any = "auto"
    if num_ranks > 1:
        strategy = PipelineStrategy(
            options.get("schedule", "1F1B"),
            num_microbatches=4,
            free_unowned=options.get("free_unowned", True),
            process_group_backend="gloo",
            timeout=60,
        )
    trainer = quiet_trainer(
        folder,
        devices=num_ranks,
        precision=options.get("precision", "32-true"),
        strategy=strategy,
        max_steps=options.get("steps", STEPS),
        gradient_clip_val=options["clip"],
        accumulate_grad_batches=options.get("accumulate", 1),
        callbacks=[recorder, memory, *ending],
        val_check_interval=4,
        check_val_every_n_epoch=None,
        limit_val_batches=2,
        use_distributed_sampler=False,
        enable_checkpointing=saving in ending,
    )
    data = options["data"]()
    # Lightning's sampler, which it gives to several devices alone, would draw other numbers.
    training = DataLoader(data, batch_size=16, shuffle=False)
    path = None
    if "resume" in options:
        path = Path(resume_from) / f"{options['resume']}.ckpt"
    ran_with: list[int] = []
    step_flat = PipelineRunner.step_flat

    def counted(*args: Any, **kwargs: Any) -> Any:
        """Counts the parameters that are there when a step runs, its capture behind it."""
        ran_with.append(_bytes(module.parameters()))
        return step_flat(*args, **kwargs)

    with mock.patch.object(PipelineRunner, "step_flat", counted):
        trainer.fit(module, training, DataLoader(data, batch_size=16), ckpt_path=path)
    weights = {name: one.clone() for name, one in module.state_dict().items()}
    trainer.save_checkpoint(folder / f"{case}.ckpt")
    found = {
        "ran with": ran_with,
        "losses": recorder.losses,
        "weights": weights,
        "metrics": dict(trainer.callback_metrics),
        "attributes": sorted(module.__dict__),
        "memory": memory.found(trainer, module),
        "step": trainer.global_step,
    }
    torch.save(found, folder / f"{case}-{trainer.global_rank}.pt")


def main(folder: Path, num_ranks: int, resume_from: str, *cases: str) -> None:
    """Train all of the cases, one after the other."""
    quiet_rank()
    for one in cases:
        train(folder, one, num_ranks, resume_from)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *sys.argv[4:])

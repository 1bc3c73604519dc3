"""Does a unit-scaled model reach the loss of the unscaled one, each at its best learning rate?

Three tasks that a CPU trains in seconds: the demo's GPT with a head of its own on the demo's text,
a small ResNet on scikit-learn's digits, and an LSTM on the text. For each, the best rate of the
plain model and of the model under ``UnitScaleCallback("u-mup")`` and
``UnitScaleCallback("unit-scaling")``, which matches learning rates, by the mean loss of three seeds
on rates a factor of 2 apart; under ``"unit-scaling"`` at the plain model's best rate as well.

    python benchmarks/best_rates.py
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import RESULTS, machine
from examples.gpt import GPT
from examples.text import TextDataModule
from lightning_unitscale import UnitScaleCallback

FILE = RESULTS / "best_rates.json"
SEEDS = (1, 2, 3)
WARMUP = 30


class Classifier(pl.LightningModule):
    """A module that returns logits, trained with AdamW, a warm-up and a cosine to a tenth."""

    def __init__(self, model: nn.Module, learning_rate: float, num_steps: int) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        self.num_steps = num_steps

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_loss", self._loss(batch), on_epoch=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())

    def _share(self, step: int) -> float:
        rise = min(1.0, (step + 1) / WARMUP)
        progress = min(1.0, step / self.num_steps)
        return rise * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


class ResidualBlock(nn.Module):
    """Two convolutions beside a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.skip = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        branch = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.skip(x) + self.second_norm(self.second(branch)))


class ResNet(nn.Module):
    """``(batch, 1, 8, 8)`` pixels to ``(batch, 10)`` logits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, 1),
            ResidualBlock(width, 2 * width, 2),
            ResidualBlock(2 * width, 2 * width, 1),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem_norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


class LSTM(nn.Module):
    """``(batch, time)`` bytes to ``(batch, time, 256)`` logits, one cell written out."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(256, width)
        self.from_input = nn.Linear(width, 4 * width)
        self.from_state = nn.Linear(width, 4 * width, bias=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs = self.embedding(tokens)
        state = cell = inputs.new_zeros(len(tokens), self.width)
        states = []
        for step in inputs.unbind(1):
            gates = self.from_input(step) + self.from_state(state)
            enter, keep, new, show = gates.chunk(4, dim=-1)
            cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
            state = show.sigmoid() * cell.tanh()
            states.append(state)
        return self.head(torch.stack(states, 1))


class Digits(pl.LightningDataModule):
    """scikit-learn's 8 x 8 digits, four fifths of them for training."""

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        split = len(labels) * 4 // 5
        self.parts = [TensorDataset(images[i], labels[i]) for i in (order[:split], order[split:])]

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.parts[0], batch_size=64, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.parts[1], batch_size=len(self.parts[1]))


def gpt(rate: float, num_steps: int) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    model = GPT(
        width=64, depth=4, num_heads=4, context=64, learning_rate=rate, weight_decay=0.0,
        betas=(0.9, 0.95), warmup_steps=WARMUP, tied_head=False,
    )  # fmt: skip
    return model, TextDataModule(context=64, batch_size=16, val_samples=256)


def resnet(rate: float, num_steps: int) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    return Classifier(ResNet(), rate, num_steps), Digits()


def lstm(rate: float, num_steps: int) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    data = TextDataModule(context=16, batch_size=32, val_samples=256)
    return Classifier(LSTM(), rate, num_steps), data


Task = Callable[[float, int], tuple[pl.LightningModule, pl.LightningDataModule]]
# Steps, and exponents of 2 for the rates of the plain model and under u-muP.
TASKS: dict[str, tuple[Task, int, range, range]] = {
    "GPT": (gpt, 250, range(-10, -5), range(-1, 3)),
    "ResNet": (resnet, 200, range(-8, -3), range(-1, 4)),
    "LSTM": (lstm, 200, range(-6, -1), range(-2, 2)),
}


def train(task: str, method: str | None, log2_rate: int, seed: int) -> float:
    """Validation loss at the end of a run."""
    make, num_steps, *_ = TASKS[task]
    pl.seed_everything(seed, verbose=False)
    model, data = make(2.0**log2_rate, num_steps)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=num_steps,
        callbacks=[] if method is None else [UnitScaleCallback(method)],  # type: ignore[arg-type]
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer.fit(model, data)
    # By a Trainer of its own, so that every task is validated once, on all of it.
    evaluation = pl.Trainer(
        accelerator="cpu",
        callbacks=trainer.callbacks if method is None else [UnitScaleCallback(method)],  # type: ignore[attr-defined,arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    (metrics,) = evaluation.validate(model, data, verbose=False)
    loss = float(metrics["val_loss"])
    return loss if math.isfinite(loss) else math.inf


def search(task: str, method: str | None, exponents: Iterable[int]) -> dict[int, list[float]]:
    """The losses of all seeds at every rate."""
    losses = {}
    for log2_rate in exponents:
        losses[log2_rate] = [train(task, method, log2_rate, seed) for seed in SEEDS]
        print(task, method, log2_rate, losses[log2_rate], flush=True)
    return losses


def best_of(losses: dict[int, list[float]]) -> int:
    """The rate with the lowest mean loss."""
    return min(losses, key=lambda rate: statistics.mean(losses[rate]))


def compare(task: str) -> list[dict[str, object]]:
    """One row per method."""
    _, _, plain_rates, our_rates = TASKS[task]
    plain = search(task, None, plain_rates)
    ours = search(task, "u-mup", our_rates)
    matched = search(task, "unit-scaling", plain_rates)
    chosen = [
        ("plain, best rate", best_of(plain), plain),
        ("u-muP, best rate", best_of(ours), ours),
        ("unit scaling, best rate", best_of(matched), matched),
        ("unit scaling, the plain model's rate", best_of(plain), matched),
    ]
    return [
        {
            "task": task,
            "": name,
            "rate": f"2^{rate}",
            "val loss": statistics.mean(losses[rate]),
            "spread": max(losses[rate]) - min(losses[rate]),
            "losses": losses[rate],
            "search": losses,
        }
        for name, rate, losses in chosen
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help="; ".join(TASKS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    kept = json.loads(FILE.read_text())["rows"] if FILE.exists() else []
    rows = [row for row in kept if row["task"] not in arguments.tasks]
    rows += [row for task in arguments.tasks for row in compare(task)]
    shown = [{k: v for k, v in row.items() if k not in ("losses", "search")} for row in rows]
    print(tabulate(shown, headers="keys", floatfmt=".4f"))
    document = {**machine(), "seeds": SEEDS, "rows": rows}
    FILE.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Steps around a pipeline: ``python -m tests.pipeline.around_run FOLDER NUM_RANKS CASE ...``.

A case is ``NAME``, ``NAME:SCHEDULE`` or ``NAME:SCHEDULE:scaled``, with this package's callbacks.
With one rank each case trains on one device, without the strategy. Every rank writes what it
computed to ``FOLDER/CASE-RANK.pt``, and what the callbacks found to ``FOLDER/CASE-RANK-found.pt``.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import quiet_rank
from tests.pipeline.pipeline_run import Recorder, fit_and_save
from tests.pipeline.trainers import quiet_trainer

CLASSES, WIDTH, LENGTH, SAMPLES, STEPS = 7, 8, 5, 8, 4


@dataclass
class Output:
    """The output of a model: its own loss, and its logits."""

    loss: Tensor | None
    logits: Tensor
    hidden: Any = None


class Encoding(UserDict):  # type: ignore[type-arg]
    """A mapping that is no dict, as tokenizers return."""

    def to(self, device: Any) -> Encoding:
        return Encoding({name: value.to(device) for name, value in self.data.items()})


def _layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())


class Net(nn.Module):
    """Layers for tokens, and a mean loss over those whose label is not -100."""

    def __init__(self, returns: str = "output") -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())
                for _ in range(4)
            )
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.other = nn.Linear(WIDTH, 3)
        self.returns = returns

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.layers(self.embed(tokens))
        logits = self.head(hidden)
        if self.returns == "tensor":
            return logits
        if self.returns == "hidden":
            return hidden
        if self.returns == "tuple":
            return logits, (self.other(hidden), hidden)
        if self.returns == "dict":
            return {"logits": logits, "first": hidden.transpose(0, 1), "size": 3}
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits, {"last": hidden})


class Step(pl.LightningModule):
    """Reads numbers, logs, and measures; subclasses say how the loss is computed."""

    returns = "tensor"

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(self.returns)
        self.measured = MulticlassAccuracy(CLASSES, average="micro", ignore_index=-100)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss_of(batch)
        if loss.item() > 100:
            loss = 2 * loss
        self.log("number", loss.item(), on_epoch=True)
        self.measured(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("measured", self.measured, on_step=True, on_epoch=True)
        self.log("perplexity", loss.exp())
        return {"loss": loss, "size": len(logits)}

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        # Unlike AdamW it sees how large gradients are.
        return torch.optim.SGD(self.parameters(), 0.2, momentum=0.5, weight_decay=0.1)


class OwnLoss(Step):
    """A step whose model computes the loss."""

    returns = "output"

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        out = self.net(**batch)
        return out.loss, out.logits


class LossAndLogits(OwnLoss):
    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        out = self.net(**batch)
        return 0.5 * out.loss + out.logits.square().mean() + out.hidden["last"].std(), out.logits


class Tokens(Step):
    """A step whose model returns logits."""

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self.net(batch["tokens"])
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"]), logits


class Tuple(Step):
    """Some of what the model returns is not used, so that some parameters have no gradient."""

    returns = "tuple"

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits, _ = self.net(batch["tokens"])
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"]), logits


class Dict(Step):
    """One result has the samples in its second dimension."""

    returns = "dict"

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        out = self.net(batch["tokens"])
        first = F.mse_loss(out["first"][0].mean(-1), batch["tokens"][:, 0].float())
        logits = out["logits"]
        loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"])
        return loss + out["size"] * first, logits


class Head(Step):
    """A layer of the step's own follows the model."""

    returns = "hidden"

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, CLASSES)

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self.own(self.net(batch["tokens"]))
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"]), logits


class Contrastive(Step):
    """One graph, whose loss compares all samples with each other."""

    returns = "hidden"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        vectors = F.normalize(self.net(batch["tokens"]).mean(1))
        logits = vectors @ vectors.T.roll(1, 1) / 0.5
        loss = F.cross_entropy(logits, torch.arange(len(logits)))
        self.log("number", loss)
        return loss


class Mixed(Tokens):
    """Draws an order of the batch and puts noise on the labels."""

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(batch["tokens"]))
        logits = self.net(batch["tokens"][order])
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"][order], reduction="none")
        return (losses * torch.rand_like(losses)).mean(), logits


class Broken(Step):
    """The model itself is not one graph, and most of it is."""

    returns = "tensor"

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self.outer(batch["tokens"])
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"]), logits

    def __init__(self) -> None:
        super().__init__()
        self.outer = Outer(self.net)


class Outer(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Any:
        logits = self.net(tokens)
        return logits * (1 if logits.sum().item() > 0 else 2)


class Encoded(OwnLoss):
    """Batches are no dicts."""


class Captured(Step):
    """One graph, with a loss over tokens."""

    returns = "output"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(**batch).loss
        self.log("number", loss)
        self.log("tokens", (batch["labels"] != -100).sum().float())
        return loss


def batches(kind: type[Any] = dict) -> list[Any]:
    """Batches in which each part of two samples has another number of labels."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
        labels = tokens.roll(1, 1).clone()
        labels[:2] = -100
        labels[2, 1:] = -100
        labels[5:, 3:] = -100
        found.append(kind({"tokens": tokens, "labels": labels}))
    return found


CASES: dict[str, Callable[[], pl.LightningModule]] = {
    "own loss": OwnLoss, "loss and logits": LossAndLogits, "tokens": Tokens, "tuple": Tuple,
    "dict": Dict, "head": Head, "contrastive": Contrastive, "mixed": Mixed, "broken": Broken,
    "encoded": Encoded, "captured": Captured,
}  # fmt: skip


def train(folder: Path, case: str, num_ranks: int) -> None:
    """Train and write the results."""
    name, schedule, scaled = (*case.split(":"), "", "")[:3]
    pl.seed_everything(4, workers=True, verbose=False)
    module = CASES[name]()
    recorder = Recorder()
    scaling, monitor = UnitScaleCallback(), ScaleMonitor(every_n_steps=2)
    strategy: Any = "auto"
    if num_ranks > 1:
        strategy = PipelineStrategy(
            schedule or "1F1B", num_microbatches=4, process_group_backend="gloo", timeout=60
        )
    trainer = quiet_trainer(
        folder,
        devices=num_ranks,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=0.5 if name == "dict" else None,
        accumulate_grad_batches=2 if name in {"tokens", "own loss"} else 1,
        callbacks=[recorder, *([scaling, monitor] if scaled else [])],
        use_distributed_sampler=False,
    )
    data = batches(Encoding if name == "encoded" else dict)
    fit_and_save(folder, case, trainer, recorder, module, DataLoader(data, batch_size=None))
    if scaled:
        found = {
            "gauge": scaling.gauge.state(),
            "explained": str(scaling.explain()),
            "snapshot": monitor.snapshots[-1],
        }
        torch.save(found, folder / f"{case}-{trainer.global_rank}-found.pt")


def main(folder: Path, num_ranks: int, *cases: str) -> None:
    """Train all of the cases, one after the other."""
    quiet_rank()
    for one in cases:
        train(folder, one, num_ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

"""Two pipelines of two stages, or DDP on two processes with microbatches accumulated.

``python -m tests.pipeline.data_parallel_run FOLDER ddp|pipeline RESUME_FROM CASE ...``, once per
rank. Every rank writes what it computed to ``FOLDER/CASE-RANK.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch.utils.data import DataLoader

from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import quiet_rank
from tests.pipeline.pipeline_run import Groups, _gpt, _points, _text
from tests.pipeline.trainers import quiet_trainer

BATCH, MICROBATCHES, REPLICAS = 16, 4, 2


class Measured(Groups):
    """Logs averages, sums and counts over the replicas, and gathers from them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.SumMetric()
        self.gathered: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.head(self.net(x)), y)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.seen(x.sum())
        self.log("seen", self.seen)
        self.log("total", x.sum(), reduce_fx="sum", sync_dist=True)
        self.log("largest", x.max(), reduce_fx="max", sync_dist=True)
        self.log("val_loss", F.cross_entropy(self.head(self.net(x)), y), sync_dist=True)
        self.gathered.append(self.all_gather(x[:1, :1]).flatten().tolist())


class Records(pl.Callback):
    """Keeps the losses, and the gradients of every step before they are clipped."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Any]] = []
        self.parts: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.parts.append(outputs["loss"].detach() * trainer.accumulate_grad_batches)
        if len(self.parts) == trainer.accumulate_grad_batches:
            self.losses.append(torch.stack(self.parts).mean().item())
            self.parts = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        found = {
            name: one.grad.clone()
            for name, one in module.named_parameters()
            if one.grad is not None
        }
        self.gradients.append(found)


CASES: dict[str, dict[str, Any]] = {
    "measured": {"module": Measured, "data": _points, "clip": 0.05},
    "gpt": {"module": _gpt, "data": _text, "clip": 0.5, "saves": True},
    "gpt-v": {"module": _gpt, "data": _text, "clip": 0.5, "schedule": "ZBVZeroBubble"},
    "accumulated": {"module": Measured, "data": _points, "clip": 0.05, "accumulate": 2},
    "resumed": {"module": _gpt, "data": _text, "clip": 0.5, "resume": True},
}


def train(folder: Path, kind: str, resume_from: str, case: str) -> None:
    """Train two epochs and write the results."""
    options = CASES[case]
    pl.seed_everything(4, workers=True, verbose=False)
    module = options["module"]()
    records = Records()
    callbacks: list[Any] = [records]
    if options.get("saves"):
        callbacks.append(pl.callbacks.ModelCheckpoint(folder, "first-{epoch}", save_top_k=-1))
    accumulate = options.get("accumulate", 1)
    size = BATCH
    strategy: Any = pl.strategies.DDPStrategy(
        process_group_backend="gloo", find_unused_parameters=case != "gpt"
    )
    if kind == "pipeline":
        strategy = PipelineStrategy(
            options.get("schedule", "1F1B"),
            num_microbatches=MICROBATCHES,
            data_parallel=REPLICAS,
            process_group_backend="gloo",
            timeout=60,
        )
    else:
        size, accumulate = BATCH // MICROBATCHES, accumulate * MICROBATCHES
    data = options["data"]()
    trainer = quiet_trainer(
        folder,
        devices=2 * REPLICAS if kind == "pipeline" else REPLICAS,
        strategy=strategy,
        max_epochs=2,
        gradient_clip_val=options["clip"],
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        enable_checkpointing=bool(options.get("saves")),
    )
    path = Path(resume_from) / "first-epoch=0.ckpt" if options.get("resume") else None
    trainer.fit(module, DataLoader(data, size), DataLoader(data, BATCH), ckpt_path=path)
    found = {
        "losses": records.losses,
        "gradients": records.gradients,
        "weights": {name: one.clone() for name, one in module.state_dict().items()},
        "metrics": dict(trainer.callback_metrics),
        "gathered": getattr(module, "gathered", None),
        "sampler": type(trainer.train_dataloader.sampler).__name__,
        "step": trainer.global_step,
    }
    torch.save(found, folder / f"{case}-{trainer.global_rank}.pt")


def main(folder: Path, kind: str, resume_from: str, *cases: str) -> None:
    """Train all of the cases, one after the other."""
    quiet_rank()
    for one in cases:
        train(folder, kind, resume_from, one)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], *sys.argv[4:])

"""Train one published architecture: ``python -m benchmarks.pipeline_training FOLDER RANKS NAME``.

With one rank it trains on one device; with more, as every rank of a pipeline. The first rank writes
losses, and what ran as the pipeline, to ``FOLDER/RANKS.json``.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.model_zoo import BATCH, ZOO
from lightning_unitscale import PipelineStrategy
from lightning_unitscale.pipeline.pipelined_method import PipelinedStep
from tests.pipeline.pipeline_run import Recorder
from tests.pipeline.trainers import quiet_trainer

MICROBATCHES, STEPS = 4, 4


class Training(pl.LightningModule):
    """As people write it: the model computes the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        output = self.net(**batch)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2)


class Way(pl.Callback):
    """Keeps what ran as the pipeline, and on how many parameters a rank has."""

    def __init__(self) -> None:
        self.way = "one device"

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        step = getattr(trainer.strategy, "_step", None)
        if step is not None:
            self.way = "step" if isinstance(step, PipelinedStep) else step.called


def without_dropout(net: nn.Module) -> None:
    """Every pipeline stage draws numbers of its own: take the dropout away."""
    configs = [getattr(net, "config", None)]
    configs += [one for one in vars(configs[0] or object).values() if hasattr(one, "to_dict")]
    for holder in (*net.modules(), *configs):
        for name, value in list(vars(holder).items()) if holder is not None else []:
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)
        if isinstance(holder, nn.modules.dropout._DropoutNd):
            holder.p = 0.0


def batches(net: nn.Module, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Batches of several microbatches, each with another number of tokens and labels."""
    if isinstance(net, transformers.NystromformerForMaskedLM):
        # Its sequences are as long as its segments ask.
        return [{k: _longer(v, step) for k, v in inputs.items()} for step in range(STEPS)]
    takes_mask = "attention_mask" in inspect.signature(net.forward).parameters
    found = []
    for step in range(STEPS):
        batch = {name: _longer(value, step) for name, value in inputs.items()}
        ids, labels = batch.get("input_ids"), batch.get("labels")
        for sample in range(MICROBATCHES * BATCH):
            kept = 4 + 3 * sample % 11
            if isinstance(labels, Tensor) and labels.ndim == 2 and labels.shape[1] > kept:
                labels[sample, kept:] = -100
        if ids is not None and takes_mask and "attention_mask" not in batch:
            mask = torch.ones_like(ids)
            for sample in range(len(ids)):
                mask[sample, ids.shape[1] - sample % 5 :] = 0
            batch["attention_mask"] = mask
        found.append(batch)
    return found


def _longer(value: Any, step: int) -> Any:
    if not isinstance(value, Tensor) or not value.ndim or len(value) != BATCH:
        return value
    parts = []
    for part in range(MICROBATCHES):
        by = part + MICROBATCHES * step
        parts.append(value.roll(by, -1) if value.ndim > 1 else value.clone())
    return torch.cat(parts)


def train(folder: Path, num_ranks: int, name: str) -> None:
    """Train and write down the losses."""
    transformers.logging.set_verbosity_error()
    net, inputs = ZOO[name]()
    without_dropout(net)
    strategy: Any = "auto"
    if num_ranks > 1:
        strategy = PipelineStrategy(
            "1F1B", num_microbatches=MICROBATCHES, process_group_backend="gloo", timeout=100
        )
    recorder, way = Recorder(), Way()
    trainer = quiet_trainer(
        folder,
        devices=num_ranks,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[recorder, way],
        use_distributed_sampler=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Training(net), DataLoader(batches(net, inputs), batch_size=None))
    if trainer.is_global_zero:
        found = {"losses": recorder.losses, "way": way.way}
        (folder / f"{num_ranks}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

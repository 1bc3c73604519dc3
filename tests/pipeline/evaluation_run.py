"""Validation, test and prediction: ``python -m tests.pipeline.evaluation_run FOLDER RANKS``.

Once per rank; with one rank everything runs on one device without the strategy. Every rank writes
what came out to ``FOLDER/RANK.pt``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader

from examples.gpt import GPT
from lightning_unitscale.pipeline import SCHEDULES
from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import quiet_rank
from tests.pipeline.pipeline_run import CONTEXT, Groups, Memory, _points, _text
from tests.pipeline.trainers import quiet_trainer


class Evaluated(GPT):
    """Logs values that are not means over samples; the last batch is smaller."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.log("val_loss", loss, batch_size=len(batch[0]))
        self.log("perplexity", loss.exp(), batch_size=len(batch[0]))
        self.log("norm", logits.square().sum().sqrt(), reduce_fx="sum")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.log_dict({"test_loss": loss, "largest": logits.amax()}, batch_size=1)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"logits": logits, "first": logits.argmax(-1)[:, 0], "index": batch_idx}


class Metric(Groups):
    """A module with a metric object, which is not part of a graph but is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen(self.head(self.net(batch[0])).sum())
        self.log("seen", self.seen)


class Keeps(Groups):
    """A module whose steps have their side effects once for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Tensor] = []
        self.outputs: list[Any] = []
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.trained.append(result["loss"].detach())
        return result

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self.head(self.net(batch[0])).mean())

    def on_fit_end(self) -> None:
        self.outputs = [float(one) for one in self.outputs]


class KeepsNumbers(Keeps):
    """The same in code between two graphs."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self.head(self.net(batch[0])).mean().item())


class Counts(Keeps):
    """Is another graph for every batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count += 1
        super().validation_step(batch, batch_idx)


class Stepless(Groups):
    """A head that the training never uses."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.never(self.net(batch[0])).square().mean())


def _gpt() -> Evaluated:
    return Evaluated(width=16, depth=2, num_heads=2, context=CONTEXT, warmup_steps=2)


def run(num_ranks: int, folder: Path, options: dict[str, Any] | None = None) -> pl.Trainer:
    """A Trainer for one device, or with the strategy."""
    strategy: Any = "auto"
    options = dict(options or {})
    memory = options.pop("memory", None)
    if num_ranks > 1:
        given = {"num_microbatches": 4, "process_group_backend": "gloo", "timeout": 60, **options}
        strategy = PipelineStrategy(**given)
    return quiet_trainer(
        folder,
        devices=num_ranks,
        strategy=strategy,
        max_steps=4,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        callbacks=[memory] if memory else [],
        use_distributed_sampler=False,
    )


def _cpu(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: one.item() for name, one in values.items()}


def main(folder: Path, num_ranks: int) -> None:
    """Train with validation, then test and predict by every schedule."""
    quiet_rank()
    torch.manual_seed(3)
    # Three batches, the last one of five samples.
    evaluated = DataLoader(torch.utils.data.Subset(_text(), range(37)), 16)
    found: dict[str, Any] = {"predictions": {}, "warnings": {}}
    module, memory = _gpt(), Memory()
    trainer = run(num_ranks, folder, {"memory": memory, "evaluation": "pipeline"})
    trainer.fit(module, DataLoader(_text(), 16), evaluated)
    found["validation"] = _cpu(trainer.callback_metrics)
    found["memory"] = memory.found(trainer, module)
    # Two batches of one size: each size is captured for itself.
    equal = DataLoader(torch.utils.data.Subset(_text(), range(32)), 16)
    for name in SCHEDULES if num_ranks > 1 else ["1F1B"]:
        trainer = run(num_ranks, folder, {"schedule": name, "evaluation": "pipeline"})
        found["predictions"][name] = trainer.predict(module, equal)
    trainer = run(num_ranks, folder, {"evaluation": "pipeline"})
    trainer.test(module, evaluated, verbose=False)
    found["test"] = _cpu(trainer.callback_metrics)
    points = DataLoader(_points(), 16)
    parts = {"num_eval_microbatches": 4, "schedule": "GPipe", "evaluation": "pipeline"}
    torch.manual_seed(4)
    trainer = run(num_ranks, folder, parts)
    trainer.validate(Groups(), points, verbose=False)
    found["divided"] = _cpu(trainer.callback_metrics)
    for kind in (Metric, Stepless, Keeps, KeepsNumbers, Counts):
        torch.manual_seed(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = run(num_ranks, folder)
            module = kind()
            trainer.fit(module, points, points)
        found[kind.__name__] = _cpu(trainer.callback_metrics)
        if isinstance(module, Keeps):
            kept = (module.outputs, [float(one) for one in module.trained])
            found[f"kept by {kind.__name__}"] = (*kept, module.count)
        found["warnings"][kind.__name__] = [
            str(one.message) for one in caught if "validation_step" in str(one.message)
        ]
    torch.save(found, folder / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

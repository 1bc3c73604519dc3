"""Trainings with this package's callbacks under PipelineStrategy, and the same on one device.

``python -m tests.strategies.scaled_pipeline_run FOLDER NUM_RANKS RESUME_FROM CASE ...``, once per
rank. With one rank the batches are the microbatches, accumulated. Every rank writes what it saw to
``FOLDER/CASE-RANK.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import quiet_rank
from tests.strategies.pipeline_run import Groups, _gpt, _points, _text

NUM_MICROBATCHES, STEPS = 4, 4
SIZE = 16


class Seen(pl.Callback):
    """Keeps the losses of the batches and the gradients that the optimizer is given."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients.append(
            {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        )


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "products": {"scale": {}},
    "all": {"scale": {"depth": "all"}},
    "all-v": {"scale": {"depth": "all"}, "schedule": "ZBVZeroBubble"},
    "looks": {"scale": {"recalibrate": 2}, "lr": 30.0},
    "rules": {"scale": {"method": "unit-scaling"}},
    "u-mup": {"scale": {"method": "u-mup"}, "module": Groups, "data": _points},
    "u-mup-v": {"scale": {"method": "u-mup"}, "schedule": "ZBVZeroBubble"},
    "simulated": {"scale": {"simulate": "fp8"}},
    "fp8": {"scale": {"precision": "fp8", "recalibrate": None}},
    "monitored": {"monitor": {}},
    "monitored-v": {"monitor": {}, "schedule": "ZBVZeroBubble"},
    "both": {"scale": {}, "monitor": {}, "accumulate": 2},
}


def train(folder: Path, case: str, num_ranks: int, resume_from: str) -> None:
    """Train and write down what came out."""
    options = CASES[case]
    pl.seed_everything(4, workers=True, verbose=False)
    module = options.get("module", _gpt)()
    seen = Seen()
    callbacks: list[pl.Callback] = [seen]
    scaling = monitor = None
    if "scale" in options:
        scaling = UnitScaleCallback(**options["scale"])
        callbacks.append(scaling)
    if "monitor" in options:
        monitor = ScaleMonitor(every_n_steps=2, **options["monitor"])
        callbacks.append(monitor)
    strategy: Any = "auto"
    accumulated = options.get("accumulate", 1)
    if num_ranks > 1:
        strategy = PipelineStrategy(
            options.get("schedule", "1F1B"),
            num_microbatches=NUM_MICROBATCHES,
            process_group_backend="gloo",
            timeout=60,
        )
    else:
        accumulated *= NUM_MICROBATCHES
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_steps=STEPS,
        gradient_clip_val=options.get("clip"),
        accumulate_grad_batches=accumulated,
        callbacks=callbacks,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = options.get("data", _text)()
    size = SIZE if num_ranks > 1 else SIZE // NUM_MICROBATCHES
    trainer.fit(module, DataLoader(data, batch_size=size))
    found = {
        "losses": seen.losses,
        "gradients": seen.gradients,
        "gauge": None if scaling is None else scaling.gauge.state(),
        "weights": {name: one.clone() for name, one in module.state_dict().items()},
        "snapshots": None if monitor is None else monitor.snapshots,
    }
    torch.save(found, folder / f"{case}-{trainer.global_rank}.pt")


def main(folder: Path, num_ranks: int, resume_from: str, *cases: str) -> None:
    """Train all of the cases, one after the other."""
    quiet_rank()
    for one in cases:
        train(folder, one, num_ranks, resume_from)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *sys.argv[4:])

"""Two pipelines of two stages with sharded optimizers, with whole ones, and one device.

``python -m tests.pipeline.sharded_run FOLDER NUM_RANKS RESUME_FROM RUN ...``, once per rank. A
run is the name of a case, with ``-whole`` behind it for whole optimizers; with one rank it trains
on the batches of both pipelines. Every rank writes what it computed to ``FOLDER/RUN-RANK.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback
from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import quiet_rank
from tests.pipeline.pipeline_run import Groups, Memory, Recorder, _gpt, _points, _text
from tests.pipeline.trainers import quiet_trainer

BATCH, MICROBATCHES, REPLICAS, STEPS = 8, 4, 2, 3


class Stepped(pl.Callback):
    """Keeps what has a gradient before an optimizer step: here, and how many elements on all."""

    def __init__(self) -> None:
        self.counts: set[int] = set()
        self.names: set[str] = set()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        named = dict(module.named_parameters())
        if isinstance(trainer.strategy, PipelineStrategy):
            self.counts.add(trainer.strategy.num_gradient_elements(named.values()))
        self.names |= {name for name, param in named.items() if param.grad is not None}


class Keeps(Groups):
    """Clears its gradients before every second step only, and has optimizer state at once."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.02)


CASES: dict[str, dict[str, Any]] = {
    "groups": {"module": Groups, "schedule": "ZBVZeroBubble", "accumulate": 2, "clip": 0.05},
    "gpt": {"module": _gpt, "scaled": True, "clip": 0.05},
    "keeps": {"module": Keeps, "schedule": "GPipe", "clip": 0.05},
    "resumed": {"module": _gpt, "clip": 0.05, "resume": "gpt", "steps": 2 * STEPS},
}


def train(folder: Path, run: str, num_ranks: int, resume_from: str) -> None:
    """Train and write down what came out."""
    case, _, kind = run.partition("-")
    options = CASES[case]
    pl.seed_everything(4, workers=True, verbose=False)
    module = options["module"]()
    recorder, memory, stepped = Recorder(), Memory(), Stepped()
    callbacks: list[pl.Callback] = [recorder, memory, stepped]
    strategy: Any = "auto"
    accumulate = options.get("accumulate", 1)
    data: Dataset[Any] = _text() if options["module"] is _gpt else _points()
    data, size = Subset(data, range(STEPS * accumulate * BATCH * REPLICAS)), BATCH * REPLICAS
    remat = monitor = None
    if num_ranks > 1:
        strategy = PipelineStrategy(
            options.get("schedule", "1F1B"),
            num_microbatches=MICROBATCHES,
            data_parallel=REPLICAS,
            shard_optimizer=kind != "whole",
            process_group_backend="gloo",
            timeout=60,
        )
        if options.get("scaled"):
            remat, monitor = RematCallback("min_cut"), ScaleMonitor(last_step=0)
            callbacks += [UnitScaleCallback(), monitor, remat]
        size = BATCH
        data = Subset(data, range(int(os.environ["LOCAL_RANK"]) % REPLICAS, len(data), REPLICAS))
    trainer = quiet_trainer(
        folder,
        devices=num_ranks,
        strategy=strategy,
        max_steps=options.get("steps", STEPS),
        gradient_clip_val=options["clip"],
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        use_distributed_sampler=False,
    )
    path = Path(resume_from) / f"{options['resume']}.ckpt" if "resume" in options else None
    trainer.fit(module, DataLoader(data, batch_size=size), ckpt_path=path)
    trainer.save_checkpoint(folder / f"{run}.ckpt")
    found = {
        "losses": recorder.losses,
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "memory": memory.found(trainer, module),
        "elements": stepped.counts,
        "stepped": stepped.names,
        "reports": remat and remat.reports,
        "measured": remat and remat.measured_peak_bytes,
        "scales": monitor and [one.rows("backward") for one in monitor.snapshots],
    }
    torch.save(found, folder / f"{run}-{trainer.global_rank}.pt")


def main(folder: Path, num_ranks: int, resume_from: str, *runs: str) -> None:
    """Train all of the runs, one after the other."""
    quiet_rank()
    for run in runs:
        train(folder, run, num_ranks, resume_from)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *sys.argv[4:])

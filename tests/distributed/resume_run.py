"""Trainings under FSDP2 that go on from checkpoints: ``python -m ... FOLDER KIND ...``.

A kind is ``distributed`` or ``whole``, with numbers that are rounded by chance, or ``lossless``,
whose checkpoints are distributed too. Run it once per rank. Every rank writes what it computed to
``FOLDER/KIND-RANK.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.callbacks import Simulate
from tests.distributed.launch import quiet_rank
from tests.distributed.loops_run import SPREADS, whole
from tests.loops import zoo
from tests.loops.every_loop import LOOPS, NUM_ACCUMULATED

NUM_STEPS, SAVE_AT = 6, 4


def train(folder: Path, run: str, resume: Path | None = None) -> dict[str, Any]:
    """Train, from the beginning or from a checkpoint."""
    simulate = None if run == "lossless" else Simulate("fp8", rounding="stochastic")
    units = UnitScaleCallback(simulate=simulate)
    monitor = ScaleMonitor(every_n_steps=2)
    saving = ModelCheckpoint(folder / run, "{step}", every_n_train_steps=SAVE_AT, save_top_k=-1)
    strategy = ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="gloo",
        save_distributed_checkpoint=run != "whole",
    )
    batches = zoo.batches("Blocks", NUM_STEPS * NUM_ACCUMULATED, int(os.environ["LOCAL_RANK"]))
    losses, weights = LOOPS["lightning"](
        zoo.new("Blocks"),
        batches,
        [units, monitor, saving],
        folder,
        spread=SPREADS["fsdp"],
        resume=resume,
        devices=2,
        strategy=strategy,
        enable_checkpointing=True,
    )
    return {
        "losses": losses[-(NUM_STEPS - SAVE_AT) * NUM_ACCUMULATED :],
        "weights": {name: whole(value) for name, value in weights.items()},
        "gauge": units.gauge.state(),
        "rms": torch.as_tensor(monitor.snapshots[-1].log2_rms("backward", stored=False)),
    }


if __name__ == "__main__":
    quiet_rank()
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1])
        found = {"whole": train(folder, name)}
        path = folder / name / f"step={SAVE_AT}.ckpt"
        found["resumed"] = train(folder, name, resume=path)
        torch.save(
            {**found, "is_folder": path.is_dir()}, folder / f"{name}-{os.environ['LOCAL_RANK']}.pt"
        )

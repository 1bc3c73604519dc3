"""Bytes on each rank of two pipelines of two stages, with whole and with sharded optimizers.

The demo's GPT with AdamW, trained on four processes. Parameters, gradients and optimizer state are
those that are there after a step. The peak is that of the third step, with the optimizer's, by
``PeakMeter``: the first makes the optimizer's state, and the second the gradients that the third
one meets.

    python benchmarks/pipeline_sharding.py
    python benchmarks/pipeline_sharding.py --width 64 --depth 2   # a short one
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import RESULTS, machine
from benchmarks.ranks import run_as_ranks
from examples.gpt import GPT
from lightning_unitscale.memory.real_memory import PeakMeter, optimizer_state_bytes, storage_bytes
from lightning_unitscale.strategies import PipelineStrategy

NUM_STAGES, NUM_PIPELINES, NUM_MICROBATCHES = 2, 2, 4
MEASURED_STEP = 2
RESULT = "pipeline_sharding.json"


class Bytes(pl.Callback):
    """Counts what is there after the measured step, and measures the step's peak."""

    def __init__(self) -> None:
        self.row: dict[str, int] = {}
        self._meter = PeakMeter(torch.device("cpu"))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Start before the gradients are made that the measured step frees."""
        if batch_idx == MEASURED_STEP - 1:
            self._meter.start()
        if batch_idx == MEASURED_STEP:
            states = [dict(state) for opt in trainer.optimizers for state in opt.state.values()]
            gradients = [param.grad for param in module.parameters()]
            self._meter.mark([*module.parameters(), *module.buffers(), gradients, states, batch])

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count."""
        if batch_idx == MEASURED_STEP:
            self.row = {
                "parameters": storage_bytes(list(module.parameters())),
                "gradients": storage_bytes([param.grad for param in module.parameters()]),
                "optimizer state": optimizer_state_bytes(trainer.optimizers),
                "peak of a step": self._meter.stop() or 0,
            }


def measured(shard_optimizer: bool, width: int, depth: int, context: int) -> dict[str, int]:
    """Train three steps; the bytes of this rank."""
    pl.seed_everything(0, workers=True, verbose=False)
    counts = Bytes()
    strategy = PipelineStrategy(
        num_microbatches=NUM_MICROBATCHES,
        data_parallel=NUM_PIPELINES,
        shard_optimizer=shard_optimizer,
        process_group_backend="gloo",
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_STAGES * NUM_PIPELINES,
        strategy=strategy,
        max_steps=MEASURED_STEP + 1,
        callbacks=[counts],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch = 2 * NUM_MICROBATCHES
    count = batch * NUM_PIPELINES * trainer.max_steps
    tokens = torch.randint(256, (count, context + 1), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    trainer.fit(GPT(width=width, depth=depth, context=context), DataLoader(data, batch))
    return counts.row


def main() -> int:
    """Measure on four processes; the first of them prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return run_as_ranks(Path(__file__), NUM_STAGES * NUM_PIPELINES, sys.argv[1:])
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "NODE_RANK": "0"}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for shards in (False, True):
        own = measured(shards, options.width, options.depth, options.context)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        for rank, counted in enumerate(of_ranks):
            stage, pipeline = divmod(rank, NUM_PIPELINES)
            about = {"shard_optimizer": shards, "stage": stage, "pipeline": pipeline}
            rows.append({**about, **counted})
    if dist.get_rank() == 0:
        title = (
            f"MB on each of {len(of_ranks)} processes: a GPT of {options.depth} layers of width "
            f"{options.width}, {NUM_PIPELINES} pipelines of {NUM_STAGES} stages, AdamW, FP32"
        )
        shown = [
            {key: value / 1e6 if key in own else value for key, value in row.items()}
            for row in rows
        ]
        print(f"{title}\n{tabulate(shown, headers='keys', floatfmt='.2f')}")
        print(", ".join(f"{key} {value}" for key, value in machine().items()))
        RESULTS.mkdir(exist_ok=True)
        content = {"title": title, "machine": machine(), "rows": rows}
        (RESULTS / RESULT).write_text(json.dumps(content, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

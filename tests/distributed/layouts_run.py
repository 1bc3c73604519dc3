"""The same training in several layouts: ``python -m tests.distributed.layouts_run FOLDER RUN ...``.

Run it once per rank, or call :func:`train` for one process. A run is ``LAYOUT`` or
``LAYOUT:fault``. Its event files are in ``FOLDER/RUN``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_unitscale import PipelineStrategy, ScaleMonitor
from tests.callbacks.runs import QUIET
from tests.distributed.launch import run_all

BATCH, STEPS, FAULT_STEP = 64, 5, 2
FAULTY = "layers.1.up"


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


class Net(pl.LightningModule):
    """Three layers, of which the second may get a wrong weight."""

    def __init__(self, layout: str, *, is_faulty: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(32, 8)
        self.layout, self.is_faulty = layout, is_faulty

    def configure_model(self) -> None:
        if self.layout == "fsdp" and not self.is_spread:
            for part in (*self.layers, self.head):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])
            self.is_spread = True

    is_spread = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, classes = batch
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), classes)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        weight = self.get_submodule(FAULTY).weight
        is_here = weight.untyped_storage().nbytes() > 0
        if self.is_faulty and is_here and self.trainer.global_step == FAULT_STEP:
            weight.data.mul_(1.3)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(BATCH * STEPS, 32, generator=generator)
        data = TensorDataset(x, torch.randint(8, (len(x),), generator=generator))
        if self.layout not in ("ddp", "fsdp"):
            return DataLoader(data, BATCH // 2 if self.layout == "accumulated" else BATCH)
        # A batch of all ranks has the samples of a batch of one process.
        sampler = DistributedSampler(data, 2, self.global_rank, shuffle=False)
        return DataLoader(data, BATCH // 2, sampler=sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


LAYOUTS: dict[str, Any] = {
    "single": lambda: {},
    "accumulated": lambda: {"accumulate_grad_batches": 2},
    "ddp": lambda: {"devices": 2, "strategy": DDPStrategy(process_group_backend="gloo")},
    "fsdp": lambda: {
        "devices": 2,
        "strategy": ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        ),
    },
    "pipeline": lambda: {"devices": 2, "strategy": PipelineStrategy("GPipe", num_microbatches=2)},
}


def train(folder: Path, layout: str, fault: str = "") -> Path:
    """Train in a layout and return the folder of its event files."""
    options = LAYOUTS[layout]()
    logger = TensorBoardLogger(folder, f"{layout}:{fault}".rstrip(":"), version="")
    monitor = ScaleMonitor(every_n_steps=1, on_violation=None, tensorboard_tabs="scales")
    options |= {"logger": logger, "use_distributed_sampler": False}
    trainer = pl.Trainer(callbacks=[monitor], max_steps=STEPS, **{**QUIET, **options})
    trainer.fit(Net(layout, is_faulty=bool(fault)))
    return Path(logger.log_dir)


def _train(folder: Path, layout: str, fault: str = "") -> None:
    train(folder, layout, fault)


if __name__ == "__main__":
    run_all(_train, *sys.argv[1:])

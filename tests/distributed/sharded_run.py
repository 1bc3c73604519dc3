"""FSDP2 and tensor-parallel trainings on CPU processes: ``python -m ... FOLDER KIND:HOW ...``.

Run it once per rank, with Lightning's environment variables. Every rank writes what it computed to
``FOLDER/KIND:HOW-RANK.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from tests.callbacks.runs import QUIET, Recorder, loader
from tests.distributed.launch import quiet_rank

HOWS: dict[str, Any] = {
    "without": lambda: [],
    "units": lambda: [UnitScaleCallback()],
    "both": lambda: [UnitScaleCallback(), ScaleMonitor(every_n_steps=2)],
}


class Block(nn.Module):
    """A feed-forward layer with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Sharded(pl.LightningModule):
    """Blocks, and products that the root module itself computes after the last of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.mixing = nn.Parameter(torch.randn(16, 16) / 4)
        self.head = nn.Linear(16, 2)

    def configure_model(self) -> None:
        """Shard the parameters."""
        if self.kind == "fsdp":
            mesh = self.device_mesh["data_parallel"]
            for block in self.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self, mesh=mesh)
        elif self.kind == "tensor":
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in self.blocks:
                parallelize_module(block, self.device_mesh["tensor_parallel"], plan)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x @ self.mixing)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


SIZES = {"fsdp": (2, 1), "tensor": (1, 2)}


def train(folder: Path, kind: str, how: str) -> None:
    """Train and write down what came out."""
    pl.seed_everything(4, verbose=False)
    data, tensor = SIZES[kind]
    strategy = ModelParallelStrategy(
        data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend="gloo"
    )
    callbacks, recorder = HOWS[how](), Recorder()
    module = Sharded(kind)
    options = {**QUIET, "devices": 2, "max_steps": 6, "strategy": strategy}
    trainer = pl.Trainer(callbacks=[*callbacks, recorder], **options)
    trainer.fit(module, loader(24))
    losses = [step["loss"].detach() for step in recorder.outputs]
    torch.save(
        outcome(module, losses, callbacks), folder / f"{kind}:{how}-{trainer.global_rank}.pt"
    )


def outcome(module: nn.Module, losses: list[Tensor], callbacks: list[Any]) -> dict[str, Any]:
    """What a rank has computed, weights whole, and what its callbacks have seen."""
    weights = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in module.state_dict().items()
    }
    found: dict[str, Any] = {"losses": torch.stack(losses), "weights": weights}
    for callback in callbacks:
        if isinstance(callback, UnitScaleCallback):
            found["gauge"] = callback.gauge.state()
            found["products"] = (callback.coverage.num_in_units, callback.coverage.num_products)
        else:
            found["names"] = list(callback.snapshots[-1].names)
    return found


if __name__ == "__main__":
    quiet_rank()
    for run in sys.argv[2:]:
        train(Path(sys.argv[1]), *run.split(":"))

"""Weights that hooks of a validation change: ``python -m ... FOLDER RANKS CASE``, once per rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_unitscale.pipeline.rank_parameters import FreedParameter
from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import quiet_rank
from tests.pipeline.trainers import quiet_trainer


class Adapted(nn.Module):
    """A layer with a low-rank adapter that can be merged into it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.is_merged = False

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        return result if self.is_merged else result + self.up(self.down(x))

    def merge(self, sign: float) -> None:
        self.base.weight.data += sign * (self.up.weight @ self.down.weight)
        self.is_merged = sign > 0


class Module(pl.LightningModule):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.net = nn.Sequential(*(Adapted() for _ in range(4)), nn.Linear(16, 1))
        self.seen: dict[str, list[Any]] = {
            "losses": [], "validations": [], "whole": [], "whole in training": [],
        }  # fmt: skip

    def is_whole(self) -> bool:
        return not any(isinstance(one, FreedParameter) for one in self.parameters())

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch).tanh().sub(1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen["losses"].append(float(outputs["loss"]))
        self.seen["whole in training"].append(self.is_whole() and self.trainer.num_devices > 1)

    def change(self, sign: float) -> None:
        if self.case == "merged":
            for one in self.net[:4]:
                one.merge(sign)
        if self.case == "swapped":
            for one in self.parameters():
                one.data = one.data * (0.5 if sign > 0 else 2.0)
        if self.case == "first rank" and self.global_rank == 0:
            self.norm = float(sum(one.detach().norm() for one in self.parameters()))

    def on_validation_start(self) -> None:
        self.change(1.0)

    def on_validation_end(self) -> None:
        # Freed by the strategy's hook, which comes after this one.
        self.seen["whole"].append(self.is_whole() and self.trainer.num_devices > 1)
        self.seen["validations"].append(float(self.trainer.callback_metrics["val"]))
        self.change(-1.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: Path, num_ranks: int, case: str) -> None:
    """Train on one device, or as a pipeline, and write what was seen."""
    quiet_rank()
    torch.manual_seed(1)
    module = Module(case)
    strategy: Any = "auto"
    if num_ranks > 1:
        strategy = PipelineStrategy(
            num_microbatches=2, process_group_backend="gloo", timeout=60, evaluation="pipeline"
        )
    trainer = quiet_trainer(
        folder,
        devices=num_ranks,
        strategy=strategy,
        max_steps=6,
        val_check_interval=2,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    data = DataLoader(torch.randn(48, 16, generator=torch.Generator().manual_seed(2)), 8)
    trainer.fit(module, data, data)
    torch.save(module.seen, folder / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

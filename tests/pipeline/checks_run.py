"""A module that takes another course on the second rank: ``... checks_run FOLDER``, per rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import quiet_rank
from tests.pipeline.pipeline_run import _points
from tests.pipeline.trainers import quiet_trainer


class Ranked(pl.LightningModule):
    """Swaps two layers of one shape on one rank: nothing else would notice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        order = (0, 2, 1, 3) if self.global_rank else (0, 1, 2, 3)
        for index in order:
            x = self.layers[index](x).tanh()
        return F.cross_entropy(x, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(folder: Path) -> None:
    """Write down how the training ends."""
    quiet_rank()
    trainer = quiet_trainer(
        folder,
        devices=2,
        strategy=PipelineStrategy(num_microbatches=2, process_group_backend="gloo", timeout=60),
        max_steps=1,
    )
    try:
        trainer.fit(Ranked(), DataLoader(_points(), batch_size=16))
        found = ""
    except RuntimeError as error:
        found = str(error)
    torch.save(found, folder / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""FP8 that widens under DDP: ``python -m tests.distributed.widening_run FOLDER``, per rank.

Every rank writes ``FOLDER/rank.json``: after each step which layers are in FP8, and the events.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_unitscale import FP8
from tests.callbacks.runs import QUIET
from tests.callbacks.test_widening import InFP8, Spiked
from tests.distributed.launch import quiet_rank

STEPS = 7


class OneRankSpiked(Spiked):
    """The second rank alone has the huge element."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.global_rank == 0:
            self.spiked = ()
        return super().training_step(batch, index)


def main(folder: Path) -> None:
    """Train, with the spike in the third step."""
    quiet_rank()
    torch.manual_seed(2)
    data = DataLoader([torch.randn(16, 32) for _ in range(2 * STEPS)])
    callback = InFP8(precision=FP8(on_misfit="widen"), recalibrate=5)
    trainer = pl.Trainer(
        max_steps=STEPS,
        callbacks=[callback],
        strategy=DDPStrategy(process_group_backend="gloo"),
        **{**QUIET, "devices": 2, "logger": CSVLogger(folder, "csv", version=0)},
    )
    module = OneRankSpiked((2,))
    trainer.fit(module, data)
    found = {
        "in_fp8": callback.seen,
        "explained": str(callback.explain()),
        "weight": module.first.weight.double().sum().item(),
    }
    (folder / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

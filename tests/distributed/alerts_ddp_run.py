"""DDP trainings in which one rank has a NaN: ``python -m tests.distributed.alerts_ddp_run FOLDER``.

Run it once per rank. Every rank writes ``FOLDER/rank.json``: how each training ended.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_unitscale import ScaleMonitor
from lightning_unitscale.callbacks import ScaleViolation
from tests.callbacks.modules import Regression
from tests.callbacks.runs import QUIET, loader
from tests.distributed.launch import quiet_rank

NAN_STEP = 4


class OneRankFails(Regression):
    """The second rank's inputs hold a NaN at one step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss((torch.tanh(x), y))

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        x, y = batch
        if self.global_rank == 1 and self.trainer.global_step == NAN_STEP:
            x = torch.where(torch.arange(6) == 2, torch.nan, x)
        return x, y


def train(on_violation: Any, every_n_steps: int) -> dict[str, Any]:
    """How a training ended on this rank."""
    pl.seed_everything(4, verbose=False)
    monitor = ScaleMonitor(every_n_steps, on_violation=on_violation)
    strategy = DDPStrategy(process_group_backend="gloo")
    trainer = pl.Trainer(
        callbacks=[monitor], max_steps=8, strategy=strategy, **{**QUIET, "devices": 2}
    )
    raised = None
    try:
        trainer.fit(OneRankFails(norm=False), loader(64))
    except ScaleViolation as violation:
        raised = str(violation)
    return {
        "steps": trainer.global_step,
        "raised": raised,
        "alerts": [str(one) for one in monitor.alerts],
        "sampled": [one.step for one in monitor.snapshots],
    }


def main(folder: Path) -> None:
    """Stop, raise, and a loss that is NaN in between."""
    quiet_rank()
    # Raising comes last: the process group is of no use after it.
    cases = {"stop": ("stop", 2), "between": ("warn", 3), "raise": ("raise", 2)}
    found = {name: train(*options) for name, options in cases.items()}
    (folder / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""DDP trainings within a budget: ``python -m tests.distributed.remat_ddp_run FOLDER KIND ...``.

Run it once per rank, with Lightning's environment variables. Every rank writes what it computed to
``FOLDER/KIND-RANK.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from examples.gpt import GPT
from lightning_unitscale import RematCallback, UnitScaleCallback
from tests.callbacks.runs import QUIET, Rows
from tests.distributed.launch import run_all


class Model(GPT):
    """The demo's GPT without evaluation."""

    validation_step = pl.LightningModule.validation_step
    test_step = pl.LightningModule.test_step


KINDS = {
    "whole": lambda: [RematCallback(1.0)],
    "budget": lambda: [RematCallback(0.75)],
    "with units": lambda: [UnitScaleCallback(remat=0.75)],
}


def train(folder: Path, kind: str) -> None:
    """Train and write the results."""
    pl.seed_everything(4, verbose=False)
    callbacks = KINDS[kind]()
    module = Model(width=64, depth=1, context=64, dropout=0.1, decay_steps=20)
    rows = Rows(128, lambda one: tuple(torch.randint(256, (2, 64), generator=one)))
    trainer = pl.Trainer(
        callbacks=callbacks,
        max_epochs=1,
        strategy=DDPStrategy(process_group_backend="gloo"),
        accumulate_grad_batches=2,
        **{**QUIET, "devices": 2, "use_distributed_sampler": True},
    )
    # Ranks that drop different elements, as they do without a common seed.
    torch.manual_seed(10 + trainer.global_rank)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8))
    found = {"weights": module.state_dict(), "reports": []}
    if isinstance(callbacks[0], RematCallback):
        found["reports"] = [(one.plan_hash, one.recomputed_seconds) for one in callbacks[0].reports]
        found["peaks"] = (callbacks[0].predicted_peak_bytes, callbacks[0].measured_peak_bytes)
    torch.save(found, folder / f"{kind}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    run_all(train, *sys.argv[1:])

"""Trainings with the plugin and with the callback: ``python -m ... FOLDER SPREAD:HOW ...``.

Run it once per rank. Every rank writes what it computed to ``FOLDER/RUN-RANK.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_unitscale import UnitScaleCallback, UnitScaledPrecision
from tests.callbacks.modules import Regression, adamw
from tests.callbacks.runs import QUIET, Recorder, loader
from tests.distributed.launch import run_all, whole


class Sharded(Regression):
    """Each layer is a unit of FSDP2."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for part in (self.first, self.norm, self.second, self):
            fully_shard(part, mesh=mesh)


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
    "fsdp2": lambda: ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    ),
}


def train(folder: Path, spread: str, how: str) -> None:
    pl.seed_everything(4, verbose=False)
    module = (Sharded if spread == "fsdp2" else Regression)(adamw, norm=False)
    recorder, callback = Recorder(), UnitScaleCallback(simulate="fp8")
    options: dict[str, Any] = {"callbacks": [recorder]}
    if how == "plugin":
        plugin = UnitScaledPrecision(simulate="fp8", base="bf16-mixed")
        options["plugins"], callback = [plugin], plugin.callback
    else:
        options = {"callbacks": [callback, recorder], "precision": "bf16-mixed"}
    trainer = pl.Trainer(
        **{**QUIET, "devices": 2, "max_steps": 6}, strategy=STRATEGIES[spread](), **options
    )
    trainer.fit(module, loader(40))
    weights = {name: whole(one) for name, one in module.named_parameters()}
    found = {"outputs": recorder.outputs, "weights": weights, "gauge": callback.gauge.state()}
    torch.save(found, folder / f"{spread}:{how}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    run_all(train, *sys.argv[1:])

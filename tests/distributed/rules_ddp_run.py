"""DDP trainings by rules on CPU processes: ``python -m ...rules_ddp_run FOLDER KIND ...``.

Run it once per rank, with Lightning's environment variables. Every rank writes what it computed to
``FOLDER/KIND-RANK.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_unitscale import UnitScaleCallback
from tests.callbacks.late_modules import LateExpert
from tests.callbacks.rule_runs import Classifier, Gradients, loader, plan_of, unit_scale, weights
from tests.callbacks.runs import QUIET, Recorder
from tests.distributed.launch import run_all


def still(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.0)


def learning(module: Any) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


KINDS: dict[str, dict[str, Any]] = {
    "still": {"configure": still},
    "learning": {"configure": learning, "gradient_clip_val": 1.0, "num_sanity_val_steps": 1},
    "accumulating": {"configure": still, "accumulate_grad_batches": 4},
}


def train(folder: Path, kind: str) -> None:
    """Train and write the results."""
    if kind == "late":
        _train_late(folder)
        return
    pl.seed_everything(4, verbose=False)
    options = dict(KINDS[kind])
    module, seen, recorder = Classifier(options.pop("configure")), Gradients(), Recorder()
    callback = unit_scale("u-mup")
    trainer = pl.Trainer(
        callbacks=[callback, seen, recorder],
        max_epochs=1,
        strategy=DDPStrategy(process_group_backend="gloo"),
        **{**QUIET, "devices": 2, "use_distributed_sampler": True, **options},
    )
    trainer.fit(module, loader(256, 8), loader(16))
    found = {
        "start": seen.weights[0],
        "weights": weights(module),
        "rms": seen.rms,
        "outputs": recorder.outputs,
        "plan": plan_of(module).state(),
        "state": callback.state_dict(),
    }
    torch.save(found, folder / f"{kind}-{trainer.global_rank}.pt")


class Late(LateExpert):
    """An expert that one rank sends tokens to from the third step on, and the other much later."""

    def late_share(self, step: int) -> float:
        return float(step >= (3 if self.global_rank else 12))


def _train_late(folder: Path) -> None:
    """Train tensors in a format that are zero at first, on one rank for longer."""
    pl.seed_everything(4, verbose=False)
    module = Late()
    callback = UnitScaleCallback("unit-scaling", simulate="fp8", recalibrate=None)
    trainer = pl.Trainer(
        callbacks=[callback],
        max_steps=24,
        max_epochs=-1,
        strategy=DDPStrategy(process_group_backend="gloo"),
        **{**QUIET, "devices": 2},
    )
    trainer.fit(module)
    found = {"weights": weights(module), "losses": module.losses, "state": callback.state_dict()}
    torch.save(found, folder / f"late-{trainer.global_rank}.pt")


if __name__ == "__main__":
    run_all(train, *sys.argv[1:])

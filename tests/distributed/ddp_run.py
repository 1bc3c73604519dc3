"""DDP trainings on CPU processes: ``python -m tests.distributed.ddp_run FOLDER KIND:HOW ...``.

Run it once per rank, with Lightning's environment variables. Every rank writes what it computed to
``FOLDER/KIND:HOW-RANK.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from tests.callbacks.modules import Regression, adamw
from tests.callbacks.runs import ARRANGEMENTS, QUIET, Recorder, loader
from tests.callbacks.test_manual_optimization import Adversarial
from tests.distributed.launch import run_all


class Unused(Regression):
    """A layer that gets no gradient, and one that gets one on the first rank only at times."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.never = nn.Linear(2, 2)
        self.sometimes = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if self.global_rank == 0 and self.global_step % 2:
            result = result + self.sometimes(result)
        return result


class Drifting(Regression):
    """Inputs grow on the first rank only, before the units are measured."""

    def __init__(self) -> None:
        super().__init__(adamw)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 64 if self.global_rank == 0 and self.global_step >= 5 else x)


class Synchronized(Regression):
    """Batch statistics over both ranks, and values logged over both."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("joint", loss, sync_dist=True, on_epoch=True)
        return loss


def _compiled() -> Regression:
    """DDP calls the module, whose steps then are parts of what is compiled."""
    module = Regression(adamw)
    module.compile(backend="aot_eager")
    return module


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"module": lambda: Regression(adamw)},
    "accumulating": {"module": Regression, "accumulate_grad_batches": 2, "precision": "bf16-mixed"},
    "unused": {"module": Unused, "strategy": {"find_unused_parameters": True}},
    "static": {"module": Regression, "strategy": {"static_graph": True}},
    "drifting": {"module": Drifting, "max_steps": 10},
    "compiled": {"module": _compiled},
    "synchronized": {"module": Synchronized, "strategy": {"gradient_as_bucket_view": True}},
    "manual": {"module": Adversarial, "strategy": {"find_unused_parameters": True}, "clip": None},
}


def train(folder: Path, kind: str, how: str) -> None:
    """Train and write the results."""
    pl.seed_everything(4, verbose=False)
    options = dict(KINDS[kind])
    module = options.pop("module")()
    clip = options.pop("clip", 0.5)
    strategy = DDPStrategy(process_group_backend="gloo", **options.pop("strategy", {}))
    callbacks = ARRANGEMENTS[how]() if how != "without" else []
    recorder = Recorder()
    trainer = pl.Trainer(
        callbacks=[*callbacks, recorder],
        max_steps=options.pop("max_steps", 8),
        strategy=strategy,
        gradient_clip_val=clip,
        **{**QUIET, "devices": 2, "use_distributed_sampler": True, **options},
    )
    trainer.fit(module, loader(40))
    found: dict[str, Any] = {
        "outputs": recorder.outputs,
        "weights": module.state_dict(),
        "metrics": {
            name: value
            for name, value in trainer.callback_metrics.items()
            if not name.startswith("scales/")
        },
        "random": torch.get_rng_state(),
        "attributes": sorted(module.__dict__),
    }
    for one in callbacks:
        if isinstance(one, UnitScaleCallback):
            found["gauge"] = one.gauge.state()
        elif isinstance(one, ScaleMonitor):
            found["snapshots"] = [
                {
                    "step": item.step,
                    "names": item.names,
                    "forward": torch.from_numpy(item.forward),
                    "backward": torch.from_numpy(item.backward),
                    "numel": torch.from_numpy(item.column("numel", "forward")),
                    "stored": torch.from_numpy(item.log2_rms("backward", stored=True)),
                }
                for item in one.snapshots
            ]
    found = tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, found)
    torch.save(found, folder / f"{kind}:{how}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    run_all(train, *sys.argv[1:])

"""Trainings by rules on CPU processes: ``python -m ... FOLDER SPREAD:MODULE:WHAT ...``.

A module of the zoo is spread as copies (``ddp``), sharded by FSDP2, split by tensor parallelism, or
whole on each rank (``alone``), in FP64. Run it once per rank. Every rank writes what it computed to
``FOLDER/RUN-RANK.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback
from tests.callbacks.rule_runs import plan_of
from tests.callbacks.runs import QUIET
from tests.distributed.launch import quiet_rank
from tests.distributed.loops_run import SPREADS, whole
from tests.loops import zoo
from tests.loops.every_loop import Rows

NUM_BATCHES, NUM_ACCUMULATED, SAVE_AT = 8, 2, 2
# Runs that leave a checkpoint: in a folder, and in one file.
_SAVING = ("distributed", "file")


class Odd(nn.Module):
    """Reads a block's weights outside of it, and runs blocks twice and in one checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(zoo.Feed() for _ in range(3))
        self.head = nn.Linear(16, zoo.NUM_CLASSES)

    def _last_blocks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = x + self.blocks[1](x)
        return middle, middle + self.blocks[2](middle)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for _ in range(2):
            x = x + self.blocks[0](x)
        middle, x = checkpoint(self._last_blocks, x, use_reentrant=False)
        weight = self.blocks[2].down.weight.t().contiguous().t()
        penalty = self.blocks[1].up.weight.square().mean() + (middle @ weight).square().mean()
        return {"loss": F.cross_entropy(self.head(x), y) + 0.01 * penalty}


class Module(pl.LightningModule):
    """Trains and validates a module of the zoo."""

    def __init__(self, net: nn.Module, spread: str, *, is_manual: bool = False) -> None:
        super().__init__()
        self.net = net
        self.spread, self.is_spread = spread, False
        self.automatic_optimization = not is_manual
        self.losses: list[Tensor] = []
        self.val_losses: list[Tensor] = []

    def configure_model(self) -> None:
        if self.is_spread:
            return
        self.is_spread = True
        if not self.spread.startswith(("ddp", "alone")):
            self.net = SPREADS[self.spread](self.net, self.device_mesh)
        elif self.spread == "ddp-checkpointed":
            for name, part in list(self.net.named_modules()):
                if isinstance(part, zoo.Feed):
                    self.net.set_submodule(name, checkpoint_wrapper(part))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)  # for dropout

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(*batch)["loss"]
        self.log("loss", loss, logger=False)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(*batch)["loss"]

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.val_losses.append(outputs)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def _doubles(name: str, count: int, seed: int) -> Rows:
    batches = zoo.batches("Blocks" if name == "Odd" else name, count, seed)
    return Rows([(x.double() if x.is_floating_point() else x, y) for x, y in batches])


def _trainer(folder: Path, run: str, unit_scale: UnitScaleCallback, *others: Any) -> pl.Trainer:
    spread, _, what = run.split(":")
    strategy: Any = DDPStrategy(process_group_backend="gloo")
    if spread == "alone":
        strategy = SingleDeviceStrategy("cpu")
    elif not spread.startswith("ddp"):
        strategy = ModelParallelStrategy(
            data_parallel_size=1 if spread == "tensor" else 2,
            tensor_parallel_size=2 if "tensor" in spread else 1,
            process_group_backend="gloo",
            save_distributed_checkpoint=what == "distributed",
        )
    saves = what in _SAVING
    options: dict[str, Any] = {"num_sanity_val_steps": 0 if saves else 1, "limit_val_batches": 1}
    if what == "plain":  # torch does not clip parameters of which only some are distributed
        options["gradient_clip_val"] = 0.1
    num_devices = {"alone": 1, "fsdp-tensor": 4}.get(spread, 2)
    saving = [
        ModelCheckpoint(
            folder / run / name,
            "{step}",
            every_n_train_steps=SAVE_AT,
            save_top_k=-1,
            save_weights_only=name == "weights",
            mode=mode,  # tells the two apart
        )
        for name, mode in (("all", "min"), ("weights", "max"))
    ]
    return pl.Trainer(
        callbacks=[unit_scale, *others, *(saving if saves else [])],
        max_epochs=1,
        strategy=strategy,
        accumulate_grad_batches=1 if what == "manual" else NUM_ACCUMULATED,
        **{
            **QUIET,
            "devices": num_devices,
            "enable_checkpointing": saves,
            **options,
        },
    )


def _module(run: str) -> Module:
    spread, name, what = run.split(":")
    torch.manual_seed(3)
    net = Odd() if name == "Odd" else zoo.new(name)
    return Module(net.double(), spread, is_manual=what == "manual")


def train(folder: Path, run: str, resume: Path | None = None) -> dict[str, Any]:
    """Train, from the beginning or from a checkpoint."""
    spread, name, what = run.split(":")
    torch.compiler.reset()  # numbers that differ between runs would not be known to Dynamo
    unit_scale = UnitScaleCallback("u-mup", compile=what == "compiled")
    monitor = ScaleMonitor(every_n_steps=2)
    budgets = [RematCallback(0.8)] if what == "budget" else []
    module, trainer = _module(run), _trainer(folder, run, unit_scale, monitor, *budgets)
    # Ranks that have a part each of a tensor have the same batches.
    rank = int(os.environ["LOCAL_RANK"])
    rank = {"alone": 0, "tensor": 0, "fsdp-tensor": rank // 2}.get(spread, rank)
    data, val = _doubles(name, NUM_BATCHES, rank), _doubles(name, 1, 9 + rank)
    trainer.fit(module, data, val, ckpt_path=resume, weights_only=False)
    if name == "Blocks" and what == "plain":
        trainer.validate(module, val, verbose=False)
    last = monitor.snapshots[-1]
    return {
        "losses": module.losses,
        "val_losses": module.val_losses,
        "weights": {key: whole(value) for key, value in module.state_dict().items()},
        "plan": plan_of(module).state(),
        "gauge": unit_scale.gauge.state(),
        "names": list(last.names),
        "rms": [
            torch.as_tensor(last.log2_rms(way, stored=False)) for way in ("forward", "backward")
        ],
        "explanation": str(unit_scale.explain()),
    }


def refusal_by_another_method(folder: Path, run: str, path: Path) -> str:
    """Return the error of a lossless validation about a checkpoint of rules."""
    trainer = _trainer(folder, run, UnitScaleCallback())
    try:
        trainer.validate(_module(run), _doubles("Blocks", 1, 9), path, verbose=False)
    except MisconfigurationException as error:
        return str(error)
    return "not refused"


def main(folder: Path, run: str) -> dict[str, Any]:
    """Return the results that a run writes."""
    try:
        found = train(folder, run)
    except (MisconfigurationException, RuntimeError, ValueError) as error:
        return {"refused": str(error)}
    if run.endswith(_SAVING):
        paths = [folder / run / name / f"step={SAVE_AT}.ckpt" for name in ("all", "weights")]
        found["is_folder"] = paths[0].is_dir()
        found["resumed"] = train(folder, run, paths[0])
        found["refused"] = [refusal_by_another_method(folder, run, path) for path in paths]
    return found


if __name__ == "__main__":
    quiet_rank()
    for name in sys.argv[2:]:
        found = main(Path(sys.argv[1]), name)
        torch.save(found, Path(sys.argv[1]) / f"{name}-{os.environ['LOCAL_RANK']}.pt")

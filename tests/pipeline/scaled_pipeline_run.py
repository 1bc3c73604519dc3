"""Trainings with this package's callbacks under PipelineStrategy, and the same on one device.

``python -m tests.pipeline.scaled_pipeline_run FOLDER NUM_RANKS RESUME_FROM CASE ...``, once per
rank. With one rank the batches are the microbatches, accumulated, but for the cases that a
checkpoint is handed on to. Every rank writes what it saw to ``FOLDER/CASE-RANK.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from examples.gpt import GPT
from lightning_unitscale import RematCallback, ScaleMonitor, Simulate, UnitScaleCallback
from lightning_unitscale.callbacks import ScaleViolation
from lightning_unitscale.strategies import PipelineStrategy
from tests.callbacks.runs import Capturing
from tests.distributed.launch import quiet_rank
from tests.pipeline.pipeline_run import CONTEXT, Branching, Groups, _points, _text
from tests.pipeline.trainers import quiet_trainer

NUM_MICROBATCHES, STEPS = 4, 4
SIZE, BROKEN_STEP = 16, 2


class Seen(pl.Callback):
    """Keeps the losses of the batches and the gradients that the optimizer is given."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients.append(
            {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        )


class Validated(pl.Callback):
    """Counts the parameters that have memory in validations within the training, and all."""

    def __init__(self) -> None:
        self.counts: set[tuple[int, int]] = set()

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            sizes = [one.untyped_storage().nbytes() for one in module.parameters()]
            self.counts.add((sum(size > 0 for size in sizes), len(sizes)))


class Breaks(pl.Callback):
    """Multiplies a weight of the last stage: by infinity, or so that its units no longer fit."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.is_done = False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        weight = module.head.weight
        # Freed where another rank has it.
        is_here = weight.untyped_storage().nbytes() > 0
        if trainer.global_step == BROKEN_STEP and not self.is_done and is_here:
            weight.data.mul_(self.factor)
            self.is_done = True


V = {"schedule": "ZBVZeroBubble"}
# One device captures what is "captured": matmuls that are rounded, names of a graph's tensors.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"clip": 0.5},
    "matmuls": {"scale": {}, "monitor": {}, "clip": 0.5, "validates": True},
    "matmuls-v": {"scale": {}, **V},
    "looks": {"scale": {"recalibrate": 1}, "breaks": 64.0, "points": True, "captured": True},
    "rules-v": {
        "scale": {"method": "unit-scaling"},
        "clip": 0.01,
        "monitor": {},
        "validates": True,
        **V,
    },
    "u-mup": {"scale": {"method": "u-mup"}, "points": True, "sgd": True},
    "simulated": {
        "scale": {"simulate": Simulate("fp8", rounding="stochastic")},
        "points": True,
        "captured": True,
    },
    "fp8": {
        "scale": {"precision": "fp8", "recalibrate": None},
        "validates": True,
        "captured": True,
    },
    "fp8-looks": {
        "scale": {"precision": "fp8", "recalibrate": 1},
        "breaks": 64.0,
        "captured": True,
    },
    "monitored": {
        "monitor": {},
        "points": True,
        "logs": True,
        "validates": True,
        "captured": True,
    },
    "bf16": {
        "scale": {},
        "monitor": {},
        "points": True,
        "precision": "bf16-mixed",
        "validates": True,
    },
    "accumulated": {
        "scale": {},
        "monitor": {},
        "points": True,
        "accumulate": 2,
        "captured": True,
    },
    "min-cut": {"remat": "min_cut", "clip": 0.5},
    "share": {"remat": 0.5, "scale": {}, "clip": 0.5},
    "stops": {
        "monitor": {"on_violation": "stop"},
        "points": True,
        "breaks": float("inf"),
        "captured": True,
    },
    "raises": {"monitor": {"on_violation": "raise"}, "points": True, "breaks": float("inf")},
}
# Three parts, each of which goes on from the one before.
PARTS: dict[str, dict[str, Any]] = {
    "two-roads": {"scale": {"recalibrate": None}, "saves": True},
    "by-rules": {"scale": {"method": "u-mup", "recalibrate": None}, "saves": True, "points": True},
}
for _name in PARTS:
    for _part in range(3):
        CASES[f"{_name}-{_part}"] = {
            **PARTS[_name],
            "max_steps": (1 + _part) * STEPS,
            "resume": f"{_name}-{_part - 1}" if _part else None,
        }


class PlainSGD(Groups):
    """Steps whose size is that of the gradient."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _module(options: dict[str, Any]) -> pl.LightningModule:
    if options.get("points"):
        return PlainSGD() if options.get("sgd") else Groups()
    return GPT(width=16, depth=2, num_heads=2, context=CONTEXT, warmup_steps=2, decay_steps=40)


def train(folder: Path, case: str, num_ranks: int, resume_from: str) -> None:
    """Train and write the results."""
    options = CASES[case]
    pl.seed_everything(4, workers=True, verbose=False)
    module = _module(options)
    seen = Seen()
    validated = Validated()
    callbacks: list[pl.Callback] = [seen, validated]
    scaling = monitor = None
    if "scale" in options:
        scaling = UnitScaleCallback(**options["scale"])
        callbacks.append(scaling)
    if "monitor" in options:
        monitor = ScaleMonitor(every_n_steps=2, **options["monitor"])
        callbacks.append(monitor)
    remat = RematCallback(options["remat"]) if "remat" in options and num_ranks > 1 else None
    if remat is not None:
        callbacks.append(remat)
    if options.get("captured"):
        callbacks.append(Capturing())
    if "breaks" in options:
        callbacks.append(Breaks(options["breaks"]))
    strategy: Any = "auto"
    size, accumulated = SIZE, options.get("accumulate", 1)
    if num_ranks > 1:
        strategy = PipelineStrategy(
            options.get("schedule", "1F1B"),
            num_microbatches=NUM_MICROBATCHES,
            process_group_backend="gloo",
            timeout=60,
        )
    elif not options.get("saves"):
        size, accumulated = SIZE // NUM_MICROBATCHES, accumulated * NUM_MICROBATCHES
    trainer = quiet_trainer(
        folder,
        devices=num_ranks,
        strategy=strategy,
        max_steps=options.get("max_steps", STEPS),
        precision=options.get("precision", "32-true"),
        # In the middle of the training, where most weights are on one rank alone.
        val_check_interval=2 * accumulated if options.get("validates") else None,
        check_val_every_n_epoch=None if options.get("validates") else 1,
        limit_val_batches=2,
        gradient_clip_val=options.get("clip"),
        accumulate_grad_batches=accumulated,
        callbacks=callbacks,
        use_distributed_sampler=False,
        logger=TensorBoardLogger(folder, "logs") if options.get("logs") else False,
    )
    data = _points() if options.get("points") else _text()
    if options.get("saves"):
        # A part is an epoch.
        data = TensorDataset(*data[: STEPS * SIZE])
    path = None
    if options.get("resume"):
        path = Path(resume_from) / f"{options['resume']}.ckpt"
    raised = None
    try:
        validation = DataLoader(data, batch_size=SIZE) if options.get("validates") else None
        trainer.fit(module, DataLoader(data, batch_size=size), validation, ckpt_path=path)
    except ScaleViolation as violation:
        raised = str(violation)
    found = {
        "losses": seen.losses,
        "gradients": seen.gradients,
        "steps": trainer.global_step,
        "raised": raised,
        "validated": {
            name: float(one) for name, one in trainer.callback_metrics.items() if "val" in name
        },
        "validated with": validated.counts,
        "attributes": sorted(module.__dict__),
        "modules": sorted(name for name, _ in module.named_modules()),
    }
    if scaling is not None:
        found |= {"gauge": scaling.gauge.state(), "explained": scaling.explain()}
    if remat is not None:
        found |= {"reports": remat.reports, "measured": remat.measured_peak_bytes}
    if monitor is not None:
        found |= {"snapshots": monitor.snapshots, "alerts": [str(one) for one in monitor.alerts]}
    if raised is None:
        found["weights"] = {name: one.clone() for name, one in module.state_dict().items()}
    if options.get("saves"):
        trainer.save_checkpoint(folder / f"{case}.ckpt")
    torch.save(found, folder / f"{case}-{trainer.global_rank}.pt")


_STEPS = {"training_step", "validation_step", "_captured_steps"}
# Settings that do not work with stages, and the words in the error.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "compile=True": ({"compile": True}, {}, {}),
    "'1F1B' or 'GPipe'": ({"remat": 0.5}, {"schedule": "ZBVZeroBubble"}, {}),
    "smallest achievable peak": ({"remat": "1KiB"}, {}, {}),
    "capture='auto' or 'step'": ({"remat": 0.5}, {"capture": "forward"}, {}),
    # A step that reads its loss.
    "which cannot be cut": ({"remat": 0.5}, {}, {"limit_train_batches": 2}),
}


def refuse(folder: Path) -> None:
    """Write down the errors."""
    errors = {}
    for name, (scaling, strategy, options) in REFUSED.items():
        trainer = quiet_trainer(
            folder,
            devices=2,
            strategy=PipelineStrategy(
                num_microbatches=2, process_group_backend="gloo", timeout=60, **strategy
            ),
            callbacks=[UnitScaleCallback(**scaling)],
            max_steps=1,
            **options,
        )
        module = Branching() if "limit_train_batches" in options else Groups()
        try:
            trainer.fit(module, DataLoader(_points(), batch_size=SIZE))
        except (MisconfigurationException, ValueError) as error:
            errors[name] = str(error)
        errors[f"{name} left"] = str([key for key in vars(module) if key in _STEPS])
        errors[f"{name} lost"] = str(any(one.isnan().any() for one in module.parameters()))
    torch.save(errors, folder / f"refused-{trainer.global_rank}.pt")


def main(folder: Path, num_ranks: int, resume_from: str, *cases: str) -> None:
    """Train all of the cases, one after the other."""
    quiet_rank()
    for one in cases:
        if one == "refused":
            refuse(folder)
        else:
            train(folder, one, num_ranks, resume_from)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *sys.argv[4:])

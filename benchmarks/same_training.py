"""Are losses and final weights of the demo bit-identical with and without the callbacks?

Trains the demo's model on its data with AdamW and with SGD, eagerly with and without the two
callbacks, then under Inductor with and without unit scaling.

Run: ``python benchmarks/same_training.py``
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from measure import RESULTS, machine
from tabulate import tabulate
from torch import Tensor
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.gpt import GPT
from examples.text import TextDataModule
from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.callbacks.lightning_steps import attach_steps

RATES = {"adamw": 3e-3, "sgd": 0.3}


class _PlainInductor(pl.Callback):
    """The captured step under Inductor, without any pass: what unit scaling is compared with."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        attach_steps(trainer, pl_module, self).use_executor("inductor")


class _Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: list[Tensor] = []

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.values.append(outputs["loss"].detach())


@dataclass(frozen=True)
class Run:
    """Losses of every step and the final weights of one training run."""

    losses: Tensor
    weights: dict[str, Tensor]


def train(optimizer: str, options: argparse.Namespace, *callbacks: pl.Callback) -> Run:
    """One run of the demo, from the same seed."""
    pl.seed_everything(1, verbose=False)
    model = GPT(learning_rate=RATES[optimizer], weight_decay=0.1, optimizer=optimizer)  # type: ignore[arg-type]
    losses = _Losses()
    trainer = pl.Trainer(
        accelerator=options.device,
        devices=1,
        # On a GPU an embedding's gradient adds up in another order in every run.
        deterministic=options.device == "cuda",
        max_steps=options.steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, losses],
    )
    trainer.fit(model, TextDataModule(context=128, batch_size=16))
    weights = {name: one.detach().cpu() for name, one in model.named_parameters()}
    return Run(torch.stack(losses.values).cpu(), weights)


def compared(name: str, plain: Run, ours: Run) -> dict[str, object]:
    """One row of the table."""
    gap = ((plain.losses - ours.losses).abs() / plain.losses).max().item()
    same = all(torch.equal(plain.weights[key], ours.weights[key]) for key in plain.weights)
    return {
        "run": name,
        "steps": len(plain.losses),
        "losses equal": int((plain.losses == ours.losses).sum()),
        "largest relative difference": gap,
        "final weights equal": same,
        "final loss": round(plain.losses[-1].item(), 4),
    }


def main() -> None:
    """Train all variants and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--output", type=Path, default=RESULTS / "same_training.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    for optimizer in RATES:
        plain = train(optimizer, options)
        ours = train(optimizer, options, UnitScaleCallback(), ScaleMonitor(every_n_steps=10))
        rows.append(compared(f"eager, {optimizer}", plain, ours))
    plain = train("adamw", options, _PlainInductor())
    ours = train("adamw", options, UnitScaleCallback(compile=True))
    rows.append(compared("Inductor, adamw", plain, ours))
    print(tabulate(rows, headers="keys"))
    options.output.parent.mkdir(exist_ok=True)
    content = {"machine": machine(), "rows": rows}
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A small network with a fault that is injected at a given step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale import ScaleMonitor
from lightning_unitscale.callbacks import ScaleWarning
from tests.callbacks.runs import QUIET, loader

FAULT_STEP, NUM_STEPS = 10, 20


class Block(nn.Module):
    """Normalized, so that a fault of one block does not grow in the next."""

    activation = staticmethod(torch.tanh)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Stack(pl.LightningModule):
    """Three blocks between two layers."""

    def __init__(self, inject: Callable[[Stack], None] | None = None, at: int = FAULT_STEP) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.Sequential(*(Block(16) for _ in range(3)))
        self.last = nn.Linear(16, 2)
        self._inject, self._at = inject, at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._inject is not None and self.global_step == self._at:
            with torch.no_grad():
                self._inject(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.last(self.blocks(self.first(x))), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def overflow(module: Stack) -> None:
    """One layer's weights times 2^12."""
    module.blocks[1].up.weight.mul_(2.0**12)


def overflow_relu(module: Stack) -> None:
    """The same, and the operand of the next layer is as large."""
    overflow(module)
    module.blocks[1].activation = torch.relu  # type: ignore[assignment]


def nan_bias(module: Stack) -> None:
    """One element of one bias is NaN."""
    module.blocks[1].down.bias[3] = torch.nan


def train(
    monitor: ScaleMonitor,
    inject: Callable[[Stack], None] | None = None,
    *,
    at: int = FAULT_STEP,
    others: Sequence[pl.Callback] = (),
    **options: Any,
) -> tuple[pl.Trainer, list[str]]:
    """Trains for 20 steps, if nothing stops it; returns the Trainer and the monitor's warnings."""
    pl.seed_everything(3, verbose=False)
    options = {"max_steps": NUM_STEPS, "default_root_dir": ".", **options}
    trainer = pl.Trainer(callbacks=[monitor, *others], **{**QUIET, **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ScaleWarning)
        warnings.filterwarnings("ignore", "ScaleMonitor: the Trainer has no logger")
        trainer.fit(Stack(inject, at), loader(4 * NUM_STEPS))
    return trainer, [str(one.message) for one in caught if one.category is ScaleWarning]

"""Modules that are scaled by rules, and the values that tests check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.rules.plan import RulePlan
from lightning_unitscale.rules.transform import PLAN_ATTRIBUTE
from tests.callbacks.runs import QUIET, Recorder
from tests.callbacks.runs import loader as loader_of

METHODS = ("unit-scaling", "u-mup")
WIDTH = 16


def adamw(module: nn.Module) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=1e-3)


class Classifier(pl.LightningModule):
    """An input layer, two residual blocks and a readout, whose loss is in the step itself."""

    def __init__(self, configure: Callable[[Any], Any] = adamw, dropout: float = 0.0) -> None:
        super().__init__()
        self.configure = configure
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 32),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(32, WIDTH),
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.readout = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.readout(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.forward(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.forward(batch[0]), batch[1])
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.forward(batch[0]), batch[1])
        self.log("test_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.forward(batch[0])

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def labeled(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Eight numbers at RMS 1, and which of the first five is largest."""
    x = torch.randn(8, generator=generator)
    return x, x[:5].argmax()


def loader(length: int = 32, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    return loader_of(length, batch_size, labeled, **options)


def trainer_with(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    options = {**QUIET, "max_steps": 6, **options}
    return pl.Trainer(callbacks=list(callbacks), **options)


def fit(
    module: pl.LightningModule,
    *callbacks: pl.Callback,
    data: Any = None,
    val: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[pl.Trainer, list[Any]]:
    """Fit with a recorder; return the Trainer and the results of the steps."""
    recorder = Recorder()
    if val is None:
        # Lightning warns of a validation_step for which there are no data.
        val, options = loader(8), {"limit_val_batches": 0, **options}
    trainer = trainer_with(*callbacks, recorder, **options)
    trainer.fit(module, loader() if data is None else data, val, ckpt_path=ckpt_path)
    return trainer, recorder.outputs


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in module.state_dict().items()}


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def plan_of(module: nn.Module) -> RulePlan:
    found: RulePlan = vars(module)[PLAN_ATTRIBUTE]
    return found


class Gradients(pl.Callback):
    """RMS of each parameter's gradient when the optimizer steps, and of the weight before."""

    def __init__(self) -> None:
        self.rms: list[dict[str, float]] = []
        self.weights: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rms.append(
            {
                name: rms(one.grad)
                for name, one in pl_module.named_parameters()
                if one.grad is not None
            }
        )
        self.weights.append(weights(pl_module))


def rates(trainer: pl.Trainer) -> Sequence[float]:
    return [group["lr"] for one in trainer.optimizers for group in one.param_groups]


def unit_scale(method: str, **options: Any) -> UnitScaleCallback:
    return UnitScaleCallback(method, **options)  # type: ignore[arg-type]

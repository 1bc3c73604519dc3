"""A LightningModule whose stored weights are scaled, and Trainers that follow the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_unitscale.callbacks.trainer_settings import RuleSettings
from lightning_unitscale.rules.learning_rates import ParameterInfo, Role
from tests.callbacks.runs import QUIET, loader

TINY = 1e-60


class Stored(pl.LightningModule):
    """Stores ``W / sigma`` and ``b / sigma`` and computes with ``W`` and ``b``, in FP64."""

    def __init__(self, configure: Callable[[Any], Any], sigma: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.configure = configure
        self.sigma = sigma
        self.first = nn.Linear(6, 8, dtype=torch.float64)
        self.second = nn.Linear(8, 2, dtype=torch.float64)
        with torch.no_grad():
            for one in self.parameters():
                one.div_(sigma)

    def infos(self) -> dict[Tensor, ParameterInfo]:
        return {
            one: ParameterInfo(
                name,
                Role.HIDDEN if one.dim() > 1 else Role.BIAS,
                fan_in=one.shape[-1],
                fan_out=one.shape[0],
                model_width=8,
                sigma=self.sigma if one.dim() > 1 else 1.0,
                output_scale=self.sigma,
            )
            for name, one in self.named_parameters()
        }

    def effective(self) -> dict[str, Tensor]:
        return {name: one.detach() * self.sigma for name, one in self.named_parameters()}

    def loss(self, batch: Any) -> Tensor:
        x, y = (one.double() * 100 for one in batch)
        for layer in (self.first, self.second):
            x = F.linear(x, layer.weight * self.sigma, layer.bias * self.sigma).tanh()
        return F.mse_loss(x, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self.configure(self)


class Settings(pl.Callback):
    """Wires the settings as the callback does."""

    def __init__(self, lr_scaling: Any = "match") -> None:
        self.lr_scaling = lr_scaling
        self.settings: RuleSettings | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Stored)
        self.settings = RuleSettings(self.lr_scaling)
        self.settings.start(trainer)
        self.settings.follow_rates(trainer, pl_module.infos())

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.settings is not None:
            self.settings.restore()

    def on_exception(self, *_: Any) -> None:
        if self.settings is not None:
            self.settings.restore()


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.3, eps=TINY)


def fit(
    module: pl.LightningModule, *callbacks: pl.Callback, ckpt_path: Any = None, **options: Any
) -> pl.Trainer:
    trainer = pl.Trainer(**{**QUIET, "max_epochs": 5, **options, "callbacks": list(callbacks)})
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def half(**options: Any) -> MixedPrecision:
    # Lightning turns precision="16-mixed" on a CPU into BF16; the plugin itself can do FP16.
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))

"""LightningModules with code that users write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def adamw(module: nn.Module) -> Any:
    """AdamW with decay of the weights only, a warm-up and a linear decay."""
    weights = [one for one in module.parameters() if one.dim() > 1]
    others = [one for one in module.parameters() if one.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 3, 1 - step / 20)
    )
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
    }


def momentum(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


class Regression(pl.LightningModule):
    """Two layers with a bias, dropout and batch statistics between them."""

    def __init__(
        self,
        optimizer: Callable[[nn.Module], Any] = momentum,
        dropout: float = 0.1,
        norm: bool = True,
    ) -> None:
        super().__init__()
        self.optimizer_of = optimizer
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(F.gelu(self.norm(self.first(x)))))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.forward(x).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer_of(self)


class Evaluated(Regression):
    """The same module with all other steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("test_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.forward(batch[0])


def regression_with(step: Callable[..., Any], **attributes: Any) -> Callable[[], Regression]:
    """A module whose ``training_step`` is ``step``, with more attributes on its class."""
    made = type("Stepping", (Regression,), {"training_step": step, **attributes})
    return lambda: made()


class Packed(Tensor):
    """Numbers as other tensors, of a class that can do next to nothing with them."""

    def __new__(cls, codes: Tensor, scale: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, _: Any, size: Any, stride: Any) -> Packed:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(*(func(part) for part in (args[0].codes, args[0].scale)))
        raise NotImplementedError(func)

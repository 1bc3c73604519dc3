"""Modules in which operands or gradients of matmuls are all zero in the first steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class _Late(pl.LightningModule):
    """Six batches of normal rows, of which the loss predicts something small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers()
        # A step's factor: a tensor, since a number would be compiled in.
        self.register_buffer("is_late", torch.zeros(()))
        self.losses: list[float] = []

    def layers(self) -> None:
        raise NotImplementedError

    def loss(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.loss(x)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.is_late.fill_(self.late_share(self.global_step))

    def late_share(self, step: int) -> float:
        return 1.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 3e-3)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(7)
        rows = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(6)]
        return torch.utils.data.DataLoader(rows, batch_size=None)


class _LowRank(nn.Module):
    """A frozen layer with LoRA's two factors, the second of which is zero."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(num_in, num_out).requires_grad_(False)
        self.a, self.b = nn.Linear(num_in, 16, bias=False), nn.Linear(16, num_out, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


class Adapters(_Late):
    """The gradients at the first factors of LoRA are zero in the first step."""

    def layers(self) -> None:
        self.up, self.down = _LowRank(WIDTH, 64), _LowRank(64, WIDTH)

    def block(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def loss(self, x: Tensor) -> Tensor:
        return 1e-4 * (self.block(x) - x.roll(1, 1)).square().mean()


class CheckpointedAdapters(Adapters):
    """The same within an activation checkpoint."""

    def loss(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=False)
        return 1e-4 * (y - x.roll(1, 1)).square().mean()


class ZeroHead(_Late):
    """A head of zeros: layers before it have no gradient in the first step."""

    def layers(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, WIDTH)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def loss(self, x: Tensor) -> Tensor:
        return 1e-4 * (self.head(self.net(x)) - x.roll(1, 1)).square().mean()


class AnnealedLoss(_Late):
    """A second loss whose weight grows from zero."""

    def layers(self) -> None:
        self.encoder, self.decoder = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.other = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))

    def late_share(self, step: int) -> float:
        return min(max(step - 2, 0) / 10, 1.0)

    def loss(self, x: Tensor) -> Tensor:
        h = F.relu(self.encoder(x))
        other = (self.other(h) - x[:, :16]).square().mean()
        return 1e-4 * ((self.decoder(h) - x).square().mean() + self.is_late * other)


class LateExpert(_Late):
    """A second expert that nothing is sent to in the first three steps."""

    def layers(self) -> None:
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)) for _ in range(2)
        )

    def late_share(self, step: int) -> float:
        return float(step >= 3)

    def loss(self, x: Tensor) -> Tensor:
        chosen = (x[:, :1] > 0) * self.is_late
        first, second = self.experts
        y = first(x * (1 - chosen)) * (1 - chosen) + second(x * chosen) * chosen
        return 1e-4 * (y - x.roll(1, 1)).square().mean()


LATE: dict[str, Callable[[], _Late]] = {
    "adapters": Adapters,
    "checkpointed adapters": CheckpointedAdapters,
    "zero head": ZeroHead,
    "annealed loss": AnnealedLoss,
    "late expert": LateExpert,
}

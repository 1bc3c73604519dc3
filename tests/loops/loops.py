"""A small training in loops with special features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_STEPS = 6


class Net(nn.Module):
    """Two linear layers, dropout and a norm, far from RMS 1."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(32, 16)
        with torch.no_grad():
            self.down.weight.mul_(0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.norm(self.up(x)))))


def batches(count: int = NUM_STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(8, 16, generator=generator) * 50,
            torch.randint(16, (8,), generator=generator),
        )
        for _ in range(count)
    ]


def new(seed: int = 3) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

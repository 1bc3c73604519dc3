"""Small modules that differ in what makes a training loop's work hard.

A module is called with a batch and its targets, and returns its loss in a dictionary, as Hugging
Face's Trainer asks; a feed-forward part ``up``, ``down`` is what tensor parallelism splits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 8


class Tied(nn.Module):
    """A multi-layer perceptron with dropout, on an embedding that is its output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CLASSES, 16)
        self.up = nn.Linear(16, 32)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, NUM_CLASSES, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.down.weight.mul_(0.01)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(x).mean(1)
        hidden = hidden + self.down(self.dropout(F.gelu(self.up(hidden))))
        return {"loss": F.cross_entropy(self.head(hidden), y)}


class Conv(nn.Module):
    """Two convolutions with a batch norm, whose statistics are state beside the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.depthwise(torch.relu(self.norm(self.stem(x))))
        hidden = torch.relu(self.up(hidden.mean((2, 3))))
        return {"loss": F.cross_entropy(self.down(hidden), y)}


class Feed(nn.Module):
    """The feed-forward part of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Transformer(nn.Module):
    """Causal self-attention of torch's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CLASSES, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.feed = Feed()
        self.head = nn.Linear(16, NUM_CLASSES)
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(x)
        normed = self.norms[0](hidden)
        hidden = (
            hidden
            + self.attention(
                normed, normed, normed, attn_mask=self.mask, is_causal=True, need_weights=False
            )[0]
        )
        hidden = hidden + self.feed(self.norms[1](hidden))
        return {"loss": F.cross_entropy(self.head(hidden)[:, -1], y)}


class Metric(nn.Module):
    """Reads numbers in the middle of its step, and goes on by them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, NUM_CLASSES)
        self.temperature = nn.Parameter(torch.eye(NUM_CLASSES))
        self.accuracies: list[float] = []

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.up(x))
        if x.sum().item() > 0:  # so of some batches
            hidden = hidden.square()
        logits = self.down(hidden)
        self.accuracies.append((logits.argmax(1) == y).float().mean().item())
        return {"loss": F.cross_entropy(logits @ self.temperature, y)}


class Blocks(nn.Module):
    """Blocks, and a matmul that the root itself computes after the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(Feed() for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.mixing = nn.Parameter(torch.randn(16, NUM_CLASSES) / 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return {"loss": F.cross_entropy(x @ self.mixing, y)}


_INPUTS: dict[type[nn.Module], Callable[[torch.Generator], Tensor]] = {
    Tied: lambda g: torch.randint(NUM_CLASSES, (4, 6), generator=g),
    Conv: lambda g: torch.randn(4, 3, 6, 6, generator=g) * 30,
    Transformer: lambda g: torch.randint(NUM_CLASSES, (4, 6), generator=g),
    Metric: lambda g: torch.randn(4, 16, generator=g) * 0.01,
    Blocks: lambda g: torch.randn(4, 6, generator=g) * 30,
}
ZOO = {kind.__name__: kind for kind in _INPUTS}


def feeds(module: nn.Module) -> list[nn.Module]:
    """The parts of a module that are sharded by themselves."""
    return [part for part in module.modules() if isinstance(part, Feed)]


def new(name: str) -> nn.Module:
    torch.manual_seed(3)
    return ZOO[name]()


def batches(name: str, count: int, seed: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    make = _INPUTS[ZOO[name]]
    return [
        (make(generator), torch.randint(NUM_CLASSES, (4,), generator=generator))
        for _ in range(count)
    ]

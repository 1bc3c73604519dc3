"""Small modules whose memory is easily miscounted."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Step(nn.Module):
    """Calls ``function(*layers, input)``."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for place, layer in enumerate(layers):
            self.add_module(f"layer{place}", layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*self.children(), *inputs)


def _residual(norm: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
    x = x * 1.5
    for _ in range(2):
        x = x + F.dropout(linear(norm(x)), 0.1)
    return x * x


def _views(linear: nn.Module, x: Tensor) -> Tensor:
    h = linear(x)
    left, right = h.chunk(2, -1)
    return left.exp() * right[:, :1].expand_as(left)


def _in_place(linear: nn.Module, x: Tensor) -> Tensor:
    h = linear(x)
    h.mul_(2).add_(1)
    h = h.relu_()
    return h.tanh() * h


def _attention(linear: nn.Module, x: Tensor) -> Tensor:
    q, k, v = linear(x).view(4, 40, 3, 2, 8).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _matmuls(linear: nn.Module, x: Tensor) -> Tensor:
    q, k, v = linear(x).view(4, 40, 3, 2, 8).permute(2, 0, 3, 1, 4)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)


def _autocast(a: nn.Module, norm: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return b(norm(F.gelu(a(x))).softmax(-1)).float() + b(a(x))


def _checkpointed(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    h = checkpoint(lambda y: F.gelu(b(F.gelu(a(y)))), x * 2, use_reentrant=False)
    return h * h


def _tied(embedding: nn.Module, norm: nn.Module, ids: Tensor) -> Tensor:
    h = norm(embedding(ids))
    return F.cross_entropy(F.linear(h, embedding.weight).flatten(0, 1), ids.flatten())


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


Example = tuple[nn.Module, Tensor]

NETWORKS: dict[str, Callable[[], Example]] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)),
        _normal(32, 64),
    ),
    "residual": lambda: (
        Step(_residual, nn.LayerNorm(64), nn.Linear(64, 64)),
        _normal(4, 16, 64),
    ),
    "views": lambda: (Step(_views, nn.Linear(32, 64)), _normal(50, 32)),
    "in_place": lambda: (Step(_in_place, nn.Linear(32, 64)), _normal(50, 32)),
    "attention": lambda: (Step(_attention, nn.Linear(16, 48)), _normal(4, 40, 16)),
    "attention_as_matmuls": lambda: (Step(_matmuls, nn.Linear(16, 48)), _normal(4, 40, 16)),
    "multi_head": lambda: (
        Step(
            lambda mha, x: mha(x, x, x, need_weights=False)[0],
            nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True),
        ),
        _normal(4, 20, 32),
    ),
    "autocast": lambda: (
        Step(_autocast, nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64)),
        _normal(512, 32),
    ),
    "checkpoint": lambda: (
        Step(_checkpointed, nn.Linear(64, 128), nn.Linear(128, 64)),
        _normal(400, 64),
    ),
    "tied": lambda: (
        Step(_tied, nn.Embedding(100, 32), nn.LayerNorm(32)),
        torch.randint(100, (4, 30)),
    ),
    "batch_norm": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
            nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(),
            nn.Linear(64 * 36, 10),
        ),
        _normal(8, 3, 16, 16),
    ),
    "recurrent": lambda: (
        Step(lambda rnn, x: rnn(x)[0], nn.GRU(16, 32, batch_first=True)),
        _normal(4, 7, 16),
    ),
    "bfloat16": lambda: (
        nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.LayerNorm(128)).bfloat16(),
        _normal(32, 64).bfloat16(),
    ),
}  # fmt: skip

"""Small models of the common kinds, written the way people write them, each with its loss.

``MODELS[name]()`` makes a model and the inputs of one step, for which it returns a scalar.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Example = tuple[nn.Module, tuple[Any, ...]]
VOCABULARY = 64


class Of(nn.Module):
    """A function of a list of modules and the inputs."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.parts, *inputs)


class Attention(nn.Module):
    """Causal or full self-attention, fused."""

    def __init__(self, width: int, num_heads: int, *, is_causal: bool = True) -> None:
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).reshape(b, t, c))


class Mlp(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int, num_heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder with learned positions."""

    def __init__(self, width: int = 64, depth: int = 2, *, is_tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class PostNorm(nn.Module):
    """An encoder with torch's own post-norm layers and a classifier on the first token."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(1, 32, width) * 0.02)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.1, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.tokens(tokens) + self.positions[:, : tokens.shape[1]])
        x = self.layers(x)
        return F.cross_entropy(self.head(torch.tanh(self.pooler(x[:, 0]))), labels)


class UNet(nn.Module):
    """Down and up again, with skips that are added and skips that are concatenated."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.enter = nn.Sequential(
            nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, 1, 1)
        )
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Sequential(
            nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        )
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge = nn.Conv2d(2 * width, width, 3, padding=1)
        self.norm, self.out = nn.GroupNorm(4, width), nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        x = self.stem(images)
        x = x + self.enter(x)
        y = self.down(x)
        y = y + self.middle(y)
        x = self.merge(torch.cat([self.up(F.silu(y)), x], dim=1))
        return F.mse_loss(self.out(F.silu(self.norm(x))), target)


class LSTM(nn.Module):
    """A recurrent network whose gates are written out."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.input, self.state = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        h = c = x.new_zeros(x.shape[0], x.shape[2])
        outputs = []
        for t in range(x.shape[1] - 1):
            i, f, g, o = (self.input(x[:, t]) + self.state(h)).chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        logits = self.head(torch.stack(outputs, dim=1))
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])


class Experts(nn.Module):
    """A mixture of experts in which every token goes to the best two of four."""

    def __init__(self, width: int, num_experts: int = 4, k: int = 2) -> None:
        super().__init__()
        self.k = k
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(dim=-1).topk(self.k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros(*x.shape[:-1], len(self.up)).scatter(-1, chosen, weights)
        hidden = F.silu(torch.einsum("btc,ech->beth", x, self.up))
        made = torch.einsum("beth,ehc->betc", hidden, self.down)
        return torch.einsum("betc,bte->btc", made, gates)


class MixtureOfExperts(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.norm, self.experts = (
            nn.Embedding(VOCABULARY, width),
            nn.RMSNorm(width),
            Experts(width),
        )
        self.last, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.experts(self.norm(x))
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), tokens.flatten())


class GraphLayer(nn.Module):
    """Messages along edges, summed at nodes and divided by the square root of the degrees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.own = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = torch.zeros(x.shape[0]).index_add(0, target, torch.ones(len(target)))
        sums = torch.zeros_like(x).index_add(0, target, self.message(x)[source])
        return F.relu(self.own(x) + sums / degree.clamp(min=1).sqrt()[:, None])


class GraphNetwork(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter, self.one, self.two = nn.Linear(12, width), GraphLayer(width), GraphLayer(width)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        x = self.two(self.one(F.relu(self.enter(x)), edges), edges)
        return F.cross_entropy(self.out(x), labels)


class BasicBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += x
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(BasicBlock(channels), BasicBlock(channels))
        self.head = nn.Linear(channels, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(images))))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)


class ConvNet(nn.Module):
    """Convolutions and pools without a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(images)), labels)


def tokens(length: int = 16, batch: int = 4) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def images(size: int = 16, batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, size, size)


def labels(batch: int = 4) -> Tensor:
    return torch.randint(5, (batch,))


def _graph() -> Example:
    edges = torch.randint(40, (2, 160))
    return GraphNetwork(), (torch.randn(40, 12), edges, torch.randint(3, (40,)))


MODELS: dict[str, Callable[[], Example]] = {
    "gpt": lambda: (GPT(), (tokens(),)),
    "post_norm": lambda: (PostNorm(), (tokens(), labels())),
    "u_net": lambda: (UNet(), (images(), images())),
    "lstm": lambda: (LSTM(), (tokens(8),)),
    "experts": lambda: (MixtureOfExperts(), (tokens(),)),
    "graph_network": _graph,
    "res_net": lambda: (ResNet(), (images(), labels())),
    "conv_net": lambda: (ConvNet(), (images(), labels())),
}


class GPTWithoutModules(nn.Module):
    """Attention, norm and activation written out by hand, and a rotary embedding."""

    def __init__(self, width: int = 32, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, width) * 0.02)
        self.gain = nn.Parameter(torch.ones(width))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[-2])[:, None] * 0.3 ** torch.arange(half)
        cos, sin = (f(torch.cat([angle, angle], -1)) for f in (torch.cos, torch.sin))
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            value(x).view(b, t, self.num_heads, -1).transpose(1, 2)
            for value in (self.q, self.k, self.v)
        )
        scores = self.rotate(q) @ self.rotate(k).transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        scores = scores - scores.amax(-1, keepdim=True)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        return self.o((weights @ v).transpose(1, 2).reshape(b, t, c))

    def mlp(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return self.down(h)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens]
        x = x + self.attend(self.norm(x))
        x = x + self.mlp(self.norm(x))
        logits = self.head(self.norm(x))[:, :-1].float()
        chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
        return -chosen.mean()

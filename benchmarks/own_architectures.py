"""Small architectures from no model library; each returns its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Example = tuple[nn.Module, Mapping[str, Tensor]]


class UNet(nn.Module):
    """Two levels down and up, with concatenated skips; predicts the noise in an image."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(4 * width, 4 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge = nn.Conv2d(4 * width, 2 * width, 3, padding=1)
        self.top = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 3, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, n * width) for n in (1, 2, 4, 2))

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        first = F.silu(self.norms[0](self.enter(images + noise)))
        second = F.silu(self.norms[1](self.down(first)))
        third = F.silu(self.norms[2](self.bottom(second)))
        third = third + F.silu(self.middle(third))
        x = torch.cat([self.up(third), second], 1)
        x = F.silu(self.norms[3](self.merge(x)))
        x = torch.cat([self.top(x), first], 1)
        return F.mse_loss(self.leave(x), noise)


class LSTMCells(nn.Module):
    """Two LSTM cells, one over the other, written out over time."""

    def __init__(self, width: int = 64, vocabulary: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.inputs = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.states = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for from_input, from_state in zip(self.inputs, self.states, strict=True):
            state = cell = x.new_zeros(x.shape[0], x.shape[2])
            made = []
            for one in x.unbind(1):
                enter, keep, new, show = (from_input(one) + from_state(state)).chunk(4, -1)
                cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
                state = show.sigmoid() * cell.tanh()
                made.append(state)
            x = torch.stack(made, 1)
        logits = self.head(x[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class MixtureOfExperts(nn.Module):
    """A transformer block whose feed-forward layer is two of four experts, chosen per token."""

    def __init__(self, width: int = 64, num_experts: int = 4, vocabulary: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 4 * width, width) / (4 * width) ** 0.5)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = self.norm(x).flatten(0, 1)
        share, chosen = self.router(y).softmax(-1).topk(2)
        gates = torch.zeros(len(y), len(self.up)).scatter(1, chosen, share / share.sum(-1, True))
        made = F.gelu(y @ self.up) @ self.down  # (experts, tokens, width)
        x = x + (gates.T[..., None] * made).sum(0).view_as(x)
        logits = self.head(x[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class GraphNetwork(nn.Module):
    """Two rounds of messages along edges, summed where they arrive, and a label for the graph."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def forward(self, features: Tensor, sources: Tensor, targets: Tensor, label: Tensor) -> Tensor:
        x = F.relu(self.enter(features))
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = F.relu(message(torch.cat([x[sources], x[targets]], -1)))
            arrived = torch.zeros_like(x).index_add(0, targets, sent)
            x = x + F.relu(update(torch.cat([x, arrived], -1)))
        return F.cross_entropy(self.head(x.mean(0, keepdim=True)), label)


class PostNorm(nn.Module):
    """An encoder of torch's own layers, which normalize after the sum."""

    def __init__(self, width: int = 64, vocabulary: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.encoder(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _tokens() -> Tensor:
    return torch.randint(100, (4, 16), generator=torch.Generator().manual_seed(0))


def _with_tokens(model: type[nn.Module]) -> Callable[[], Example]:
    def make() -> Example:
        torch.manual_seed(0)
        return model(), {"tokens": _tokens()}

    return make


def _unet() -> Example:
    torch.manual_seed(0)
    return UNet(), {"images": torch.randn(2, 3, 16, 16), "noise": torch.randn(2, 3, 16, 16)}


def _graph() -> Example:
    torch.manual_seed(0)
    edges = torch.randint(40, (2, 160))
    features = torch.randn(40, 8)
    inputs = {"features": features, "sources": edges[0], "targets": edges[1]}
    return GraphNetwork(), {**inputs, "label": torch.tensor([2])}


OWN: Mapping[str, Callable[[], Example]] = {
    "own U-Net": _unet,
    "own LSTM": _with_tokens(LSTMCells),
    "own mixture of experts": _with_tokens(MixtureOfExperts),
    "own graph network": _graph,
    "own post-norm encoder": _with_tokens(PostNorm),
}

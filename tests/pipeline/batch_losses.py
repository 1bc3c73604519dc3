"""Losses that can, and cannot, be computed from microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, LENGTH, CLASSES, WIDTH = 8, 6, 11, 16
# Of a step, its logits of shape (samples, length, classes) and its batch.
Loss = Callable[[Any, Tensor, dict[str, Tensor]], Tensor]


class Losing(nn.Module):
    """Two layers and a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)
        self.second = nn.Linear(32, CLASSES)
        self.register_buffer("weights", torch.rand(CLASSES) + 0.1)
        self.loss = loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss."""
        return self.loss(self, self.second(torch.tanh(self.first(batch["x"]))), batch)


def batch() -> dict[str, Tensor]:
    """A batch whose microbatches have from no target to all of them."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
    labels[:2] = -100
    labels[2, 2:] = -100
    labels[5, 1:] = -100
    shape = (SAMPLES, LENGTH, CLASSES)
    return {
        "x": torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator),
        "labels": labels,
        "mask": (labels != -100).float(),
        "soft": torch.rand(shape, generator=generator),
        "values": torch.randn(shape, generator=generator),
        "classes": torch.randint(CLASSES, (SAMPLES,), generator=generator),
        "binary": torch.randint(2, (SAMPLES,), generator=generator).float(),
    }


def _flat(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return logits.view(-1, CLASSES), batch["labels"].view(-1)


def _tokens(logits: Tensor, batch: dict[str, Tensor], **options: Any) -> Tensor:
    return F.cross_entropy(*_flat(logits, batch), **options)


def _each(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return _tokens(logits, batch, reduction="none").view(batch["labels"].shape)


def _by_class(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    losses, labels = _each(logits, batch), batch["labels"]
    kinds = [labels == kind for kind in range(3)]
    return sum(((losses * kind).sum() / kind.sum().clamp(min=1) for kind in kinds), torch.zeros(()))


def _pooled(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    last = batch["mask"].sum(1).long().clamp(min=1) - 1
    return F.cross_entropy(logits[torch.arange(len(logits)), last], batch["classes"])


def _without_first(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["mask"].clone()
    mask[:, 0] = 0
    return (_each(logits, batch) * mask).sum() / mask.sum()


def _balanced(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(logits.mean(1), batch["classes"], reduction="none")
    weights = torch.where(batch["binary"] > 0, 1 / batch["binary"].mean(), torch.ones(()))
    return (losses * weights).mean()


def _written(
    logits: Tensor,
    batch: dict[str, Tensor],
    write: Callable[[Tensor], object],
    then: Callable[[Tensor], object] = lambda logits: None,
) -> Tensor:
    labels = batch["labels"].clone()
    write(labels)
    then(logits)
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def _columns(labels: Tensor) -> None:
    labels[:, 0] = 1
    labels[..., 2:3] = 2
    labels[::2] = 3
    labels[labels > 7] = 4
    labels[torch.arange(len(labels)), labels[:, 1].clamp(0, LENGTH - 1)] = 5


FOLLOW: dict[str, Loss] = {
    "tokens": lambda s, z, b: _tokens(z, b),
    "another class ignored": lambda s, z, b: F.cross_entropy(
        z.view(-1, CLASSES), b["labels"].clamp(min=0).view(-1), ignore_index=3
    ),
    "classes second": lambda s, z, b: F.cross_entropy(z.transpose(1, 2), b["labels"]),
    "class weights": lambda s, z, b: _tokens(z, b, weight=s.weights),
    "smoothed": lambda s, z, b: _tokens(z, b, label_smoothing=0.1),
    "smoothed, weights": lambda s, z, b: _tokens(z, b, weight=s.weights, label_smoothing=0.1),
    "nll": lambda s, z, b: F.nll_loss(F.log_softmax(z.view(-1, CLASSES), -1), b["labels"].view(-1)),
    "soft targets": lambda s, z, b: F.cross_entropy(
        z.view(-1, CLASSES), b["soft"].softmax(-1).view(-1, CLASSES), weight=s.weights
    ),
    "sum": lambda s, z, b: _tokens(z, b, reduction="sum"),
    "sum / samples": lambda s, z, b: _tokens(z, b, reduction="sum") / z.shape[0],
    "sum * (1 / samples)": lambda s, z, b: _tokens(z, b, reduction="sum") * (1 / len(z)),
    "sum / numel": lambda s, z, b: _tokens(z, b, reduction="sum") / b["labels"].numel(),
    "sum / tokens": lambda s, z, b: _tokens(z, b, reduction="sum") / (b["labels"] != -100).sum(),
    "masked": lambda s, z, b: (_each(z, b) * b["mask"]).sum() / b["mask"].sum(),
    "masked, clamped": lambda s, z, b: (
        (_each(z, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1)
    ),
    "a mask with a write": lambda s, z, b: _without_first(z, b),
    "written columns and masks": lambda s, z, b: _written(z, b, _columns),
    "normalized mask": lambda s, z, b: (_each(z, b) * (b["mask"] / b["mask"].sum())).sum(),
    "mean of sentences": lambda s, z, b: (
        (_each(z, b) * b["mask"]).sum(1) / b["mask"].sum(1).clamp(min=1)
    ).mean(),
    "guarded": lambda s, z, b: torch.where(b["mask"].sum() > 0, _tokens(z, b), torch.zeros(())),
    "times a share": lambda s, z, b: _tokens(z, b) * b["mask"].mean(),
    "by class": lambda s, z, b: _by_class(z, b),
    "last tokens": lambda s, z, b: _pooled(z, b),
    "weights of the batch": lambda s, z, b: _balanced(z, b),
    "and decay": lambda s, z, b: (
        _tokens(z, b) + 0.01 * sum(one.square().sum() for one in s.parameters())
    ),
    "and another mean": lambda s, z, b: _tokens(z, b) + 0.1 * F.mse_loss(z, b["values"]),
    "mixture": lambda s, z, b: _tokens(z, b, reduction="sum") + 0.1 * F.mse_loss(z, b["values"]),
    "stacked": lambda s, z, b: torch.stack([_tokens(z, b), F.mse_loss(z, b["values"])]).mean(),
    "squares": lambda s, z, b: F.mse_loss(z, b["values"], reduction="sum"),
    "huber": lambda s, z, b: F.huber_loss(z, b["values"]),
    "cosine": lambda s, z, b: 1 - F.cosine_similarity(z, b["values"], dim=-1).mean(),
    "binary, pos_weight": lambda s, z, b: F.binary_cross_entropy_with_logits(
        z, b["soft"], pos_weight=s.weights
    ),
    "binary, weight": lambda s, z, b: F.binary_cross_entropy_with_logits(
        z, b["soft"], weight=b["mask"][..., None].expand_as(z)
    ),
    "kl batchmean": lambda s, z, b: F.kl_div(
        F.log_softmax(z, -1), b["soft"].softmax(-1), reduction="batchmean"
    ),
    "kl mean": lambda s, z, b: F.kl_div(F.log_softmax(z, -1), b["soft"].softmax(-1)),
    "triplet": lambda s, z, b: F.triplet_margin_loss(z[:, 0], z[:, 1], z[:, 2]),
    "centered targets": lambda s, z, b: F.mse_loss(z, b["values"] - b["values"].mean(0)),
    "scaled targets": lambda s, z, b: F.mse_loss(z, b["values"]) / b["values"].std(),
    "two views": lambda s, z, b: F.mse_loss(*torch.cat([z, b["values"]]).chunk(2)),
    "of shapes": lambda s, z, b: (z * z.new_ones(CLASSES) + torch.zeros_like(z)).square().mean(),
    "other names": lambda s, z, b: F.mse_loss(
        torch.cat([z, b["values"]], axis=2).softmax(axis=-1), torch.cat([b["soft"]] * 2, axis=-1)
    ),
    "mean of means": lambda s, z, b: (z - b["values"]).square().mean(0).mean(),
}

# With a word of the reason.
COUPLED: dict[str, tuple[Loss, str]] = {
    "root": (lambda s, z, b: F.mse_loss(z, b["values"]).sqrt(), "sqrt is not linear"),
    "square": (lambda s, z, b: (lambda mean: mean * mean)(z.mean()), "mul is not linear"),
    "matmul": (lambda s, z, b: z.mean() * z.square().mean(), "mul is not linear"),
    "norm": (lambda s, z, b: (z - b["values"]).norm(), "norm is neither"),
    "dice": (
        lambda s, z, b: (z.sigmoid() * b["soft"]).sum() / (z.sigmoid().sum() + b["soft"].sum()),
        "truediv is not linear",
    ),
    "mask of the model": (
        lambda s, z, b: (lambda k: (z.mean(-1) * k).sum() / k.sum())((z[..., 0] > 0).float()),
        "truediv is not linear",
    ),
    "contrastive": (
        lambda s, z, b: F.cross_entropy(z.mean(1) @ b["values"].mean(1).T, torch.arange(len(z))),
        "matmul compares each sample",
    ),
    "distances": (
        lambda s, z, b: torch.cdist(z.mean(1), z.mean(1)).mean(), "cdist compares each sample"
    ),
    "broadcast": (lambda s, z, b: F.mse_loss(z[:, 0, :1], b["binary"]), "shapes differ"),
    "triplet of neighbors": (
        lambda s, z, b: F.triplet_margin_loss(z[:, 0], z[:, 1], z[:, 0].roll(1, 0)),
        "roll runs along the batch",
    ),
    "softmax over samples": (
        lambda s, z, b: (F.softmax(z[:, 0], dim=0) * b["values"][:, 0]).sum(0).mean(),
        "softmax runs along the batch",
    ),
    "sum over samples": (
        lambda s, z, b: z.cumsum(axis=0).square().mean(), "cumsum runs along the batch"
    ),
    "centered": (lambda s, z, b: (z - z.mean(0)).square().mean(), "sub uses a mean"),
    "spread": (lambda s, z, b: F.relu(1 - z[:, 0].var(0)).mean(), "var is neither"),
    "hard examples": (lambda s, z, b: _each(z, b).view(-1).topk(5).values.mean(), "topk is"),
    "largest": (lambda s, z, b: _each(z, b).max(), "max is neither"),
    "first sample": (
        lambda s, z, b: F.cross_entropy(z[0], b["classes"][0].expand(LENGTH)), "getitem is neither"
    ),
    "pseudo labels": (
        lambda s, z, b: F.cross_entropy(z.view(-1, CLASSES), z.argmax(-1).view(-1)),
        "the number of targets that count",
    ),
    "written first": (lambda s, z, b: _written(z, b, lambda y: y[:1].fill_(-100)), "at a position"),
    "set first": (
        lambda s, z, b: _written(z, b, lambda y: y.__setitem__(slice(3), -100)), "on the position"
    ),
    "set one": (
        lambda s, z, b: _written(z, b, lambda y: y.__setitem__((0, slice(2, None)), 1)),
        "on the position",
    ),
    "zeroed": (lambda s, z, b: _written(z * 1, b, lambda y: y, lambda z: z[1].zero_()), "getitem"),
    "filled": (
        lambda s, z, b: _written(z, b, lambda y: y.index_fill_(0, torch.tensor([0, 1]), 1)),
        "on the position",
    ),
    "one exchanged": (
        lambda s, z, b: F.mse_loss(z.select_scatter(z.new_zeros(z.shape[1:]), 0, 0), b["values"]),
        "on the position",
    ),
    "weights by position": (
        lambda s, z, b: (_each(z, b).mean(1) * torch.arange(len(z))).mean(), "on the position"
    ),
    "halves": (lambda s, z, b: F.mse_loss(*z.chunk(2)), "another order"),
    "mixed": (
        lambda s, z, b: F.mse_loss(z[torch.randperm(len(z))], b["values"]), "at random"
    ),
}  # fmt: skip

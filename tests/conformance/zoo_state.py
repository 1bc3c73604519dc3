"""Modules with state: teachers, codebooks, queues, statistics."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

from tests.conformance.cases import Zoo, each, linear, noise, rows

zoo = Zoo("state")
CASES = zoo.cases


class Teacher(nn.Module):
    """A student, and a teacher that follows it by one of several ways to write."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.student = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def follow(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if self.how == "data":
                old.data.mul_(0.9).add_(new.data, alpha=0.1)
            elif self.how == "replaced":
                old.data = old.data * 0.9 + new.data * 0.1
            elif self.how == "lerp":
                with torch.no_grad():
                    old.lerp_(new, 0.1)
            elif self.how == "copied":
                old.detach().copy_(0.9 * old + 0.1 * new.detach())
        if self.how == "loaded":
            mixed = {
                name: 0.9 * value + 0.1 * self.student.state_dict()[name]
                for name, value in self.teacher.state_dict().items()
            }
            self.teacher.load_state_dict(mixed)
        if self.how == "foreach":
            with torch.no_grad():
                torch._foreach_lerp_(
                    list(self.teacher.parameters()), list(self.student.parameters()), 0.1
                )

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        return -(target * self.student(x).log_softmax(-1)).sum(-1).mean()


for _how in ("data", "replaced", "lerp", "copied", "loaded", "foreach"):
    zoo.add(f"teacher_{_how}", lambda how=_how: Teacher(how))


class Codebook(nn.Module):
    """Vector quantization, its codes moving averages of what they are assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        distance = h.square().sum(1, keepdim=True) - 2 * h @ self.codes.mT
        chosen = F.one_hot((distance + self.codes.square().sum(1)).argmin(1), 6).float()
        quantized = chosen @ self.codes
        self.counts.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.sums.data.mul_(0.9).add_(chosen.mT @ h.detach(), alpha=0.1)
        self.codes.data.copy_(self.sums / self.counts[:, None])
        return self.decoder(h + (quantized - h).detach()) + (h - quantized.detach()).square().mean()


zoo.add("codebook", Codebook)


class Clipped(nn.Module):
    """A critic whose weights are clipped in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        for param in self.critic.parameters():
            param.data.clamp_(-0.05, 0.05)
        return self.critic(x)


zoo.add("weights_clipped_through_data", Clipped)


class Momentum(nn.Module):
    """Contrast with a queue of keys that a second encoder makes."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(12, 4), dim=1))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for old, new in zip(self.key.parameters(), self.query.parameters(), strict=True):
                old.data = old.data * 0.99 + new.data * 0.01
            k = F.normalize(self.key(x[torch.randperm(4)]), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().mT], 1) / 0.07
        start = int(self.position)
        self.queue[start : start + 4] = k
        self.position[0] = (start + 4) % 12
        return F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))


zoo.add("queue_of_keys", Momentum)

NORMS = {
    "batch_norm": (lambda: nn.BatchNorm1d(8), rows(4, 8)),
    "batch_norm_cumulative": (lambda: nn.BatchNorm1d(8, momentum=None), rows(4, 8)),
    "batch_norm_without_statistics": (
        lambda: nn.BatchNorm1d(8, track_running_stats=False, affine=False),
        rows(4, 8),
    ),
    "group_norm": (lambda: nn.GroupNorm(2, 8), rows(4, 8)),
    "instance_norm": (lambda: nn.InstanceNorm1d(4, track_running_stats=True), rows(2, 4, 8)),
    "rms_norm": (lambda: nn.RMSNorm(8), rows(4, 8)),
}
for _name, (_norm, _batches) in NORMS.items():
    zoo.add(
        _name,
        lambda norm=_norm: nn.Sequential(nn.Linear(8, 8), norm(), nn.ReLU(True), nn.Linear(8, 8)),
        _batches,
    )


class Images(nn.Module):
    """Convolutions with batch statistics, as in every residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.stem(x)), inplace=True)
        h = F.relu(h + self.norm(self.body(h)), inplace=True)
        return self.head(F.max_pool2d(h, 2).mean((2, 3)))


zoo.add("residual_images", Images, rows(2, 3, 6, 6))


@zoo.step(a=linear(), b=linear(), mean=lambda: torch.zeros(8), steps=lambda: torch.tensor(0))
def running_mean(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.steps += 1
    m.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return m.b(h - m.mean) / m.steps


@zoo.step(a=linear(), b=linear(), mean=lambda: torch.zeros(8))
def running_mean_of_a_new_buffer(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return m.b(h - m.mean)


@zoo.step(a=linear(), b=linear(), cache=lambda: torch.zeros(2, 8))
def cache_that_grows(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.cache = torch.cat([m.cache, h.detach()])
    return m.b((h @ m.cache.mT / 100).softmax(-1) @ m.cache)


@zoo.step()
def lists_and_counters(m: Any, x: Tensor) -> Tensor:
    m.history = [*getattr(m, "history", []), float(x.mean())]
    m.count = getattr(m, "count", 0) + 1
    return m.b(m.a(x)) * m.count


@zoo.step()
def list_of_activations(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "history"):
        m.history = []
    h = m.a(x)
    m.history.append(h.detach())
    return m.b(h) + sum(old.mean() for old in m.history)


@zoo.step(a=linear(), b=linear())
def activation_of_the_last_call(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    last = getattr(m, "last", None)
    m.last = h.detach()
    return m.b(h) if last is None else m.b(h) @ last.mT


@zoo.step()
def train_and_eval_within_the_step(m: Any, x: Tensor) -> Tensor:
    m.a.eval()
    h = F.dropout(m.a(x), 0.5, training=m.a.training)
    m.a.train()
    return F.dropout(m.b(h), 0.5, training=m.a.training)


class Metrics(nn.Module):
    """Metrics that are updated in the step, one of which counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.confusion = torchmetrics.classification.MulticlassConfusionMatrix(3)
        self.mean = torchmetrics.MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.layer(x)
        target = torch.arange(4) % 3
        loss = F.cross_entropy(logits, target)
        self.mean.update(loss.detach())
        accuracy = self.accuracy(logits, target)
        self.confusion.update(logits, target)
        return loss * (1.0 + accuracy) + self.mean.compute()


zoo.add("metrics_in_the_step", Metrics)


@zoo.step(each(lambda i: (noise(i, 4, 8), torch.arange(4) % 3)), a=linear(8, 3))
def metrics_as_functions(m: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = m.a(x)
    score = torchmetrics.functional.f1_score(logits, y, task="multiclass", num_classes=3)
    return F.cross_entropy(logits, y) + score


class Optimized(nn.Module):
    """An optimizer of the module's own, which steps in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.probe, self.layer = nn.Linear(8, 8), nn.Linear(8, 8)
        self._optimizer = torch.optim.Adam(self.probe.parameters(), lr=0.01)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.probe(x.detach()).square().mean()
        gradients = torch.autograd.grad(loss, list(self.probe.parameters()))
        for param, gradient in zip(self.probe.parameters(), gradients, strict=True):
            param.grad = gradient
        self._optimizer.step()
        return self.layer(x) + self.probe(x).detach()


zoo.add("optimizer_in_the_step", Optimized)


@zoo.step()
def copied_module_in_the_step(m: Any, x: Tensor) -> Tensor:
    return m.b(copy.deepcopy(m.a).requires_grad_(False)(x))


@zoo.step()
def deep_copied_activation(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h) * copy.deepcopy(h.detach())


class Reached(nn.Module):
    """Reads a weight by way of its state dictionary, and a submodule by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.state_dict()["second.bias"]
        return (
            self.get_submodule("first")(x) @ dict(self.named_parameters())["second.weight"] + bias
        )


zoo.add("weights_by_name", Reached)

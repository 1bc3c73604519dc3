"""Modules with an operand or a gradient that has no usable unit at first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 32


class Late(nn.Module):
    """Returns the loss of a step.

    Attributes:
        first: The step at which each tensor gives a unit, of those that give none at step 0.
    """

    first: ClassVar[Mapping[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.loss(x, step).float()

    def loss(self, x: Tensor, step: int) -> Tensor:
        raise NotImplementedError


class Lora(Late):
    """A frozen layer with two factors, of which the second begins with zeros."""

    first: ClassVar = {"b.linear:weight": 1, "a.linear": 1}

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)
        self.a, self.b = nn.Linear(SIZE, 16, bias=False), nn.Linear(16, SIZE, bias=False)
        nn.init.zeros_(self.b.weight)

    def loss(self, x: Tensor, step: int) -> Tensor:
        return (self.body(x) + 2 * self.b(self.a(x)) - x).square().mean()


class ZeroHead(Late):
    """A head that begins with zeros, bias included."""

    first: ClassVar = {"head.linear:weight": 1, "body.linear": 1}

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIZE, SIZE)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def loss(self, x: Tensor, step: int) -> Tensor:
        return (self.head(F.gelu(self.body(x))) - x).square().mean()


class Annealed(Late):
    """A second loss whose weight is zero for three steps."""

    first: ClassVar = {"aux.linear": 3}

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(SIZE, SIZE)

    def loss(self, x: Tensor, step: int) -> Tensor:
        h = torch.tanh(self.body(x))
        weight = 1e-4 * max(step - 2, 0)
        return (h - x).square().mean() + weight * (self.aux(h) * x).mean()


class LateExpert(Late):
    """An expert without tokens for two steps, whose gradients are small later."""

    first: ClassVar = {
        "expert.linear:input": 2,
        "expert.linear:weight": 2,
        "expert.linear": 2,
    }

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(SIZE, SIZE)

    def loss(self, x: Tensor, step: int) -> Tensor:
        chosen = x[:, 0] > (0.0 if step >= 2 else 100.0)
        y = torch.zeros_like(x)
        y[~chosen] = self.body(x[~chosen])
        y[chosen] = self.expert(x[chosen])
        return (y - x).square().mean() * 1e-5


class DeadLayer(Late):
    """A layer behind ReLUs of which none is alive for two steps."""

    first: ClassVar = {"down.linear:input": 2, "body.linear": 2}

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(SIZE, SIZE)

    def loss(self, x: Tensor, step: int) -> Tensor:
        h = F.relu(self.body(x) - (0.0 if step >= 2 else 100.0))
        return (self.down(h) - x).square().mean()


class NotFinite(Late):
    """A loss that is not finite in the first two steps, whose gradients are dropped."""

    first: ClassVar = {"head.linear:input": 2, "head.linear": 2, "body.linear": 2}

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIZE, SIZE)

    def loss(self, x: Tensor, step: int) -> Tensor:
        h = torch.tanh(self.body(x)) * (1.0 if step >= 2 else math.inf)
        return (self.head(h) - x).square().mean()


class Unfrozen(Late):
    """A layer that gets gradients from the third step on."""

    first: ClassVar = {"body.linear": 2}

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIZE, SIZE)

    def loss(self, x: Tensor, step: int) -> Tensor:
        self.body.requires_grad_(step >= 2)
        return (self.head(torch.tanh(self.body(x))) - x).square().mean()


LATE: dict[str, Callable[[], Late]] = {
    one.__name__: one
    for one in (Lora, ZeroHead, Annealed, LateExpert, DeadLayer, NotFinite, Unfrozen)
}


def batches(num_steps: int, batch_size: int = 16) -> list[Tensor]:
    """One batch for each step."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(batch_size, SIZE, generator=generator) for _ in range(num_steps)]


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=3e-3)


def drop_what_is_not_finite(module: nn.Module) -> None:
    """Drop the gradients of a step of which some are not finite, as a ``GradScaler`` does."""
    gradients = [param.grad for param in module.parameters() if param.grad is not None]
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        for param in module.parameters():
            param.grad = None


def exponents(module: Late, run: Callable[[Late], Any]) -> dict[str, list[int | None]]:
    """Step by step, the exponent of the unit that each operand of a layer gives in a plain run.

    Args:
        module: The module, which is trained.
        run: Trains it, one call a step.
    """
    found: dict[str, list[int | None]] = {}

    def note(name: str, tensor: Tensor) -> None:
        rms = tensor.detach().double().square().mean().sqrt().item()  # NaN for an empty one
        is_some = math.isfinite(rms) and rms > 0.0
        found.setdefault(name, []).append(round(math.log2(rms)) if is_some else None)

    for path, layer in module.named_children():
        name = f"{path}.linear"

        def forward(layer: Any, inputs: Any, output: Tensor, name: str = name) -> None:
            note(f"{name}:input", inputs[0])
            note(f"{name}:weight", layer.weight)
            if output.requires_grad:
                output.register_hook(lambda gradient: note(name, gradient))

        layer.register_forward_hook(forward)
    run(module)
    return found

"""Matmuls of a backward pass or a loss without a forward matmul."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale import UnitScaleCallback, attach
from tests.helpers import assert_same_bits


class Late(torch.autograd.Function):
    """A matmul as a sum of elementwise ones, whose gradients are matmuls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x[:, :, None] * weight).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Early(Late):
    """A matmul with its own autograd node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight


class Layer(nn.Module):
    """A linear layer, then the given function."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 4))
        if kind == "a hook":
            self.linear.register_full_backward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, gradients: Any) -> None:
        self.moment = gradients[0].T @ gradients[0]

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return Late.apply(h, self.weight) if self.kind == "a function" else h


def train(kind: str, callbacks: list[Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model, other = Layer(kind), Layer("a function")
    params = list(model.parameters())
    optimizer = torch.optim.SGD([*params, *other.parameters()], lr=0.1)
    with attach(model, optimizer, callbacks):
        for _ in range(4):
            h = model(torch.randn(5, 8).requires_grad_())
            if kind == "per sample":
                per_sample(model)
            if kind == "a loss":
                h = Early.apply(h, model.weight)
            (h.square().mean() + other(torch.randn(5, 8)).square().mean()).backward()
            if kind == "a hook":
                model.linear.weight.grad.add_(model.moment)
            optimizer.step()
            optimizer.zero_grad()
    return params


def per_sample(model: nn.Module) -> None:
    """Gradients of each sample, by a transformed function."""

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x[None],)).square().mean()

    params = {name: value.detach() for name, value in model.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, torch.randn(5, 8))
    model.linear.bias.grad = gradients["linear.weight"].mean((0, 1))


# Three are those of the linear layer.
@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("kind", "num_matmuls"),
    [("a function", 3 + 2), ("a hook", 3 + 1), ("a loss", 3 + 3), ("per sample", 3 + 2)],
)
def test_backward_only_matmuls_are_scaled_and_rounded(kind: str, num_matmuls: int) -> None:
    """The other model's are left alone."""
    callback = UnitScaleCallback()
    assert_same_bits(train(kind, [callback]), train(kind, []))
    coverage = callback.coverage
    assert coverage.num_in_units == coverage.num_matmuls == num_matmuls, coverage.table()
    rounding = UnitScaleCallback(simulate="fp8")
    train(kind, [rounding])
    assert rounding.coverage.num_matmuls == num_matmuls
    assert rounding.coverage.fraction_of_flops("format") == 1

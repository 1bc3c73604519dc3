"""A loss with matmuls that a loop computes outside the module's call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.executed_matmuls import below_all_kernels, has_torchs_own_kernels
from lightning_unitscale import UnitScaleCallback, attach
from lightning_unitscale.quantize import quantize
from tests.helpers import assert_same_bits
from tests.loops.methods import METHODS


class Contrast(nn.Module):
    """Holds the model that it compares the results of, and has no parameters of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = F.normalize(self.model(x), dim=-1) @ F.normalize(self.model(y), dim=-1).mT
        return F.cross_entropy(scores / 0.07, torch.arange(len(x)))


class Distance(nn.Module):
    """Multiplies, and has no parameters."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a * 1e-3, b.mT).diagonal().sum()


def new() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(callbacks: list[Any], num_steps: int = 5) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two losses, and a critic that is trained too, whose matmuls have no owner."""
    model, optimizer = new()
    contrast, distance, critic = Contrast(model), Distance(), nn.Linear(16, 16)
    of_critic = torch.optim.SGD(critic.parameters(), lr=1e-2)
    losses = []
    with attach(model, optimizer, callbacks):
        for _ in range(num_steps):
            x, y = torch.randn(12, 8), torch.randn(12, 8)
            loss = contrast(x, y) + distance(model(x), model(y))
            judged = critic(model(x)).square().mean()
            (loss + judged).backward()
            optimizer.step()
            of_critic.step()
            losses.append(loss.detach())
            optimizer.zero_grad()
            of_critic.zero_grad()
    return losses, {**model.state_dict(), **critic.state_dict()}


@pytest.mark.parametrize("how", ["monitor", "lossless", "both"])
def test_loss_outside_module_is_bit_identical(how: str) -> None:
    assert_same_bits(train(METHODS[how]()), train([]))


def test_matmuls_of_loss_are_scaled() -> None:
    callback = UnitScaleCallback()
    train([callback])
    coverage = callback.coverage
    # Of each of the two: forward, and two gradients. A model of others is left alone.
    assert sum(one.num_matmuls for one in coverage.counts if one.module == "(loss)") == 6
    assert coverage.num_in_units == coverage.num_matmuls == 6 + 5 * (2 + 3)
    inputs = [callback.gauge.pair(f"(loss).{name}:input") for name in ("linear", "linear_1")]
    assert inputs[0].log2_sigma > inputs[1].log2_sigma + 5


def test_only_matmuls_of_loss_are_rounded() -> None:
    model, optimizer = new()
    frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)
    seen: list[Tensor] = []

    def rounded(matmul: Tensor) -> list[bool]:
        del matmul
        found = [bool((tensor == quantize(tensor, "E4M3FN")).all()) for tensor in seen]
        seen.clear()
        return found

    with below_all_kernels(lambda _, tensor: seen.append(tensor.clone())):
        with attach(model, optimizer, [UnitScaleCallback(simulate="fp8")]):
            for _ in range(2):
                a, b = model(torch.randn(12, 8)), model(torch.randn(12, 8))
                seen.clear()
                assert rounded(a @ b.mT) == [True, True]
                assert rounded(frozen(a)) == [False, False]
                with torch.no_grad():
                    assert rounded(a @ b.mT) == [False, False]
                a.sum().backward()
                optimizer.step()
                seen.clear()
                w = torch.randn(12, 12, requires_grad=True)
                assert rounded(w @ torch.randn(12, 12)) == [False, False]
                optimizer.zero_grad()
            model(torch.randn(12, 8))
        # No step of the optimizer has ended the last one.
        seen.clear()
        w = torch.randn(12, 12, requires_grad=True)
        assert rounded(w @ w) == [False, False]
    assert has_torchs_own_kernels()

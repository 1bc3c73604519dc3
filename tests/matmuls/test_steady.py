"""Backward matmuls that are found by a few comparisons are those that the session would find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale import UnitScaleCallback, attach
from lightning_unitscale.matmuls import kernels, session
from lightning_unitscale.matmuls.execute import run_in_units
from lightning_unitscale.matmuls.steady import steady_matmul
from tests.helpers import assert_same_bits

NUM_STEPS = 8


class Alternating(torch.autograd.Function):
    """A product whose backward pass computes its two gradients in either order."""

    order = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        if Alternating.order:
            return gradient @ weight.mT, x.mT @ gradient
        of_weight = x.mT @ gradient
        return gradient @ weight.mT, of_weight


class Square(nn.Module):
    """Matrices of 8 x 8, whose shapes say nothing, and one that is multiplied by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for index, layer in enumerate(self.layers):
            nn.init.normal_(layer.weight, std=4.0 ** (index - 1))
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        x = Alternating.apply(x, self.weight)
        return (x @ x.mT).mul(0.01).logsumexp(0).sum()


def train(*callbacks: Any, batch_sizes: tuple[int, ...] = (8,)) -> list[Tensor]:
    torch.manual_seed(0)
    model = Square()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(model, optimizer, callbacks):
        for step in range(NUM_STEPS):
            Alternating.order = step % 2
            # Without one of two gradients the other one is the first of its node.
            model.layers[1].weight.requires_grad_(step % 4 != 3)
            optimizer.zero_grad()
            x = torch.randn(batch_sizes[step % len(batch_sizes)], 8)
            loss = model(x.requires_grad_(step % 4 != 3))
            loss.backward(retain_graph=step % 3 == 2)
            if step % 3 == 2:
                loss.backward()
            if step == 5:
                for parameter in model.parameters():
                    parameter.data.mul_(1.01)
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


class Matmuls:
    """Names of the matmuls that run, and how many of them the short path has found."""

    def __init__(self, patch: pytest.MonkeyPatch, *, is_short: bool) -> None:
        self.names: list[tuple[str, str, tuple[int, ...]]] = []
        self.num_short = 0

        def note(matmul: Any, original: Any, args: Any, kwargs: Any) -> Any:
            self.names.append((matmul.site.name, matmul.slot, matmul.log2_units))
            return run_in_units(matmul, original, args, kwargs)

        def find(*args: Any) -> Any:
            found = steady_matmul(*args) if is_short else None
            self.num_short += found is not None
            return found

        patch.setattr(session, "run_in_units", note)
        patch.setattr(kernels, "run_in_units", note)
        patch.setattr(kernels, "steady_matmul", find)


@pytest.mark.parametrize("batch_sizes", [(8,), (8, 5), (3, 8, 8)], ids=str)
def test_the_same_matmuls_in_the_same_units(
    batch_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(batch_sizes=batch_sizes)
    known = Matmuls(monkeypatch, is_short=False)
    assert_same_bits(train(UnitScaleCallback(), batch_sizes=batch_sizes), plain)
    found = Matmuls(monkeypatch, is_short=True)
    assert_same_bits(train(UnitScaleCallback(), batch_sizes=batch_sizes), plain)
    assert found.names == known.names
    assert known.num_short == 0
    # Most of the layers' backward matmuls in all but the first steps.
    assert found.num_short >= 2 * 2 * (NUM_STEPS - 2)


def test_new_units_are_found_by_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Matmuls(monkeypatch, is_short=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attach(model, optimizer, UnitScaleCallback()) as attachment:
        counts = []
        for step in range(8):
            if step == 4:
                before = attachment.state_dict()
                attachment.load_state_dict(before)
            found.num_short = 0
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            counts.append(found.num_short)
    # Of three backward matmuls (the input needs no gradient), the first of a pass is not short.
    assert counts[3] == counts[7] == 2
    assert counts[4] == 0

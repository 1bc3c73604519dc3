"""Steps that take the gradient of a gradient: penalties, and learning to learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_unitscale import UnitScaleCallback
from tests.callbacks.modules import Regression
from tests.callbacks.runs import Capturing, both, loader, run, unit_scale_of
from tests.helpers import assert_same_bits


class Smooth(Regression):
    def __init__(self) -> None:
        super().__init__(norm=False, dropout=0.0)


class Penalized(Smooth):
    """The penalty begins in the fourth step: the first batch does not show it."""

    starts_at = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        prediction = self.forward(x)
        loss = F.mse_loss(prediction, batch[1])
        if self.global_step >= self.starts_at:
            (slope,) = torch.autograd.grad(prediction.logsumexp(1).sum(), x, create_graph=True)
            loss = loss + slope.square().sum(1).mean()
        return loss


class PenalizedAtOnce(Penalized):
    starts_at = 0


class Adversarial(Smooth):
    """A critic with a gradient penalty, trained by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.Softplus(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        made, real = self.forward(batch[0]), batch[1]
        mixed = (made + real).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        loss = self.critic(made).mean() - self.critic(real).mean()
        loss = loss + (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.slow_cases
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", [Penalized, PenalizedAtOnce, Adversarial])
def test_second_derivatives(kind: type[Regression], captured: bool) -> None:
    plain = run(kind, max_steps=5, max_epochs=-1, data=lambda: loader(16, 4))
    callbacks = [UnitScaleCallback(recalibrate=2), both()[1], *[Capturing()] * captured]
    ours = run(kind, callbacks, max_steps=5, max_epochs=-1, data=lambda: loader(16, 4))
    assert "first.linear" in unit_scale_of(callbacks).gauge
    # Each matmul by itself, so that no sum is taken in another order.
    assert_same_bits(ours.compared(), plain.compared())


def test_steps_before_the_first_penalty_are_the_bits() -> None:
    runs = [run(Penalized, callbacks, max_steps=3) for callbacks in ([], both())]
    assert_same_bits(runs[1].compared(), runs[0].compared())


class Curved(Smooth):
    """A backward pass that records a graph, as second-order optimizers need it."""

    def backward(self, loss: Any) -> None:
        loss.backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_recorded_backward_pass() -> None:
    runs = [run(Curved, callbacks) for callbacks in ([], both())]
    assert_same_bits(runs[1].compared(), runs[0].compared())

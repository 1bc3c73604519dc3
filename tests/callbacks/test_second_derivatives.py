"""Steps that take the gradient of a gradient: penalties, and learning to learn."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_unitscale import RematCallback, UnitScaleCallback
from lightning_unitscale.capture.step_messages import CaptureError
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
def test_second_derivatives_are_bit_identical(kind: type[Regression], captured: bool) -> None:
    plain = run(kind, max_steps=5, max_epochs=-1, data=lambda: loader(16, 4))
    callbacks = [UnitScaleCallback(recalibrate=2), both()[1], *[Capturing()] * captured]
    ours = run(kind, callbacks, max_steps=5, max_epochs=-1, data=lambda: loader(16, 4))
    assert "first.linear" in unit_scale_of(callbacks).gauge
    # Each matmul by itself, so that no sum is taken in another order.
    assert_same_bits(ours.compared(), plain.compared())


def test_rules_with_budget_refuse_gradients_of_gradients() -> None:
    callbacks = [UnitScaleCallback("u-mup"), RematCallback("min_cut")]
    with pytest.raises(CaptureError, match=r"create_graph=True\) at .*second_derivatives.py"):
        run(PenalizedAtOnce, callbacks, max_steps=1)


def test_steps_before_first_penalty_are_bit_identical() -> None:
    runs = [run(Penalized, callbacks, max_steps=3) for callbacks in ([], both())]
    assert_same_bits(runs[1].compared(), runs[0].compared())


class Curved(Smooth):
    """A backward pass that records a graph, as second-order optimizers need it."""

    def backward(self, loss: Any) -> None:
        loss.backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_backward_is_bit_identical() -> None:
    runs = [run(Curved, callbacks) for callbacks in ([], both())]
    assert_same_bits(runs[1].compared(), runs[0].compared())


class Wide(Smooth):
    """Layers that FP8 can take, and a penalty."""

    starts_at = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.optimizer_of = lambda module: torch.optim.SGD(module.parameters(), 0.01)

    def slope(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].repeat(1, 3)[:, :16].requires_grad_()
        y = self.forward(x)
        loss = y.square().mean()
        if self.global_step >= self.starts_at:
            loss = loss + (self.slope(x, y).norm(dim=1) - 1).square().mean()
        return loss


class Late(Wide):
    starts_at = 3

    def slope(self, x: Tensor, y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(y.mean(1).sum(), x, create_graph=True)
        return slope


class Forward(Wide):
    def slope(self, x: Tensor, y: Tensor) -> Tensor:
        with forward_ad.dual_level():
            made = self.forward(forward_ad.make_dual(x, torch.ones_like(x)))
            return forward_ad.unpack_dual(made).tangent


_OPTIONS: dict[str, Any] = {"create" + "_graph": True}


class Hidden(Wide):
    """The module's code does not show that it takes gradients of gradients."""

    def slope(self, x: Tensor, y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(y.mean(1).sum(), x, **_OPTIONS)
        return slope


class HiddenLate(Hidden):
    starts_at = 3


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("kind", [Late, Forward, Hidden])
def test_fp8_layers_have_second_derivatives(kind: type[Wide]) -> None:
    plain = run(kind, max_steps=6)
    ours = run(kind, [unit_scale := UnitScaleCallback(precision="fp8")], max_steps=6)
    losses = [torch.stack([each["loss"] for each in done.outputs]) for done in (ours, plain)]
    torch.testing.assert_close(*losses, rtol=0.2, atol=0.0)
    assert re.search(r"first.linear +FP8", unit_scale.explain())


def test_late_gradient_penalty_in_fp8_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="saved in FP8 only"):
        run(HiddenLate, [UnitScaleCallback(precision="fp8")], max_steps=6)

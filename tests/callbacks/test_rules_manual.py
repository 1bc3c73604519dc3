"""Manual optimization with rules: steps that read their own gradients."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.callbacks.rule_runs import Classifier, fit, plan_of, rms, unit_scale, weights
from tests.helpers import assert_same_bits


class ByHand(Classifier):
    """Clips its gradients itself, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.unused = torch.nn.Linear(3, 3)
        self.norms: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self.forward(batch[0]), batch[1])
        self.manual_backward(loss)
        self.norms.append(self.clipped())
        optimizer.step()
        self.log("loss", loss)

    def clipped(self) -> Tensor:
        """Brings every gradient to a norm of at most 1; returns the square of all norms."""
        total = torch.zeros(())
        for one in self.parameters():
            if one.grad is not None:
                norm = one.grad.norm()
                one.grad.mul_((1 / (norm + 1e-6)).clamp(max=1.0))
                total = total + norm**2
        return total


class ByOneNorm(ByHand):
    """Common recipes assume that every parameter of the first layer has a gradient."""

    def clipped(self) -> Tensor:
        total = torch.stack([one.grad.norm() for one in self.first.parameters()]).norm()
        for one in self.first.parameters():
            one.grad.mul_((1 / (total + 1e-6)).clamp(max=1.0))
        return total**2


class ByMatmuls(ByHand):
    """Squares a gradient by a matmul that does not belong to the model."""

    def clipped(self) -> Tensor:
        gradient = self.first.weight.grad
        return torch.dot(gradient.flatten(), gradient.flatten()) + (gradient @ gradient.T).trace()


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class WithoutOne(ByHand):
    """The user's own function returns no gradient for a part of the model."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + _NoGradient.apply(self.unused(x.new_ones(3))).mean()


KINDS = [ByHand, ByOneNorm, ByMatmuls]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_manual_step_reads_gradients(kind: Any) -> None:
    pl.seed_everything(1, verbose=False)
    module = kind()
    unused = weights(module.unused)
    fit(module, unit_scale("u-mup"), max_epochs=1, max_steps=-1)
    # The rehearsals have left nothing behind, and saw no gradient where there will be none.
    assert len(module.norms) == 4
    assert all(float(one) > 0 for one in module.norms)
    assert_same_bits(weights(module.unused), unused)
    assert all(one.grad is None for one in module.unused.parameters())
    plans = plan_of(module).parameters
    assert plans["first.weight"].action == plans["readout.weight"].action == "scaled"


# Until torch 2.11 Dynamo warns of what it was told to leave alone.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_matmul_of_gradients_is_not_scaled() -> None:
    pl.seed_everything(1, verbose=False)
    module = ByMatmuls()
    seen: list[float] = []
    clipped = module.clipped

    def noting() -> Tensor:
        note(module.first.weight.grad)
        return clipped()

    @torch.compiler.disable
    def note(gradient: Tensor) -> None:
        seen.append(2 * gradient.numel() * rms(gradient) ** 2)

    module.clipped = noting  # type: ignore[method-assign]
    fit(module, unit_scale("u-mup"), max_epochs=1, max_steps=-1)
    assert [float(one) for one in module.norms] == pytest.approx(seen[-4:], rel=1e-4)


@pytest.mark.slow
def test_autograd_function_without_gradient() -> None:
    pl.seed_everything(1, verbose=False)
    module = WithoutOne()
    fit(module, unit_scale("u-mup"), max_epochs=1, max_steps=-1)
    assert len(module.norms) == 4
    assert all(one.grad is None for one in module.unused.parameters())
    assert all(one.grad is not None for one in module.first.parameters())

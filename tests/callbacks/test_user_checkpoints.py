"""Checkpoints of the user's own keep torch's meaning within a memory budget and by rules."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale import RematCallback, UnitScaleCallback
from tests.callbacks.modules import Regression
from tests.callbacks.runs import run
from tests.helpers import assert_same_bits


class Checkpointed(Regression):
    """A module whose first layers run in a checkpoint."""

    options: ClassVar[dict[str, Any]] = {"use_reentrant": False}

    def __init__(self) -> None:
        super().__init__()
        self.between = self.layers()

    def layers(self) -> nn.Module:
        return nn.GELU()

    def prepared(self, x: Tensor) -> Tensor:
        return x

    def body(self, x: Tensor) -> Tensor:
        return self.between(self.first(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = checkpoint(self.body, self.prepared(x), **self.options)
        return F.mse_loss(self.second(hidden), y)


class Reentrant(Checkpointed):
    """torch gives its layers no gradient, since its input needs none."""

    options: ClassVar = {"use_reentrant": True}


class Normalized(Checkpointed):
    """Statistics are updated when it runs, and when it runs again."""

    def layers(self) -> nn.Module:
        return nn.BatchNorm1d(self.first.out_features)


class Counted(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def body(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().body(x)


class OtherMasks(Checkpointed):
    options: ClassVar = {"use_reentrant": False, "preserve_rng_state": False}

    def layers(self) -> nn.Module:
        return nn.Dropout(0.3)


class NoRandomNumbers(Checkpointed):
    options: ClassVar = {"use_reentrant": False, "preserve_rng_state": False}


class ReentrantWithGradient(Reentrant):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)

    def prepared(self, x: Tensor) -> Tensor:
        return self.before(x)


SPECIAL = {
    Reentrant: "is reentrant and none of its inputs needs a gradient",
    Normalized: "writes into a buffer",
    Counted: "writes into a buffer",
    OtherMasks: "draws other random numbers when recomputed",
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_plan_would_change_its_meaning(kind: type[Checkpointed]) -> None:
    expected = run(kind)
    with pytest.warns(UserWarning, match=rf"the checkpoint at .*\.py:\d+ {SPECIAL[kind]}"):
        found = run(kind, [RematCallback("min_cut")])
    assert_same_bits(found.weights, expected.weights)


@pytest.mark.parametrize("kind", [Checkpointed, NoRandomNumbers, ReentrantWithGradient])
def test_a_plan_honours_it(kind: type[Checkpointed]) -> None:
    expected, callback = run(kind), RematCallback("min_cut")
    found = run(kind, [callback])
    assert callback.reports
    assert_same_bits(found.weights, expected.weights)


@pytest.mark.parametrize("kind", [Normalized, Counted, OtherMasks])
def test_rules_run_around_it(kind: type[Checkpointed]) -> None:
    found = run(kind, [UnitScaleCallback("u-mup")])
    assert all(weight.isfinite().all() for weight in found.weights.values())

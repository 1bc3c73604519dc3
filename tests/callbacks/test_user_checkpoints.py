"""The user's own activation checkpoints, within a memory budget and under rules."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_unitscale import RematCallback, UnitScaleCallback
from lightning_unitscale.transforms import unit_scale
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


class ReentrantBehindHook(ReentrantWithGradient):
    """The hook of transformers and peft lets it train behind a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before.requires_grad_(False)

        def make_inputs_require_grads(module: nn.Module, args: object, output: Tensor) -> None:
            output.requires_grad_(True)

        self.before.register_forward_hook(make_inputs_require_grads)


class Detached(ReentrantBehindHook):
    def prepared(self, x: Tensor) -> Tensor:
        return super().prepared(x).detach()


SPECIAL = {
    Reentrant: "is reentrant and none of its inputs needs a gradient",
    Detached: "is reentrant and none of its inputs needs a gradient",
    Normalized: "writes into a buffer",
    Counted: "writes into a buffer",
    OtherMasks: "draws other random numbers when recomputed",
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_checkpoint_disables_plan_with_warning(kind: type[Checkpointed]) -> None:
    expected = run(kind)
    with pytest.warns(UserWarning, match=rf"the checkpoint at .*\.py:\d+ {SPECIAL[kind]}"):
        found = run(kind, [RematCallback("min_cut")])
    assert_same_bits(found.weights, expected.weights)


@pytest.mark.parametrize(
    "kind", [Checkpointed, NoRandomNumbers, ReentrantWithGradient, ReentrantBehindHook]
)
def test_plan_respects_user_checkpoint(kind: type[Checkpointed]) -> None:
    expected, callback = run(kind), RematCallback("min_cut")
    found = run(kind, [callback])
    assert callback.reports
    assert_same_bits(found.weights, expected.weights)


@pytest.mark.parametrize("kind", [Normalized, Counted, OtherMasks])
def test_rules_train_with_user_checkpoint(kind: type[Checkpointed]) -> None:
    found = run(kind, [UnitScaleCallback("u-mup")])
    assert all(weight.isfinite().all() for weight in found.weights.values())


class Lowered(nn.Module):
    """Contexts within a checkpoint, which a recomputation that stops early would not leave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def body(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(self.first(x).relu()).float()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def test_autocast_within_a_checkpoint_ends_with_the_backward_pass() -> None:
    scaled = unit_scale(Lowered())
    for _ in range(2):
        scaled(torch.ones(4, 8)).sum().backward()
        assert not torch.is_autocast_enabled("cpu")
        # Nested contexts would keep the weights that were cast in the last step.
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()


class Compressed(Checkpointed):
    """Keeps its saved tensors in BF16, so its gradients depend on what is saved."""

    def layers(self) -> nn.Module:
        width = self.first.out_features
        return nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.Tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with saved_tensors_hooks(lambda saved: saved.bfloat16(), lambda kept: kept.float()):
            hidden = self.body(x)
        return F.mse_loss(self.second(hidden), y)


@pytest.mark.filterwarnings("ignore:.*no graph could be captured")
def test_plan_keeps_user_saved_tensor_hooks() -> None:
    runs = [run(Compressed, callbacks) for callbacks in ([], [RematCallback("min_cut")])]
    assert_same_bits(runs[1].compared(), runs[0].compared())

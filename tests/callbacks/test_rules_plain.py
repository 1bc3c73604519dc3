"""If a step cannot be captured, rules leave the model unscaled."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.capture import module_state
from tests.callbacks.modules import Packed
from tests.callbacks.rule_runs import METHODS, WIDTH, Classifier, adamw, fit, loader, weights
from tests.capture.test_tensor_subclasses import Broken
from tests.helpers import IS_TORCH_2_11, assert_same_bits


class OfBroken(Classifier):
    """A module whose data are a tensor subclass."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0].as_subclass(Broken), batch[1]]


class Restless(Classifier):
    """Another step in each call."""

    num_calls: ClassVar[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_calls.append(1)
        torch._dynamo.graph_break()
        logits = self.forward(batch[0])
        for _ in range(len(self.num_calls) - batch_idx):
            logits = logits * 1.0
        loss = F.cross_entropy(logits, batch[1])
        self.log("train_loss", loss)
        return loss


class Hidden(Classifier):
    """A model whose parameters are read by code that is never captured."""

    @torch.compiler.disable
    def forward(self, x: Any) -> Any:
        return super().forward(x)


class Quantized(Classifier):
    """It keeps a frozen weight in pieces, as torchao does."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(Packed(torch.ones(WIDTH), torch.ones(())), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.frozen.scale


def _said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "cannot run captured" in str(one.message)]


CASES = [
    (OfBroken, "it is called with a Broken"),
    (Hidden, "breaks the graph"),
    pytest.param(
        Restless,
        "it ran other graphs in each of 3 runs on the same batch",
        marks=pytest.mark.skipif(
            IS_TORCH_2_11, reason="Dynamo does not see there that an attribute has changed"
        ),
    ),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("kind", "reason"), CASES)
def test_uncapturable_model_trains_unscaled(
    kind: type[Classifier], reason: str, method: str
) -> None:
    torch.manual_seed(0)
    module = kind()
    plain = copy.deepcopy(module)
    options = {"gradient_clip_val": 0.1, "val": loader(8), "num_sanity_val_steps": 1}
    _, expected = fit(plain, **options)
    Restless.num_calls.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, losses = fit(module, UnitScaleCallback(method), **options)
    (said,) = {text for text in _said(caught) if ".training_step" in text}
    assert reason in said
    assert "it is the unscaled model, at the given learning rates" in said
    assert_same_bits(losses, expected)
    assert_same_bits(weights(module), weights(plain))
    checkpoint: dict[str, Any] = {}
    trainer.callbacks[0].on_save_checkpoint(trainer, module, checkpoint)  # type: ignore[attr-defined]
    assert not checkpoint


def test_scaled_model_never_runs_unscaled() -> None:
    class LaterBroken(OfBroken):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if self.trainer.global_step < 2:
                return batch
            return super().on_before_batch_transfer(batch, dataloader_idx)

    expected = re.escape(
        "LaterBroken.training_step cannot be unit-scaled by rules: it is called with a"
    )
    with pytest.raises(RuntimeError, match=expected):
        fit(LaterBroken(), UnitScaleCallback("u-mup"))


def test_parameters_that_rules_cannot_set() -> None:
    torch.manual_seed(0)
    module = Quantized()
    plain = copy.deepcopy(module)
    _, expected = fit(plain)
    reason = "frozen is a Packed, whose numbers are other tensors"
    with pytest.warns(UserWarning, match=rf"{reason}\. .* it is the unscaled model"):
        _, losses = fit(module, UnitScaleCallback("u-mup"))
    assert_same_bits(losses, expected)


class LazyAndCut(Classifier):
    """A sanity check gives its first layer a shape, in more graphs than rules allow."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(WIDTH)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().validation_step(batch, batch_idx)
        torch._dynamo.graph_break()
        return loss * 2.0


@pytest.mark.slow
def test_sanity_check_is_unscaled_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_state, "MANY_GRAPHS", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"val": loader(8), "num_sanity_val_steps": 1}
        fit(LazyAndCut(), callback := UnitScaleCallback("u-mup"), **options)
    assert not _said(caught)
    assert "first.weight" in callback.explain()


class Mapped(Classifier):
    """A model that runs once for each sample, in operations that have no rule."""

    def forward(self, x: Any) -> Any:
        own = dict(self.named_parameters())
        each = torch.vmap(lambda one: F.linear(one, own["first.weight"]).relu())(x)
        return torch.vmap(lambda one: F.linear(one, own["readout.weight"]))(each)


def test_rules_that_scale_no_weight_warn() -> None:
    with pytest.warns(UserWarning, match="scale none of its weights .first.weight: read by linear"):
        fit(Mapped(), UnitScaleCallback("u-mup"))


class Clipped(torch.optim.Optimizer):
    """Does something to gradients before another optimizer steps, as for private training."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        self.inner.step()
        return loss


@pytest.mark.slow
def test_rates_follow_inside_wrapped_optimizer() -> None:
    torch.manual_seed(0)
    module = Classifier(lambda module: Clipped(adamw(module)))
    plain = copy.deepcopy(module)
    plain.configure = adamw
    with pytest.warns(UserWarning, match="of AdamW in Clipped follow the scales. Changes"):
        _, losses = fit(module, UnitScaleCallback("u-mup"))
    _, expected = fit(plain, UnitScaleCallback("u-mup"))
    assert_same_bits(losses, expected)
    assert_same_bits(weights(module), weights(plain))

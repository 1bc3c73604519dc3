"""Clipping and the loss scale under scale rules, in real Trainers."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_unitscale.callbacks.trainer_settings import start_loss_scale_at_one, unit_clipping
from tests.callbacks.runs import QUIET
from tests.callbacks.stored import Settings, Stored, adamw, fit, half


class Clipped(Stored):
    """Notes the gradients at the step; ``by_hand`` clips as under manual optimization."""

    by_hand = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for one in self.parameters():
            one.grad = torch.full_like(one, 2.0)  # unit gradients would be about 1
        self.first.bias.grad = None
        if self.by_hand:
            self.clip_gradients(optimizer, 0.5, "norm")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        grads = [one.grad for one in self.parameters() if one.grad is not None]
        self.found = torch.cat([one.flatten() for one in grads])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("threshold", [0.5, 3.0, None])
def test_clipping_threshold_applies_to_rms(algorithm: Any, threshold: float | None) -> None:
    """A threshold of 0.5 leaves RMS 0.5; 3 leaves a gradient of RMS 2 alone."""
    module = Clipped(adamw)
    trainer = fit(
        module,
        Settings(),
        gradient_clip_val=threshold,
        gradient_clip_algorithm=algorithm if threshold else None,
        max_epochs=1,
    )
    number = 6 * 8 + 8 * 2 + 2
    assert module.found.numel() == number
    if algorithm == "norm":
        expected = min(2.0, threshold or 2.0)
    else:
        expected = min(2.0, (threshold or 2.0) * number**0.5)
    torch.testing.assert_close(module.found, torch.full_like(module.found, expected))
    assert "clip_gradients" not in vars(trainer.precision_plugin)


def test_manual_clipping_is_rescaled_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    module = Clipped(adamw)
    module.by_hand = True
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        fit(module, Settings(), gradient_clip_val=0.5, gradient_clip_algorithm="norm")
    torch.testing.assert_close(module.found, torch.full_like(module.found, 0.5))
    told = [one.message for one in caplog.records if "gradient_clip_val" in one.message]
    assert len(told) == 1
    assert f"0.5 is applied as {0.5 * 66**0.5:.4g}" in told[0]


def test_clipping_restores_overridden_method() -> None:
    trainer = pl.Trainer(**QUIET)
    plugin = trainer.precision_plugin
    seen = []

    def others(optimizer: Any, clip_val: float, algorithm: Any) -> None:
        seen.append(clip_val)

    vars(plugin)["clip_gradients"] = others
    parameter = nn.Parameter(torch.ones(9))
    parameter.grad = torch.ones(9)
    with unit_clipping(trainer):
        plugin.clip_gradients(torch.optim.SGD([parameter], lr=0.1), 2.0)
        plugin.clip_gradients(torch.optim.SGD([parameter], lr=0.1), 0.0)
    assert seen == [6.0]
    assert vars(plugin)["clip_gradients"] is others
    # A package that wraps it meanwhile clips by the user's threshold afterwards.
    with unit_clipping(trainer):
        ours = plugin.clip_gradients
        vars(plugin)["clip_gradients"] = lambda *args: ours(*args)
    plugin.clip_gradients(torch.optim.SGD([parameter], lr=0.1), 2.0, "norm")
    assert seen == [6.0, 2.0]


class Watching(Stored):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scales: list[float] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def test_loss_scale_starts_at_one_then_follows_scaler() -> None:
    module, plugin = Watching(adamw), half(growth_interval=4)
    fit(module, Settings(), plugins=plugin, max_epochs=2)
    assert module.scales == [1.0] * 4 + [2.0] * 4
    assert plugin.scaler.get_scale() == 4.0  # after the fit too, for a checkpoint
    fit(module, Settings(), plugins=plugin, max_epochs=1)
    assert module.scales[8:] == [4.0] * 4


def test_restored_and_chosen_loss_scales_are_kept(tmp_path: Path) -> None:
    module = Watching(adamw)
    fit(module, plugins=half(init_scale=512.0), max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    resumed = Watching(adamw)
    fit(resumed, Settings(), plugins=half(), max_epochs=2, ckpt_path=tmp_path / "a.ckpt")
    assert resumed.scales == [512.0] * 4
    chosen = Watching(adamw)
    fit(chosen, Settings(), plugins=half(init_scale=8.0), max_epochs=1)
    assert chosen.scales == [8.0] * 4


def test_unused_initial_loss_scale_is_restored() -> None:
    trainer = pl.Trainer(**QUIET, plugins=half())
    scaler = trainer.precision_plugin.scaler
    before = copy.deepcopy(scaler.state_dict())
    restore = start_loss_scale_at_one(trainer)
    assert scaler.get_scale() == 1.0
    restore()
    restore()
    assert scaler.state_dict() == before


@pytest.mark.parametrize("plugin", [None, "disabled", "bf16"])
def test_loss_scale_start_without_scaler_is_a_no_op(plugin: str | None) -> None:
    plugins = {
        None: None,
        "disabled": half(enabled=False),
        "bf16": MixedPrecision("bf16-mixed", "cpu"),
    }[plugin]
    start_loss_scale_at_one(pl.Trainer(**QUIET, plugins=plugins))()

"""Lightning's own settings under scale rules: rates, clipping, the loss scale."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.callbacks.rule_settings import (
    RuleSettings,
    UnitClipping,
    scale_optimizers,
    start_loss_scale_at_one,
)
from lightning_unitscale.transforms.parameter_info import ParameterInfo, Role
from tests.callbacks.runs import QUIET, MemoryLogger, loader
from tests.helpers import assert_same_bits

TINY = 1e-60


class Stored(pl.LightningModule):
    """Stores ``W / sigma`` and ``b / sigma`` and computes with ``W`` and ``b``, in FP64."""

    def __init__(self, configure: Callable[[Any], Any], sigma: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.configure = configure
        self.sigma = sigma
        self.first = nn.Linear(6, 8, dtype=torch.float64)
        self.second = nn.Linear(8, 2, dtype=torch.float64)
        with torch.no_grad():
            for one in self.parameters():
                one.div_(sigma)

    def infos(self) -> dict[Tensor, ParameterInfo]:
        return {
            one: ParameterInfo(
                name,
                Role.HIDDEN if one.dim() > 1 else Role.BIAS,
                fan_in=one.shape[-1],
                fan_out=one.shape[0],
                model_width=8,
                sigma=self.sigma if one.dim() > 1 else 1.0,
                output_scale=self.sigma,
            )
            for name, one in self.named_parameters()
        }

    def effective(self) -> dict[str, Tensor]:
        return {name: one.detach() * self.sigma for name, one in self.named_parameters()}

    def loss(self, batch: Any) -> Tensor:
        x, y = (one.double() * 100 for one in batch)
        for layer in (self.first, self.second):
            x = F.linear(x, layer.weight * self.sigma, layer.bias * self.sigma).tanh()
        return F.mse_loss(x, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self.configure(self)


class Settings(pl.Callback):
    """Wires the settings as the callback does."""

    def __init__(self, lr_scaling: Any = "match") -> None:
        self.lr_scaling = lr_scaling
        self.settings: RuleSettings | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Stored)
        self.settings = RuleSettings(pl_module.infos(), self.lr_scaling)
        self.settings.start(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.settings is not None:
            self.settings.restore()

    def on_exception(self, *_: Any) -> None:
        if self.settings is not None:
            self.settings.restore()


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.3, eps=TINY)


def fit(
    module: pl.LightningModule, *callbacks: pl.Callback, ckpt_path: Any = None, **options: Any
) -> pl.Trainer:
    trainer = pl.Trainer(**{**QUIET, "max_epochs": 5, **options, "callbacks": list(callbacks)})
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name, one in first.items():
        error = float((one - second[name]).abs().max() / second[name].abs().max())
        assert error < 1e-10, (name, error)


# --- rates ------------------------------------------------------------------------------------


def one_cycle(module: nn.Module) -> Any:
    optimizer = adamw(module)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def warm_up(module: nn.Module) -> Any:
    optimizer = adamw(module)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def plateau(module: nn.Module) -> Any:
    optimizer = adamw(module)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "loss"}


def cosine(module: nn.Module) -> Any:
    weights = [one for one in module.parameters() if one.dim() > 1]
    biases = [one for one in module.parameters() if one.dim() == 1]
    groups = [
        {"params": weights, "name": "weights"},
        {"params": biases, "lr": 0.05, "weight_decay": 0.0, "name": "biases"},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.3, eps=TINY)
    return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]


@pytest.mark.parametrize("configure", [one_cycle, warm_up, plateau, cosine])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulated"])
def test_match_trains_as_the_plain_module_and_the_monitor_sees_its_rates(
    configure: Any, options: dict[str, Any]
) -> None:
    loggers = [MemoryLogger(), MemoryLogger()]
    plain = Stored(configure)
    expected = fit(
        plain, LearningRateMonitor("step", log_momentum=True), logger=loggers[0], **options
    )
    stored = Stored(configure, sigma=0.07)
    found = fit(
        stored,
        Settings(),
        LearningRateMonitor("step", log_momentum=True),
        logger=loggers[1],
        **options,
    )
    assert_close(stored.effective(), plain.effective())
    rates = [[row for row in one.rows if any("lr" in name for name in row[1])] for one in loggers]
    assert rates[0]
    assert rates[0] == rates[1]
    for one, other in zip(expected.optimizers, found.optimizers, strict=True):
        for group, others in zip(one.param_groups, other.param_groups, strict=True):
            assert {**group, "params": 0} == {**others, "params": 0}


class Manual(Stored):
    """Two optimizers of which one is stepped by a closure, and clipped by hand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()

        def closure() -> Tensor:
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        second.step(closure)
        first.step()


def test_several_optimizers() -> None:
    def configure(module: Any) -> Any:
        return [
            torch.optim.NAdam(module.first.parameters(), lr=0.02, eps=TINY),
            torch.optim.AdamW(module.second.parameters(), lr=0.01, weight_decay=1.0, eps=TINY),
        ]

    plain, stored = Manual(configure), Manual(configure, sigma=0.07)
    fit(plain)
    fit(stored, Settings())
    assert_close(stored.effective(), plain.effective())


@pytest.mark.parametrize("kind", [Stored, Manual])
def test_beside_captured_steps(kind: type[Stored]) -> None:
    def configure(module: Any) -> Any:
        if kind is Stored:
            return adamw(module)
        return [adamw(module.first), adamw(module.second)]

    alone, beside = kind(configure, sigma=0.07), kind(configure, sigma=0.07)
    fit(alone, Settings(), max_epochs=1)
    fit(beside, UnitScaleCallback(), Settings(), max_epochs=1)
    assert_same_bits(beside.effective(), alone.effective())


def test_no_scaling_leaves_the_rates_alone() -> None:
    plain, stored = Stored(adamw, sigma=0.07), Stored(adamw, sigma=0.07)
    fit(plain)
    fit(stored, Settings(lr_scaling=None))
    assert_same_bits(stored.effective(), plain.effective())


@pytest.mark.parametrize("lr_scaling", ["match", "u-mup"])
@pytest.mark.parametrize("configure", [one_cycle, plateau, cosine])
def test_resuming_goes_on_bit_for_bit(configure: Any, lr_scaling: Any, tmp_path: Path) -> None:
    whole = Stored(configure, sigma=0.07)
    fit(whole, Settings(lr_scaling), max_epochs=5)
    half = Stored(configure, sigma=0.07)
    fit(half, Settings(lr_scaling), max_epochs=3).save_checkpoint(tmp_path / "half.ckpt")
    resumed = Stored(configure, sigma=0.07)
    fit(resumed, Settings(lr_scaling), max_epochs=5, ckpt_path=tmp_path / "half.ckpt")
    assert_same_bits(resumed.effective(), whole.effective())


def test_a_checkpoint_has_the_same_entries(tmp_path: Path) -> None:
    saved = []
    for callbacks in ([], [Settings()]):
        path = tmp_path / f"{len(callbacks)}.ckpt"
        fit(Stored(cosine), *callbacks).save_checkpoint(path)  # a sigma of 1: the same numbers
        checkpoint = torch.load(path, weights_only=False)
        saved.append({name: checkpoint[name] for name in ("optimizer_states", "lr_schedulers")})
        saved[-1]["weights"] = checkpoint["state_dict"]
    assert_same_bits(saved[0], saved[1])


class Failing(Stored):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise KeyError("no")
        return super().training_step(batch, batch_idx)


def test_everything_is_undone_after_an_error() -> None:
    module, settings = Failing(adamw, sigma=0.07), Settings()
    trainer = pl.Trainer(
        **QUIET, max_epochs=1, callbacks=[settings], gradient_clip_val=1.0, plugins=half()
    )
    with pytest.raises(KeyError, match="no"):
        trainer.fit(module, loader())
    (optimizer,) = trainer.optimizers
    assert vars(optimizer).keys() == vars(adamw(module)).keys()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert [group["lr"] for group in optimizer.param_groups] == [0.02]
    assert "clip_gradients" not in vars(trainer.precision_plugin)
    assert settings.settings is not None
    settings.settings.restore()


def test_an_optimizer_that_cannot_follow_stops_the_fit_before_it_starts() -> None:
    class Both(Manual):
        def configure_optimizers(self) -> Any:
            self.made = [
                torch.optim.AdamW(self.first.parameters()),
                torch.optim.ASGD(self.second.parameters()),
            ]
            return self.made

    module = Both(adamw)
    with pytest.raises(ValueError, match=r"optimizer=ASGD\(\.\.\.\)"):
        fit(module, Settings())
    assert not module.made[0]._optimizer_step_pre_hooks


def test_no_optimizer_and_wrapped_ones() -> None:
    fit(Stored(adamw), Settings(), max_epochs=1)
    with pytest.warns(UserWarning, match="will run with no optimizer"):
        fit(Stored(lambda _: None), Settings(), max_epochs=1)

    module = Stored(adamw, sigma=0.07)
    trainer = fit(module, max_epochs=1)
    optimizer = trainer.optimizers[0]
    trainer.strategy.optimizers = [LightningOptimizer(optimizer)]
    (handle,) = scale_optimizers(trainer, module.infos(), "match")
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    handle.remove()
    assert not optimizer._optimizer_step_pre_hooks


def test_what_is_odd_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    module = Stored(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), sigma=0.07)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        fit(module, Settings())
    told = [one.message for one in caplog.records if "UnitScaleCallback" in one.message]
    assert len(told) == 1
    assert "SGD" in told[0]


# --- clipping ---------------------------------------------------------------------------------


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
def test_clipping_is_by_the_rms(algorithm: Any, threshold: float | None) -> None:
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


def test_clipping_by_hand_and_its_report(caplog: pytest.LogCaptureFixture) -> None:
    module = Clipped(adamw)
    module.by_hand = True
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        fit(module, Settings(), gradient_clip_val=0.5, gradient_clip_algorithm="norm")
    torch.testing.assert_close(module.found, torch.full_like(module.found, 0.5))
    told = [one.message for one in caplog.records if "gradient_clip_val" in one.message]
    assert len(told) == 1
    assert f"0.5 is taken as {0.5 * 66**0.5:.4g}" in told[0]


def test_clipping_is_attached_once_and_gives_back_what_it_shadowed() -> None:
    trainer = pl.Trainer(**QUIET)
    plugin = trainer.precision_plugin
    seen = []

    def others(optimizer: Any, clip_val: float, algorithm: Any) -> None:
        seen.append(clip_val)

    vars(plugin)["clip_gradients"] = others
    clipping = UnitClipping(trainer)
    clipping.remove()
    clipping.attach()
    clipping.attach()
    parameter = nn.Parameter(torch.ones(9))
    parameter.grad = torch.ones(9)
    plugin.clip_gradients(torch.optim.SGD([parameter], lr=0.1), 2.0)
    plugin.clip_gradients(torch.optim.SGD([parameter], lr=0.1), 0.0)
    assert seen == [6.0, 0.0]
    clipping.remove()
    clipping.remove()
    assert vars(plugin)["clip_gradients"] is others


# --- the loss scale ---------------------------------------------------------------------------


def half(**options: Any) -> MixedPrecision:
    # Lightning turns precision="16-mixed" on a CPU into BF16; the plugin itself can do FP16.
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))


class Watching(Stored):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scales: list[float] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def test_the_loss_scale_starts_at_one_and_is_the_scalers_from_then_on() -> None:
    module, plugin = Watching(adamw), half(growth_interval=4)
    fit(module, Settings(), plugins=plugin, max_epochs=2)
    assert module.scales == [1.0] * 4 + [2.0] * 4
    assert plugin.scaler.get_scale() == 4.0  # after the fit too, for a checkpoint
    fit(module, Settings(), plugins=plugin, max_epochs=1)
    assert module.scales[8:] == [4.0] * 4


def test_a_restored_scale_and_a_chosen_one_stay(tmp_path: Path) -> None:
    module = Watching(adamw)
    fit(module, plugins=half(init_scale=512.0), max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    resumed = Watching(adamw)
    fit(resumed, Settings(), plugins=half(), max_epochs=2, ckpt_path=tmp_path / "a.ckpt")
    assert resumed.scales == [512.0] * 4
    chosen = Watching(adamw)
    fit(chosen, Settings(), plugins=half(init_scale=8.0), max_epochs=1)
    assert chosen.scales == [8.0] * 4


def test_the_start_is_put_back_if_it_was_not_used() -> None:
    trainer = pl.Trainer(**QUIET, plugins=half())
    scaler = trainer.precision_plugin.scaler
    before = copy.deepcopy(scaler.state_dict())
    restore = start_loss_scale_at_one(trainer)
    assert scaler.get_scale() == 1.0
    restore()
    restore()
    assert scaler.state_dict() == before


@pytest.mark.parametrize("plugin", [None, "disabled", "bf16"])
def test_without_a_scaler_there_is_nothing_to_do(plugin: str | None) -> None:
    plugins = {
        None: None,
        "disabled": half(enabled=False),
        "bf16": MixedPrecision("bf16-mixed", "cpu"),
    }[plugin]
    start_loss_scale_at_one(pl.Trainer(**QUIET, plugins=plugins))()

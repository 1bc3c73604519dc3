"""Learning rates under scale rules, in real Trainers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.callbacks.trainer_settings import RuleSettings
from tests.callbacks.rule_runs import Classifier
from tests.callbacks.rule_runs import fit as fit_by_rules
from tests.callbacks.runs import QUIET, MemoryLogger, loader
from tests.callbacks.stored import TINY, Settings, Stored, adamw, fit, half
from tests.helpers import assert_same_bits


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name, one in first.items():
        error = float((one - second[name]).abs().max() / second[name].abs().max())
        assert error < 1e-10, (name, error)


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


@pytest.mark.slow_cases(4)
@pytest.mark.parametrize("configure", [one_cycle, warm_up, plateau, cosine])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulated"])
def test_match_trains_like_plain_module_with_same_rates(
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


def test_match_with_several_optimizers() -> None:
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
def test_rule_settings_with_captured_steps(kind: type[Stored]) -> None:
    def configure(module: Any) -> Any:
        if kind is Stored:
            return adamw(module)
        return [adamw(module.first), adamw(module.second)]

    alone, beside = kind(configure, sigma=0.07), kind(configure, sigma=0.07)
    fit(alone, Settings(), max_epochs=1)
    fit(beside, UnitScaleCallback(), Settings(), max_epochs=1)
    assert_same_bits(beside.effective(), alone.effective())


def test_no_lr_scaling_keeps_rates() -> None:
    plain, stored = Stored(adamw, sigma=0.07), Stored(adamw, sigma=0.07)
    fit(plain)
    fit(stored, Settings(lr_scaling=None))
    assert_same_bits(stored.effective(), plain.effective())


@pytest.mark.slow_cases
@pytest.mark.parametrize("lr_scaling", ["match", "u-mup"])
@pytest.mark.parametrize("configure", [one_cycle, plateau, cosine])
def test_resuming_is_bit_identical(configure: Any, lr_scaling: Any, tmp_path: Path) -> None:
    whole = Stored(configure, sigma=0.07)
    fit(whole, Settings(lr_scaling), max_epochs=5)
    half = Stored(configure, sigma=0.07)
    fit(half, Settings(lr_scaling), max_epochs=3).save_checkpoint(tmp_path / "half.ckpt")
    resumed = Stored(configure, sigma=0.07)
    fit(resumed, Settings(lr_scaling), max_epochs=5, ckpt_path=tmp_path / "half.ckpt")
    assert_same_bits(resumed.effective(), whole.effective())


def test_checkpoint_matches_plain_checkpoint(tmp_path: Path) -> None:
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


def test_error_undoes_rule_settings() -> None:
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


def test_unsupported_optimizer_is_an_error_before_fit() -> None:
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


def test_missing_and_wrapped_optimizers() -> None:
    fit(Stored(adamw), Settings(), max_epochs=1)
    with pytest.warns(UserWarning, match="will run with no optimizer"):
        fit(Stored(lambda _: None), Settings(), max_epochs=1)

    module = Stored(adamw, sigma=0.07)
    trainer = fit(module, max_epochs=1)
    optimizer = trainer.optimizers[0]
    trainer.strategy.optimizers = [LightningOptimizer(optimizer)]
    settings = RuleSettings("match")
    settings.follow_rates(trainer, module.infos())
    before = module.first.weight.detach().clone()
    optimizer.state.clear()
    for one in module.parameters():
        one.grad = torch.ones_like(one)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    torch.testing.assert_close(module.first.weight.detach(), before - 0.02 / 0.07)
    settings.restore()
    assert not optimizer._optimizer_step_pre_hooks


def test_optimizer_note_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    module = Stored(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), sigma=0.07)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        fit(module, Settings())
    told = [one.message for one in caplog.records if "UnitScaleCallback" in one.message]
    assert len(told) == 1
    assert "SGD" in told[0]


@pytest.mark.parametrize("has_norm", [True, False])
def test_weight_averaging_with_batch_norm_update(has_norm: bool) -> None:
    module: Any = Classifier()
    if has_norm:
        module.norm = nn.BatchNorm1d(4)
    average = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    if not has_norm:
        fit_by_rules(module, UnitScaleCallback("u-mup"), average, max_steps=-1, max_epochs=2)
        return
    with pytest.raises(
        MisconfigurationException, match=r"StochasticWeightAveraging: .* of norm \("
    ):
        fit_by_rules(module, UnitScaleCallback("u-mup"), average)

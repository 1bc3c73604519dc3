"""Wrong options are refused before anything changes, and changes are undone."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.rules.transform import PLAN_ATTRIBUTE
from tests.callbacks.rule_runs import (
    Classifier,
    Gradients,
    adamw,
    fit,
    loader,
    plan_of,
    rms,
    trainer_with,
    unit_scale,
    weights,
)
from tests.callbacks.test_manual_optimization import KINDS
from tests.helpers import assert_same_bits


@pytest.fixture(autouse=True)
def _keep_process_state() -> Iterator[None]:
    """Lightning ignores Ctrl-C for good once it has seen one."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def assert_restored(module: Any, trainer: pl.Trainer) -> None:
    """Nothing hangs on the module, its parameters, the optimizers or the precision plugin."""
    assert steps_of(module) is None
    assert not isinstance(module.training_step, CapturedStep)
    assert "log" not in vars(module)
    assert "clip_gradients" not in vars(trainer.precision_plugin)
    assert not any(one._backward_hooks for one in module.parameters())
    for optimizer in trainer.optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert "_lightning_unitscale_scaled_step" not in vars(optimizer)


REFUSED = [
    (lambda m: torch.optim.ASGD(m.parameters()), "u-mup", r"ASGD\(\.\.\.\)"),
    (lambda m: torch.optim.LBFGS(m.parameters()), "unit-scaling", r"LBFGS\(\.\.\.\)"),
    (lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1), "unit-scaling", "weight_decay"),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("configure", "method", "message"), REFUSED)
@pytest.mark.parametrize("checks", [0, 1])
def test_unsupported_optimizer_is_an_error(
    configure: Any, method: str, message: str, checks: int
) -> None:
    module, callback = Classifier(configure), unit_scale(method)
    before = weights(module)
    trainer = trainer_with(callback, num_sanity_val_steps=checks)
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, loader(), loader(8))
    assert_same_bits(weights(module), before)
    assert PLAN_ATTRIBUTE not in vars(module)
    assert_restored(module, trainer)
    # With hands off it is the user's own choice, and the module is as good as new.
    fit(module, unit_scale(method, lr_scaling=None), max_steps=1)
    assert len(plan_of(module)) > 5


@torch.compiler.disable  # Dynamo of torch 2.11 cannot trace the raising of what is there already
def _fail(error: BaseException) -> None:
    raise error


@pytest.mark.slow_cases
@pytest.mark.parametrize("error", [KeyError("no"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("where", ["step", "rehearsal", "callback"])
def test_error_and_interrupt_restore_module(error: BaseException, where: str) -> None:
    class Fails(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            if where == "callback" and trainer.global_step == 2:
                raise error

    class At(Classifier):
        armed = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.armed and batch_idx == {"step": 2, "rehearsal": 0}.get(where):
                _fail(error)
            return super().training_step(batch, batch_idx)

    pl.seed_everything(1, verbose=False)
    module, callback = At(), unit_scale("u-mup")
    before = weights(module)
    trainer = trainer_with(callback, Fails(), gradient_clip_val=1.0)
    raised = SystemExit if isinstance(error, KeyboardInterrupt) else KeyError
    with pytest.raises(raised):
        trainer.fit(module, loader(), loader(8))
    assert_restored(module, trainer)
    if where == "rehearsal":
        assert_same_bits(weights(module), before)
    after, seen = weights(module), Gradients()
    module.armed, error = False, KeyError("not again")
    if where != "callback":
        fit(module, callback, seen)
        if where != "rehearsal":
            assert_same_bits(seen.weights[0], after)
        assert 0.8 < rms(seen.weights[0]["first.weight"]) < 1.2
        assert 0.3 < seen.rms[0]["blocks.0.1.weight"] < 3


class Counting(pl.Callback):
    """Notes, for every real step of an optimizer, the weights before it."""

    def __init__(self) -> None:
        self.calls = 0
        self.starts: list[dict[str, Tensor]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = weights(pl_module)
        self.handles = [one.register_step_pre_hook(self._called) for one in trainer.optimizers]

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        for one in self.handles:
            one.remove()

    def _called(self, *_: Any) -> None:
        self.calls += 1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert not any(one.state for one in trainer.optimizers) or self.starts
        self.starts.append(weights(pl_module))


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", KINDS)
def test_manual_optimization_steps_and_restores(kind: Any) -> None:
    from tests.callbacks.runs import loader as pairs

    pl.seed_everything(1, verbose=False)
    # It comes second, and checks what the rehearsals of the first have left behind.
    module, counting = kind(), Counting()
    trainer = trainer_with(unit_scale("u-mup"), counting, max_epochs=1, max_steps=-1)
    trainer.fit(module, pairs(32))
    expected = {"Adversarial": 16, "Accumulating": 4}.get(kind.__name__, 8)
    assert counting.calls == expected
    start = counting.starts[0]
    for name in ("first.weight", "second.weight"):
        assert rms(start[name]) == pytest.approx(1, rel=0.012)
        shape = counting.before[name] / rms(counting.before[name])
        torch.testing.assert_close(start[name] / rms(start[name]), shape)
    assert_restored(module, trainer)


class Adversaries(Classifier):
    """Two networks with an optimizer each, clipped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 1))
        self.rms: list[float] = []

    def configure_optimizers(self) -> Any:
        mine = [one for name, one in self.named_parameters() if not name.startswith("judge")]
        return [adamw(self.judge), torch.optim.AdamW(mine, lr=1e-2)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        judge, maker = self.optimizers()

        self.toggle_optimizer(judge)
        judge.zero_grad()
        self.manual_backward(F.softplus(self.judge(self.forward(batch[0]))).mean())
        self.clip_gradients(judge, 3.0, "norm")
        judge.step()
        self.untoggle_optimizer(judge)
        self.note(judge)

        self.toggle_optimizer(maker)
        maker.zero_grad()
        self.manual_backward(F.softplus(-self.judge(self.forward(batch[0]))).mean())
        self.clip_gradients(maker, 3.0, "norm")
        maker.step()
        self.untoggle_optimizer(maker)
        self.note(maker)

    @torch.compiler.disable
    def note(self, optimizer: Any) -> None:
        grads = [one.grad for group in optimizer.param_groups for one in group["params"]]
        if all(one is not None for one in grads):  # a rehearsal has none
            self.rms.append(rms(torch.cat([one.flatten() for one in grads])))


@pytest.mark.slow
def test_adversarial_gradients_are_at_rms_1_after_first_batch() -> None:
    pl.seed_everything(1, verbose=False)
    module = Adversaries()
    fit(module, unit_scale("u-mup"), max_epochs=1, max_steps=-1)
    found = module.rms[-6:]  # three batches: the first one measures
    assert len(module.rms) >= 8
    assert all(0.25 < one < 3.01 for one in found), found
    for name in ("judge.0.weight", "judge.2.weight", "first.weight"):
        assert plan_of(module).parameters[name].action == "scaled"


class Iterating(Classifier):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return F.cross_entropy(self.forward(batch[0]), batch[1])


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_dataloader_iter_step_is_an_error() -> None:
    module = Iterating()
    before = weights(module)
    trainer = trainer_with(unit_scale("u-mup"))
    with pytest.raises(MisconfigurationException, match="dataloader_iter"):
        trainer.fit(module, loader(), loader(8))
    assert_same_bits(weights(module), before)
    assert_restored(module, trainer)


def test_on_unknown_error_raises() -> None:
    class Odd(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return self.readout(torch.fft.fft(self.first(x)).abs())

    module = Odd()
    before = weights(module)
    trainer = trainer_with(unit_scale("u-mup", on_unknown="error"))
    with pytest.raises(RuntimeError, match=r"on_unknown='error': .*\. Expected .*\. "):
        trainer.fit(module, loader(), loader(8))
    assert_same_bits(weights(module), before)
    assert_restored(module, trainer)
    fit(module, unit_scale("u-mup", on_unknown="keep"), max_steps=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Found keys that are not in the model state dict")
def test_predict_with_unscaled_weights_is_an_error(tmp_path: Path) -> None:
    """A step without a loss does not show the readout; the checkpoint knows it."""
    pl.seed_everything(1, verbose=False)
    trainer, _ = fit(Classifier(), unit_scale("u-mup"), max_epochs=1, max_steps=-1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    expected = trainer.predict(trainer.lightning_module, loader(16))
    module = Classifier.load_from_checkpoint(tmp_path / "a.ckpt", strict=False)
    before = weights(module)
    alone = trainer_with(unit_scale("u-mup"))
    with pytest.raises(MisconfigurationException, match=r"Pass it as ckpt_path to the Trainer\.$"):
        alone.predict(module, loader(16))
    assert_restored(module, alone)
    assert_same_bits(weights(module), before)
    again = trainer_with(unit_scale("u-mup"))
    found = again.predict(module, loader(16), ckpt_path=tmp_path / "a.ckpt")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


class Narrow(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.last(self.first(batch[0]).relu()), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Found keys that are not in the model state dict")
def test_scaled_narrow_weights_are_not_scaled_again(tmp_path: Path) -> None:
    for seed in range(4):
        pl.seed_everything(seed, verbose=False)
        module, seen, again = Narrow(), Gradients(), Gradients()
        trainer = trainer_with(unit_scale("u-mup"), seen, max_steps=8)
        trainer.fit(module, loader())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        assert rms(seen.weights[0]["first.weight"]) == pytest.approx(1, rel=0.012)
        trainer_with(unit_scale("u-mup"), again, max_steps=1).fit(
            Narrow.load_from_checkpoint(tmp_path / "a.ckpt", strict=False), loader()
        )
        assert_same_bits(again.weights[0], weights(module))


_CONFIG = """
seed_everything: 3
model:
  class_path: examples.gpt.GPT
  init_args: {width: 32, depth: 1, num_heads: 2, context: 16, warmup_steps: 1}
data:
  class_path: examples.text.TextDataModule
  init_args: {context: 16, batch_size: 4, val_samples: 4, path: TEXT}
trainer:
  accelerator: cpu
  max_steps: 3
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning_unitscale.UnitScaleCallback
      init_args:
        method:
          class_path: lightning_unitscale.Rules
          init_args: {method: u-mup, residual_mult: 0.7, attention_mult: 1.5}
"""


@pytest.mark.slow
def test_lightning_cli_trains_by_rules(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(_CONFIG.replace("TEXT", str(text_file)))
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")  # as it sets it
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", f"--config={config}"])
    cli = LightningCLI(save_config_callback=None)
    explained = cli.trainer.callbacks[0].explain()
    assert "attention" in explained
    assert "scaled" in explained and "readout" in explained
    assert UnitScaleCallback("u-mup").explain() not in explained

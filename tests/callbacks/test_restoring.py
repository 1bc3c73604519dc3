"""After a run, and after an error, the module is as it was but for its training."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import re
import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from benchmarks.executed_products import has_torchs_own_kernels
from lightning_unitscale import Lossless, ScaleMonitor, Simulate, UnitScaleCallback
from tests.callbacks.modules import Evaluated, Regression, adamw
from tests.callbacks.runs import ARRANGEMENTS, QUIET, both, loader, run, unit_scale_of
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger")


def _attributes(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Every attribute of every submodule, tensors by identity."""
    return {name: dict(one.__dict__) for name, one in module.named_modules()}


def _assert_restored(module: Evaluated, before: dict[str, dict[str, Any]]) -> None:
    after = _attributes(module)
    assert after.keys() == before.keys()
    for name, attributes in after.items():
        extra = set(attributes) ^ set(before[name])
        assert extra <= {"_hparams", "_hparams_initial", "_log_hyperparams"}
        for key in ("_parameters", "_modules", "_forward_hooks", "_backward_hooks"):
            assert attributes[key] is before[name][key]
    for step in ("training_step", "validation_step", "forward", "log", "log_dict"):
        assert step not in module.__dict__
    assert module.training_step.__func__ is type(module).training_step
    assert not any(one._backward_hooks for one in module.parameters())
    # Torch's own kernels are back.
    assert has_torchs_own_kernels()
    pickle.dumps(module.state_dict())
    copy.deepcopy(module)


class Failing(Evaluated):
    """Raises where it is told to."""

    def __init__(self, where: str, error: type[BaseException]) -> None:
        super().__init__(adamw)
        self.where: str | None = where
        self.error = error

    def raise_in(self, where: str) -> None:
        if self.where == where and self.global_step == 2:
            raise self.error("on purpose")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.raise_in("step")
        if self.where == "backward" and self.global_step == 2:
            loss.register_hook(lambda _: self.raise_in("backward"))
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.raise_in("hook")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.raise_in("validation")
        return super().validation_step(batch, batch_idx)


class _FailingCallback(pl.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.raise_in("callback")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.raise_in("setup")


class _Stopped(BaseException):
    """Neither an ``Exception`` nor Ctrl-C."""


@pytest.mark.parametrize(
    ("where", "error", "how"),
    [
        *itertools.product(
            ("step", "backward", "hook", "callback", "validation"),
            [LookupError],
            ["both", "both, all"],
        ),
        ("step", KeyboardInterrupt, "both"),
        ("step", _Stopped, "both"),
        ("step", _Stopped, "both, all"),
        ("callback", KeyboardInterrupt, "both"),
        ("callback", KeyboardInterrupt, "both, all"),
    ],
)
def test_an_error_leaves_the_module_as_it_was(where: str, error: Any, how: str) -> None:
    pl.seed_everything(2, verbose=False)
    module = Failing(where, error)
    before = _attributes(module)
    trainer = pl.Trainer(
        callbacks=[*ARRANGEMENTS[how](), _FailingCallback()],
        max_steps=6,
        val_check_interval=2,
        **QUIET,
    )
    # Lightning ends the process on Ctrl-C.
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        trainer.fit(module, loader(), loader(4))
    _assert_restored(module, before)
    # It can be trained again, by the same callbacks, as one that was never captured.
    module.where = None
    module.train()  # an error in the validation leaves it in evaluation mode
    weights = copy.deepcopy(module.state_dict())
    results = []
    for callbacks in ([], [one for one in trainer.callbacks if type(one) in _OURS]):
        module.load_state_dict(weights)
        pl.seed_everything(2, verbose=False)
        pl.Trainer(callbacks=callbacks, max_steps=4, **QUIET).fit(module, loader(), loader(4))
        results.append(copy.deepcopy(module.state_dict()))
    assert_same_bits(*results)


_OURS = (UnitScaleCallback, ScaleMonitor)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_run_leaves_the_module_as_it_was(stage: str) -> None:
    module = Evaluated(adamw)
    before = _attributes(module)
    callbacks = both()
    trainer = pl.Trainer(callbacks=callbacks, max_steps=2, **QUIET)
    # Two batches: the first one is measured.
    getattr(trainer, stage)(module, *[loader(8)] * (1 + (stage == "fit")))
    _assert_restored(module, before)
    # What ran can still be explained.
    step = {"fit": "training"}.get(stage, stage.replace("validate", "validation")) + "_step"
    text = unit_scale_of(callbacks).explain()
    assert re.search(
        rf"^{step}: (\d+) of \1 products in units \(100 % of their FLOPs\)$", text, re.M
    )
    assert unit_scale_of(callbacks).coverage.num_products == (6 - 1 if stage == "fit" else 2)
    assert unit_scale_of(callbacks).gauge
    module.forward(torch.randn(3, 6)).sum().backward()


def test_a_step_of_the_instance_is_put_back() -> None:
    module = Regression()
    own = module.training_step
    module.training_step = lambda batch, batch_idx: own(batch, batch_idx) * 2
    given = module.training_step
    pl.Trainer(callbacks=both(), max_steps=2, **QUIET).fit(module, loader())
    assert module.__dict__["training_step"] is given


def test_setup_that_fails_later_leaves_nothing_behind() -> None:
    class Refusing(pl.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            raise LookupError

    module = Regression()
    before = _attributes(module)
    with pytest.raises(LookupError):
        pl.Trainer(callbacks=[*both(), Refusing()], max_steps=2, **QUIET).fit(module, loader())
    _assert_restored(module, before)


def test_sigterm() -> None:
    class Terminating(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    from lightning.pytorch.utilities.exceptions import SIGTERMException

    module = Regression()
    before = _attributes(module)
    with pytest.raises(SIGTERMException):
        pl.Trainer(callbacks=[*both(), Terminating()], max_steps=9, **QUIET).fit(module, loader())
    _assert_restored(module, before)


def test_should_stop() -> None:
    class Stopping(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 2

    module = Regression()
    before = _attributes(module)
    pl.Trainer(callbacks=[*both(), Stopping()], max_steps=9, **QUIET).fit(module, loader())
    _assert_restored(module, before)


def test_the_exported_and_copied_module_is_plain() -> None:
    copies = []

    class Copying(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            copies.append(copy.deepcopy(pl_module))

    found = run(Regression, both(), others=lambda: [Copying()])
    exported = torch.export.export(found.module.eval(), (torch.randn(2, 6),))
    x = torch.randn(2, 6)
    torch.testing.assert_close(exported.module()(x), found.module(x))
    # A copy made while it trained computes what the module computed.
    assert torch.equal(copies[-1].eval()(x), found.module(x))
    assert torch.equal(copies[-1].train().loss((x, x[:, :2])) * 0, torch.zeros(()))


class _Pickling(pl.Callback):
    """Sends the whole module elsewhere, with the Trainer that it has, in the middle of a step."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.sent.append(pickle.dumps(pl_module))


def test_a_module_that_is_pickled_while_it_trains_is_plain() -> None:
    pickling = _Pickling()
    run(_adam_regression, both(), others=lambda: [pickling])
    module = pickle.loads(pickling.sent[-1])
    for name in ("training_step", "on_load_checkpoint", "on_save_checkpoint"):
        assert getattr(module, name).__func__ is getattr(Regression, name)
        assert getattr(module, name).__self__ is module


def _adam(module: torch.nn.Module) -> Any:
    return torch.optim.Adam(module.parameters(), lr=1e-2)


def _adam_regression() -> Regression:
    return Regression(_adam)


PICKLED: dict[str, Callable[[], pl.Callback]] = {
    "lossless": UnitScaleCallback,
    "all, held": lambda: UnitScaleCallback(Lossless(hold_parameters=True), depth="all"),
    "FP8": lambda: UnitScaleCallback(precision="fp8"),
    "simulated": lambda: UnitScaleCallback(simulate=Simulate(rounding="stochastic")),
    "u-muP": lambda: UnitScaleCallback("u-mup"),
    "monitor": lambda: ScaleMonitor(every_n_steps=2),
}


@pytest.mark.parametrize("name", PICKLED)
@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.filterwarnings("ignore:.* no matmul runs in FP8:UserWarning")
def test_a_callback_can_be_sent_to_another_process(name: str, is_used: bool) -> None:
    """As ``strategy="ddp_spawn"`` does with the Trainer and all that it has."""
    callback = PICKLED[name]()
    if is_used:
        run(_adam_regression, [callback])
    sent = pickle.loads(pickle.dumps(callback))
    found, expected = (run(_adam_regression, [one]).compared() for one in (sent, callback))
    assert_same_bits(found, expected)

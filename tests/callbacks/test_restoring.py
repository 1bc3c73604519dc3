"""After a run and after an error, everything but the trained weights is restored."""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_unitscale import ScaleMonitor, Simulate, UnitScaleCallback
from tests.callbacks.modules import Evaluated, Regression
from tests.callbacks.runs import QUIET, both, loader, run, unit_scale_of
from tests.fingerprint import assert_restored, of_run
from tests.helpers import assert_same_bits


def adam(module: torch.nn.Module) -> Any:
    return torch.optim.Adam(module.parameters(), lr=1e-2)


pytestmark = pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger")


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_run_restores_module(stage: str) -> None:
    module = Evaluated(adam)
    before = of_run(module)
    callbacks = both()
    trainer = pl.Trainer(callbacks=callbacks, max_steps=2, **QUIET)
    # Two batches: the first one is measured.
    getattr(trainer, stage)(module, *[loader(8)] * (1 + (stage == "fit")))
    assert_restored(module, before)
    # The steps that ran can still be explained.
    step = {"fit": "training"}.get(stage, stage.replace("validate", "validation")) + "_step"
    text = unit_scale_of(callbacks).explain()
    assert re.search(rf"^{step}: (\d+) of \1 matmuls scaled \(100 % of their FLOPs\)$", text, re.M)
    assert unit_scale_of(callbacks).coverage.num_matmuls == (6 - 1 if stage == "fit" else 2)
    assert unit_scale_of(callbacks).gauge
    module.forward(torch.randn(3, 6)).sum().backward()


def test_instance_training_step_is_restored() -> None:
    module = Regression()
    own = module.training_step
    module.training_step = lambda batch, batch_idx: own(batch, batch_idx) * 2
    given = module.training_step
    pl.Trainer(callbacks=both(), max_steps=2, **QUIET).fit(module, loader())
    assert module.__dict__["training_step"] is given


def test_failed_setup_of_later_callback_restores_module() -> None:
    class Refusing(pl.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            raise LookupError

    module = Regression()
    before = of_run(module)
    with pytest.raises(LookupError):
        pl.Trainer(callbacks=[*both(), Refusing()], max_steps=2, **QUIET).fit(module, loader())
    assert_restored(module, before)


def test_sigterm_restores_module() -> None:
    class Terminating(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    from lightning.pytorch.utilities.exceptions import SIGTERMException

    module = Regression()
    before = of_run(module)
    with pytest.raises(SIGTERMException):
        pl.Trainer(callbacks=[*both(), Terminating()], max_steps=9, **QUIET).fit(module, loader())
    assert_restored(module, before)


def test_should_stop_restores_module() -> None:
    class Stopping(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 2

    module = Regression()
    before = of_run(module)
    pl.Trainer(callbacks=[*both(), Stopping()], max_steps=9, **QUIET).fit(module, loader())
    assert_restored(module, before)


def test_exported_and_copied_module_is_plain() -> None:
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


def test_module_that_is_pickled_while_it_trains_is_plain() -> None:
    pickling = _Pickling()
    run(_adam_regression, both(), others=lambda: [pickling])
    module = pickle.loads(pickling.sent[-1])
    for name in ("training_step", "on_load_checkpoint", "on_save_checkpoint"):
        assert getattr(module, name).__func__ is getattr(Regression, name)
        assert getattr(module, name).__self__ is module


def _adam_regression() -> Regression:
    return Regression(adam)


PICKLED: dict[str, Callable[[], pl.Callback]] = {
    "lossless": UnitScaleCallback,
    "captured": lambda: UnitScaleCallback(remat="min_cut"),
    "FP8": lambda: UnitScaleCallback(precision="fp8"),
    "simulated": lambda: UnitScaleCallback(simulate=Simulate(rounding="stochastic")),
    "u-muP": lambda: UnitScaleCallback("u-mup"),
    "monitor": lambda: ScaleMonitor(every_n_steps=2),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", PICKLED)
@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.filterwarnings("ignore:.* no matmul runs in FP8:UserWarning")
def test_callback_can_be_sent_to_another_process(name: str, is_used: bool) -> None:
    """``strategy="ddp_spawn"`` sends the Trainer and everything in it."""
    callback = PICKLED[name]()
    if is_used:
        run(_adam_regression, [callback])
    sent = pickle.loads(pickle.dumps(callback))
    found, expected = (run(_adam_regression, [one]).compared() for one in (sent, callback))
    assert_same_bits(found, expected)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", PICKLED)
@pytest.mark.filterwarnings("ignore:.* no matmul runs in FP8:UserWarning")
def test_copied_running_callback_is_independent(name: str) -> None:
    """A checkpoint has copies of callbacks that are among a module's hyperparameters."""
    copies: list[Any] = []

    class Copying(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            copies.append(pickle.loads(pickle.dumps(trainer.callbacks[0])))

    found = run(_adam_regression, [PICKLED[name]()], others=lambda: [Copying()]).compared()
    assert repr(copies[-1]) == repr(PICKLED[name]())
    assert_same_bits(run(_adam_regression, [copies[-1]]).compared(), found)


class Noting(ScaleMonitor):
    """A user's callback, with an attribute of its own."""

    def __init__(self, note: str) -> None:
        super().__init__(every_n_steps=2)
        self.note = note


def test_copies_of_a_monitor_that_writes_to_tensorboard(tmp_path: Path) -> None:
    monitor, copies = Noting("x"), []

    class Copying(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            copies.append(copy.deepcopy(monitor))

    logger = TensorBoardLogger(tmp_path)
    trainer = pl.Trainer(callbacks=[monitor, Copying()], max_steps=2, **{**QUIET, "logger": logger})
    trainer.fit(Regression(), loader())
    assert copies[-1].note == "x" and not copies[-1].snapshots
    after = copy.deepcopy(monitor)
    assert after.table() == monitor.table()
    assert not after.compare(logger.log_dir).diverged

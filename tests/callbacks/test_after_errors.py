"""After any error, in any order of callbacks, everything is as it was."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch.utils.data import DataLoader

from benchmarks.executed_matmuls import has_torchs_own_kernels
from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback
from tests.callbacks.modules import Evaluated
from tests.callbacks.runs import QUIET, Rows, loader, pair
from tests.fingerprint import assert_restored, difference, of_module, of_object, of_run
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger")


def adam(module: torch.nn.Module) -> Any:
    return torch.optim.Adam(module.parameters(), lr=1e-2)


class Failing(Evaluated):
    """Raises where it is told to, in the second step."""

    of_tests = ("where", "error", "optimizer", "of_optimizer", "lr")

    def __init__(self, where: str | None, error: type[BaseException] = LookupError) -> None:
        super().__init__(adam)
        self.where = where
        self.error = error
        self.optimizer: Any = None

    def raise_in(self, where: str) -> None:
        if self.where == where and (self.global_step >= 1 or where == "setup"):
            raise self.error("on purpose")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.raise_in("step begins")
        loss = self.loss(batch)
        self.raise_in("step")
        if self.where == "backward":
            loss.register_hook(lambda _: self.raise_in("backward"))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        self.optimizer = super().configure_optimizers()
        self.optimizer.register_step_pre_hook(lambda *_: self.raise_in("optimizer step"))
        self.of_optimizer = of_object(self.optimizer)
        return self.optimizer

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.raise_in("hook")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.raise_in("validation")
        return super().validation_step(batch, batch_idx)


class _FailingCallback(pl.Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.raise_in("setup")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.raise_in("batch start")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.raise_in("batch end")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.raise_in("teardown")


class _FailingRows(Rows):
    def __init__(self, module: Failing) -> None:
        super().__init__(16, pair)
        self.module = module

    def __getitem__(self, index: int) -> Any:
        self.module.raise_in("data")
        return super().__getitem__(index)


class _Stopped(BaseException):
    """An exception that is neither an ``Exception`` nor Ctrl-C."""


_FAILURES: tuple[tuple[str, type[BaseException]], ...] = (
    ("step", LookupError),
    ("backward", torch.OutOfMemoryError),
    ("batch end", KeyboardInterrupt),
    ("setup", LookupError),
    ("optimizer step", _Stopped),
    ("step", torch.OutOfMemoryError),
    ("data", SystemExit),
    ("validation", LookupError),
    ("step begins", KeyboardInterrupt),
    ("hook", torch.OutOfMemoryError),
    ("batch start", SystemExit),
    ("teardown", LookupError),
)
_MADE: dict[str, Callable[[], pl.Callback]] = {
    "lossless": UnitScaleCallback,
    "simulated": lambda: UnitScaleCallback(simulate="fp8"),
    "FP8": lambda: UnitScaleCallback(precision="fp8"),
    "rules": lambda: UnitScaleCallback("unit-scaling"),
    "u-muP": lambda: UnitScaleCallback("u-mup"),
    "in a budget": lambda: UnitScaleCallback(remat="min_cut"),
    "monitor": lambda: ScaleMonitor(every_n_steps=1),
    "remat": lambda: RematCallback("min_cut"),
    "failing": _FailingCallback,
}
_AT_THE_DISPATCHER = ("lossless", "simulated", "FP8")
_CAPTURED = ("rules", "u-muP", "in a budget", "remat")
_CHANGING = ("simulated", "FP8", "rules", "u-muP")


def _cases() -> Iterator[tuple[str, str, type[BaseException]]]:
    """Every failure in both orders of the default, and by turns in all other arrangements."""
    for pair_of in (("lossless", "monitor"), ("monitor", "lossless")):
        for where, error in _FAILURES:
            yield " > ".join((*pair_of, "failing")), where, error
    turns = itertools.cycle(_FAILURES)
    arrangements = [(one, "failing", "monitor") for one in (*_AT_THE_DISPATCHER, *_CAPTURED)]
    arrangements += [("monitor", one, "failing") for one in (*_AT_THE_DISPATCHER[1:], *_CAPTURED)]
    arrangements += list(itertools.permutations(("lossless", "remat", "monitor")))
    arrangements += list(itertools.permutations(("failing", "simulated", "monitor")))
    for arrangement in arrangements:
        # To capture steps takes longer.
        for where, error in itertools.islice(turns, 1 if {*_CAPTURED} & {*arrangement} else 2):
            names = arrangement if "failing" in arrangement else (*arrangement, "failing")
            yield " > ".join(names), where, error


def _fit(module: Failing, callbacks: list[pl.Callback]) -> tuple[pl.Trainer, dict[str, Any]]:
    pl.seed_everything(2, verbose=False)
    trainer = pl.Trainer(callbacks=callbacks, max_steps=3, val_check_interval=2, **QUIET)
    before = of_run(module, trainer)
    data = DataLoader(_FailingRows(module), batch_size=4)
    if module.where is None:
        trainer.fit(module, data, loader(4))
    else:
        # Lightning ends the process on Ctrl-C.
        error = SystemExit if module.error is KeyboardInterrupt else module.error
        with pytest.raises(error):
            trainer.fit(module, data, loader(4))
    return trainer, before


@pytest.mark.slow_cases
@pytest.mark.parametrize(("arrangement", "where", "error"), [*_cases()])
def test_error_restores_module_and_trainer(
    arrangement: str, where: str, error: type[BaseException]
) -> None:
    module = Failing(where, error)
    callbacks = [_MADE[name]() for name in arrangement.split(" > ")]
    trainer, before = _fit(module, callbacks)
    assert_restored(module, before, trainer)
    if module.optimizer is not None:
        assert difference(module.of_optimizer, of_object(module.optimizer)) == {}
    if {*_CHANGING, *_CAPTURED} & {*arrangement.split(" > ")} - {"in a budget"}:
        return
    # It can be trained again, by the same callbacks, as one that was never trained.
    module.where = None
    module.train()  # an error in the validation leaves it in evaluation mode
    weights = copy.deepcopy(module.state_dict())
    results = []
    for again in ([], callbacks):
        module.load_state_dict(weights)
        trainer, before = _fit(module, again)
        assert_restored(module, before, trainer)
        results.append(copy.deepcopy(module.state_dict()))
    assert_same_bits(*results)


class _RaisingLater(pl.Callback):
    """Lightning calls no hook after one that raises in ``on_exception``."""

    def on_exception(self, *_: Any) -> None:
        raise ValueError("on_exception")


@pytest.mark.slow_cases
@pytest.mark.parametrize("names", [["lossless", "monitor"], ["monitor", "remat"], ["u-muP"]])
@pytest.mark.parametrize("where", ["setup", "step"])
def test_error_in_on_exception_restores_module(names: list[str], where: str) -> None:
    module = Failing(where)
    raising = _RaisingLater()
    callbacks = [raising, *(_MADE[name]() for name in names), _FailingCallback()]
    trainer = pl.Trainer(callbacks=callbacks, max_steps=3, **QUIET)
    before = of_run(module, trainer)
    with pytest.raises(ValueError, match="on_exception"):
        trainer.fit(module, loader(), loader(4))
    assert_restored(module, before, trainer)
    assert "on_exception" not in vars(raising)


@pytest.mark.slow_cases
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("names", [["lossless", "monitor"], ["monitor", "remat"]])
def test_failed_learning_rate_search_restores_module(names: list[str]) -> None:
    """Lightning takes the callbacks out of the Trainer for it, and leaves them out."""
    module = Failing("step")
    module.lr = 1e-3
    search = LearningRateFinder(num_training_steps=4)
    trainer = pl.Trainer(callbacks=[search, *(_MADE[n]() for n in names)], max_steps=3, **QUIET)
    before = of_run(module)
    with pytest.raises(LookupError):
        trainer.fit(module, loader(), loader(4))
    assert_restored(module, before)


class _Wrapping(pl.Callback):
    """Replaces the module's step, and may restore it."""

    def __init__(self, undo: str) -> None:
        self.undo = undo

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found = found = pl_module.training_step
        pl_module.training_step = lambda *args: 2 * found(*args)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.undo == "removed":
            del pl_module.training_step
        elif self.undo == "put back":
            pl_module.training_step = self.found


@pytest.mark.slow_cases
@pytest.mark.parametrize("undo", ["kept", "removed", "put back"])
@pytest.mark.parametrize("names", [["lossless", "monitor"], ["monitor", "remat"]])
@pytest.mark.parametrize("is_first", [False, True])
def test_training_step_wrapped_by_other_callback(
    undo: str, names: list[str], is_first: bool
) -> None:
    results = []
    for ours in ([], [_MADE[name]() for name in names]):
        torch.manual_seed(3)
        module = Failing(None)
        wrapping = _Wrapping(undo)
        _fit(module, [wrapping, *ours] if is_first else [*ours, wrapping])
        is_there = undo == "kept" or (undo == "put back" and not ours)
        assert ("training_step" in vars(module)) == is_there
        module.log = lambda *_: None
        torch.manual_seed(5)
        batch = next(iter(loader()))
        results.append((module.training_step(batch, 0), module.state_dict()))
    assert_same_bits(*results)


class _Nested(pl.Callback):
    """Trains another module within the run, with other callbacks."""

    def __init__(self) -> None:
        self.module = Failing(None)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        before = of_module(self.module, Failing.of_tests)
        callbacks = [ScaleMonitor(every_n_steps=1), UnitScaleCallback()]
        pl.Trainer(callbacks=callbacks, max_steps=2, **QUIET).fit(self.module, loader(), loader(4))
        assert difference(before, of_module(self.module, Failing.of_tests)) == {}
        assert not has_torchs_own_kernels()  # those of the outer run


def test_consecutive_and_nested_trainers_restore_module() -> None:
    module = Failing(None)
    callbacks: list[pl.Callback] = [UnitScaleCallback(), ScaleMonitor(every_n_steps=1)]
    before = of_run(module)
    for order in (callbacks, callbacks[::-1], [*callbacks, _Nested()]):
        pl.Trainer(callbacks=order, max_steps=2, **QUIET).fit(module, loader(), loader(4))
        assert_restored(module, before)

"""Steps with state outside the module: every side effect happens once."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_unitscale import UnitScaleCallback
from tests.callbacks.modules import Regression
from tests.callbacks.runs import QUIET, assert_same_run, both, loader, matmuls_run, run

STEPS_DONE = [0]
NUMBER = 0


def _others() -> list[Tensor]:
    return list(torch.randn(40, 4, 6, generator=torch.Generator().manual_seed(5)))


class Replay:
    """A buffer as reinforcement learning keeps one."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []

    def mean_with(self, value: Tensor) -> Tensor:
        self.items.append(value.detach().clone())
        return torch.stack(self.items).mean()


class Endless:
    """Begins again with its loader."""

    def __init__(self) -> None:
        self.loader = DataLoader(_others()[:3], batch_size=None)
        self.iterator = iter(self.loader)

    def __next__(self) -> Tensor:
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)


def _counted() -> int:
    global NUMBER
    NUMBER += 1
    return NUMBER


class Keeping(Regression):
    """The loss of a batch, plus a term that depends on stored state."""

    def __init__(self, prepare: Callable[[Any], Any], more: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        global NUMBER
        NUMBER = STEPS_DONE[0] = 0
        self.more = more
        self.kept = prepare(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.more(self, batch[0])


def _read(module: Any, x: Tensor) -> Any:
    return module(next(module.kept)).square().mean()


def _queued() -> Any:
    waiting: Any = queue.Queue()
    for one in _others():
        waiting.put(one)
    return waiting


def _counting(module: Any, x: Tensor) -> Any:
    module.kept.count += 1
    return module(x).square().mean() / module.kept.count


def _teaching(module: Any, x: Tensor) -> Any:
    with torch.no_grad():
        target = module.kept[0](x) + module.kept[0].running_mean
    return (module.first(x).mean(1) - target.mean(1)).square().mean()


def _counting_globally(module: Any, x: Tensor) -> Any:
    STEPS_DONE[0] += 1
    return module(x).square().mean() / (STEPS_DONE[0] + _counted())


KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Tensor], Any]]] = {
    "generator": (lambda _: (one for one in _others()), _read),
    "loader's iterator": (lambda _: iter(DataLoader(_others(), batch_size=None)), _read),
    "cycle": (lambda _: itertools.cycle(_others()[:3]), _read),
    "own iterator": (lambda _: Endless(), _read),
    "queue": (lambda _: _queued(), lambda module, x: module(module.kept.get()).mean()),
    "replay buffer": (
        lambda _: Replay(),
        lambda module, x: module(x).mean() * module.kept.mean_with(module(x).mean()),
    ),
    "namespace": (lambda _: SimpleNamespace(count=0), _counting),
    "hidden teacher": (lambda _: [nn.BatchNorm1d(6)], _teaching),
    "globals": (lambda _: None, _counting_globally),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", KINDS)
def test_state_outside_module_is_bit_identical(kind: str) -> None:
    _, callbacks = assert_same_run(lambda: Keeping(*KINDS[kind]), both)
    assert matmuls_run(callbacks) > 0


def test_evaluation_reads_iterator_once() -> None:
    class Reading(Keeping):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.training_step(batch, batch_idx)

    assert_same_run(lambda: Reading(*KINDS["generator"]), both, entry="validate")
    _, callbacks = assert_same_run(lambda: Reading(*KINDS["namespace"]), both, entry="validate")
    assert matmuls_run(callbacks) > 0


@pytest.mark.parametrize("options", [{"simulate": "fp8"}, {"precision": "fp8"}])
@pytest.mark.filterwarnings("ignore:UnitScaleCallback. training_step. .* matmuls scaled")
@pytest.mark.filterwarnings("ignore:.* no matmul runs in FP8:UserWarning")
def test_rounded_matmuls_read_iterator_once(options: dict[str, Any]) -> None:
    """They need units immediately, and measure the operands that they are about to round."""
    found = run(lambda: Keeping(*KINDS["generator"]), [UnitScaleCallback(**options)], max_steps=6)
    assert len(list(found.module.kept)) == len(_others()) - 6


class Starting(Regression):
    """Reads values in its steps that its hooks have set."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight = 1.0 + batch_idx
        self.mean = batch[0].mean()
        batch[0].mul_(2)
        self.log("weight", self.weight, on_step=True, on_epoch=True)

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.shift = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.weight + self.mean * self.second.bias.sum()


class Validated(Starting):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.shift


def test_step_reads_state_set_by_hook() -> None:
    _, callbacks = assert_same_run(Starting, both)
    assert matmuls_run(callbacks) > 0
    _, callbacks = assert_same_run(Validated, both, entry="validate")
    assert matmuls_run(callbacks) > 0


def test_rules_rehearsal_runs_hook() -> None:
    run(Starting, [UnitScaleCallback("unit-scaling")], max_steps=2)


class Writing(Regression):
    """Writes to its logger by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"mine": float(batch_idx)}, step=self.global_step)
        writer = self.logger.experiment
        writer.add_scalar("written", loss.detach(), self.global_step)
        writer.add_histogram("weights", self.first.weight, self.global_step)
        return loss


def test_step_that_writes_to_its_logger(tmp_path: Any) -> None:
    counted = []
    for name, callbacks in (("plain", []), ("ours", both())):
        pl.seed_everything(3, verbose=False)
        logger = TensorBoardLogger(tmp_path, name=name)
        pl.Trainer(max_steps=4, callbacks=callbacks, **{**QUIET, "logger": logger}).fit(
            Writing(), loader()
        )
        events = EventAccumulator(logger.log_dir, size_guidance={"histograms": 0})
        events.Reload()
        scalars = [[one.value for one in events.Scalars(tag)] for tag in ("mine", "written")]
        counted.append((scalars, [one.step for one in events.Histograms("weights")]))
        # The methods are the class's own again.
        assert not {"log_metrics", "add_scalar"} & (
            set(vars(logger)) | set(vars(logger.experiment))
        )
    assert counted[0] == counted[1]
    assert counted[0][1] == [0, 1, 2, 3]

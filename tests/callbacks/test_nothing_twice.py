"""Without FP8, FP16 or rules no step runs twice, so its side effects happen once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import Dataset

from lightning_unitscale import UnitScaleCallback
from tests.callbacks.modules import Evaluated, Regression, adamw
from tests.callbacks.runs import (
    ARRANGEMENTS,
    assert_same_run,
    both,
    loader,
    matmuls_run,
    unit_scale_of,
)
from tests.helpers import IS_TORCH_2_11


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def train_dataloader(self) -> Any:
        return loader()

    val_dataloader = train_dataloader


class Samples(Dataset[Any]):
    """A user's data set, to which a step adds."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return index


class Watching(pl.Callback):
    count = 0


def _of_a_callback(module: Any) -> Any:
    return next(one for one in module.trainer.callbacks if isinstance(one, Watching))


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "data module": lambda module: module.trainer.datamodule,
    "callback": _of_a_callback,
    "class": lambda module: type(module),
    "data set": lambda module: module.samples,
}


class Counting(Evaluated):
    """Counts its steps somewhere, and weighs the loss by the count."""

    count = 0

    def __init__(self, find: Callable[[Any], Any]) -> None:
        super().__init__(adamw)
        self.find = find
        self.samples = Samples()

    def on_fit_start(self) -> None:
        self.find(self).count = 0

    on_validation_start = on_fit_start

    def weight(self) -> int:
        holder = self.find(self)
        holder.count = holder.count + 1
        return int(holder.count)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.weight()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.weight()


@pytest.mark.parametrize("kind", HOLDERS)
def test_step_with_counter_runs_once_per_batch(kind: str) -> None:
    if kind == "class" and IS_TORCH_2_11:
        pytest.skip(
            "torch 2.11's own torch.compile does not see that an attribute of a class changes"
        )
    _, callbacks = assert_same_run(
        lambda: Counting(HOLDERS[kind]), both, data=Data, others=lambda: [Watching()]
    )
    assert matmuls_run(callbacks) > 0


def test_evaluation_with_counter_runs_once_per_batch() -> None:
    _, callbacks = assert_same_run(
        lambda: Counting(HOLDERS["data set"]), both, entry="validate", data=Data
    )
    gauge = unit_scale_of(callbacks).gauge
    assert gauge.pair("first.linear:input").log2_sigma < -4


class Scheduled(Regression):
    """Sets its learning rate in the step, by hand and by its schedule."""

    def __init__(self, optimizer: Any, by_hand: bool) -> None:
        super().__init__(optimizer)
        self.by_hand = by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.by_hand:
            for group in self.optimizers().param_groups:
                group["lr"] = group["lr"] * 0.9
        else:
            self.lr_schedulers().step()
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return self.loss(batch)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["both", "both, captured"])
@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_step_that_sets_learning_rate(by_hand: bool, name: str) -> None:
    # The optimizer's state, with everything in its groups, is part of the comparison.
    assert_same_run(lambda: Scheduled(adamw, by_hand), ARRANGEMENTS[name])


class Tempered(Regression):
    """Has its own optimizer for a number that is no parameter, as in soft actor-critic."""

    def __init__(self, several: bool) -> None:
        super().__init__(norm=False)
        self.temperature = torch.zeros(1, requires_grad=True)
        mine = torch.optim.Adam([self.temperature], lr=0.1)
        self.mine = {"temperature": mine} if several else mine

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mine = self.mine["temperature"] if isinstance(self.mine, dict) else self.mine
        loss = self.loss(batch)
        mine.zero_grad()
        (self.temperature.exp() * loss.detach()).sum().backward()
        mine.step()
        return loss * self.temperature.detach().exp().sum()


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_step_with_private_optimizer(several: bool) -> None:
    found, _ = assert_same_run(lambda: Tempered(several), both)
    assert float(found.module.temperature.detach()) != 0.0


class Freezing(Regression):
    """Dynamo fails on a number that it does not know where it needs a constant."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.first.weight.requires_grad_(batch_idx % 2 == 0)
        return self.loss(batch)


@pytest.mark.slow
@pytest.mark.skipif(IS_TORCH_2_11, reason="its Dynamo captures the step anew for each batch")
def test_step_that_dynamo_cannot_trace() -> None:
    with pytest.warns(UserWarning, match=r"fails on `self.first.weight.requires_grad_\(batch"):
        _, callbacks = assert_same_run(Freezing, lambda: [UnitScaleCallback(remat="min_cut")])
    # The functions that the step calls are captured all the same.
    assert matmuls_run(callbacks) > 0
    explained = unit_scale_of(callbacks).explain()
    assert "graph break" in explained and "test_nothing_twice.py" in explained


def test_weight_frozen_and_unfrozen_within_step() -> None:
    _, callbacks = assert_same_run(Freezing, both)
    gauge = unit_scale_of(callbacks).gauge
    # Its gradient is needed in every other step, the first among them.
    assert {"first.linear", "first.linear:weight", "second.linear"} <= set(gauge)
    coverage = unit_scale_of(callbacks).coverage
    assert coverage.num_in_units == coverage.num_matmuls > 0


class Uneven(Regression):
    """A module whose last batch does not fit. Its error is unchanged and can be caught."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0] if batch_idx != 1 else batch[0][:, :5]
        try:
            return self.loss((x, batch[1]))
        except RuntimeError as error:
            self.message = str(error)
            return self.loss(batch) * 0.5


def test_caught_error_matches_plain_step() -> None:
    found, callbacks = assert_same_run(Uneven, both)
    assert found.module.message == "mat1 and mat2 shapes cannot be multiplied (4x5 and 6x8)"
    assert matmuls_run(callbacks) > 0

"""Steps that get numbers from NumPy and from generators of their own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.callbacks.modules import regression_with
from tests.callbacks.runs import ARRANGEMENTS, assert_same_run, unit_scale_of


def _warm_up(self: Any, batch: Any, batch_idx: int) -> Any:
    weight = 1 / (1 + np.exp(-0.25 * (self.global_step - 3)))
    prediction = self.forward(batch[0])
    self.log("weight", weight)
    return F.mse_loss(prediction, batch[1]) + weight * prediction.square().mean()


TABLE = np.linspace(0.0, 1.0, 11)


def _table(self: Any, batch: Any, batch_idx: int) -> Any:
    scale = TABLE[min(self.global_step, 10)] + np.clip(self.global_step / 7, 0, 1)
    return self.loss(batch) * (scale + 0.5).round(3) / np.pi


def _mixed(self: Any, batch: Any, batch_idx: int) -> Any:
    share = np.random.beta(0.4, 0.4)
    width = int(6 * np.sqrt(1.0 - share))
    start = np.clip(np.random.randint(6) - width // 2, 0, 6)
    order = torch.randperm(len(batch[0]))
    x = batch[0].clone()
    x[:, start : start + width] = x[order, start : start + width]
    prediction = self.forward(x)
    loss = F.mse_loss(prediction, batch[1]) * share
    return loss + F.mse_loss(prediction, batch[1][order]) * (1 - share)


def _short_types(self: Any, batch: Any, batch_idx: int) -> Any:
    # Neither is Python's arithmetic: the first rounds to FP32, the second wraps around.
    weight = np.float32(0.3) * 3 * (np.float32(0.3) + 0.1)
    count = int(np.uint8(200 + batch_idx) + np.uint8(100))
    return self.loss(batch) * weight + count * self.second.bias.sum() * 1e-3


def _own_arrays(self: Any, batch: Any, batch_idx: int) -> Any:
    x = np.tanh(batch[0].numpy() * 3)
    x = x + np.random.randn(6).astype(np.float32)
    return self.loss((torch.from_numpy(x), batch[1]))


def _array_in_place(self: Any, batch: Any, batch_idx: int) -> Any:
    if not hasattr(self, "shares"):
        self.shares = np.array([1.0, 0.5])
    self.shares *= 1.5
    return self.loss(batch) * float(self.shares.sum())


def _own_generator(self: Any, batch: Any, batch_idx: int) -> Any:
    if not hasattr(self, "random"):
        self.random = random.Random(3)
    x = batch[0] * self.random.uniform(0.5, 1)
    other = random.Random(5)
    return self.loss((x, batch[1])) + self.random.randint(0, 3) + other.random()


STEPS = [_warm_up, _table, _mixed, _short_types, _own_arrays, _array_in_place, _own_generator]


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("unit scale, captured", step) for step in STEPS),
        *(pytest.param("unit scale", step, marks=pytest.mark.slow) for step in STEPS),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_steps_with_random_numbers_are_bit_identical(name: str, step: Any) -> None:
    _, callbacks = assert_same_run(regression_with(step), ARRANGEMENTS[name])
    assert "first.linear" in unit_scale_of(callbacks).gauge

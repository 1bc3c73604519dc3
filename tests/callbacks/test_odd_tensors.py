"""Unusual tensors crash neither the monitor nor the gauge."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from tests.callbacks.modules import Regression
from tests.callbacks.runs import BOTH_WAYS, assert_same_run, loader, monitor_of, unit_scale_of


def _number(number: float) -> Any:
    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, generator=generator)
        return torch.where(x > 1.0, number, x), x[:2]

    return make


def _always(captured: dict[str, Any]) -> Any:
    return lambda: [
        UnitScaleCallback(**captured, recalibrate=2),
        ScaleMonitor(every_n_steps=1, on_violation=None),
    ]


@pytest.mark.slow_cases
@pytest.mark.filterwarnings("ignore:UnitScaleCallback.*terms (below|above):UserWarning")
@BOTH_WAYS
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 0.0, 1e38, 1e-40])
def test_special_numbers_give_bounded_units(number: float, captured: dict[str, Any]) -> None:
    _, callbacks = assert_same_run(
        lambda: Regression(norm=False),
        _always(captured),
        data=lambda: loader(make=_number(number)),
        max_steps=4,
    )
    assert len(monitor_of(callbacks).snapshots) == 4
    units = [
        unit
        for pair in unit_scale_of(callbacks).gauge.values()
        for unit in (pair.log2_sigma, pair.log2_gamma)
    ]
    assert all(abs(unit) <= 130 for unit in units)
    assert "linear" in monitor_of(callbacks).table(full=True)


class Odd(Regression):
    """Empty, 0-d, integer, boolean and complex tensors, and one that is all zero."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.embedding = nn.Embedding(5, 8)
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.register_buffer("zeros", torch.zeros(6, 6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        index = (x[:, :3] > 0).long() + 2
        hidden = self.first(x + x @ self.zeros) + self.embedding(index).sum(1)
        spectrum = torch.fft.fft(x.float()) * self.phase
        mixed = (spectrum[:, :2] @ spectrum[:, :2].mH).real.mean()
        nothing = x[:0] @ self.first.weight.T
        empty = torch.cat([hidden[:0], nothing]).sum() + x[:, :0].sum()
        vector = self.first.bias @ hidden[0]
        return self.second(hidden) * self.temperature + empty + 1e-3 * (mixed + vector)


@BOTH_WAYS
def test_unusual_tensors_are_bit_identical(captured: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="unscaled: complex numbers"):
        _, callbacks = assert_same_run(Odd, _always(captured), max_steps=4)
    assert {"first.linear", "second.linear"} <= set(unit_scale_of(callbacks).gauge)
    assert len(monitor_of(callbacks).snapshots) == 4


def _sizes(self: Any, batch: Any, batch_idx: int) -> Any:
    x, y = batch
    keep = 0 if batch_idx % 3 == self.empty_at else len(x)
    prediction = self.forward(x[:keep])
    return (prediction - y[:keep]).square().sum() + 0 * self.second.bias.sum()


@pytest.mark.slow_cases
@BOTH_WAYS
@pytest.mark.parametrize("empty_at", [0, 1])
def test_empty_batches_are_bit_identical(empty_at: int, captured: dict[str, Any]) -> None:
    class Sizes(Regression):
        training_step = _sizes

        def __init__(self) -> None:
            super().__init__(norm=False)
            self.empty_at = empty_at

    _, callbacks = assert_same_run(Sizes, _always(captured), max_steps=6)
    # The gauge of an empty first batch is 1, and the next look finds a better one.
    assert unit_scale_of(callbacks).gauge.pair("first.linear:input").log2_sigma < -4


def test_loss_without_graph() -> None:
    class Constant(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                loss = self.loss(batch)
            return loss.requires_grad_()

    assert_same_run(Constant, _always({}), max_steps=3)

"""Compiled code is measured at its inputs and outputs, and not recompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from lightning_unitscale import ScaleMonitor
from tests.callbacks.runs import run
from tests.helpers import assert_same_bits
from tests.monitor.modules import Small


@torch.compile(backend="aot_eager")
def _loss(first: Tensor, second: Tensor) -> Tensor:
    return F.mse_loss(first.sin(), second)


class _Quiet(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class Wrapped(_Quiet):
    def build(self) -> None:
        self.first = torch.compile(self.first, backend="aot_eager")


class InPlace(_Quiet):
    def build(self) -> None:
        self.first.compile(backend="aot_eager")


class Function(_Quiet):
    def loss(self, batch: Any) -> Tensor:
        return _loss(self.forward(batch[0]), batch[1])


def _whole() -> Any:
    return torch.compile(_Quiet(), backend="aot_eager")


@pytest.mark.parametrize(
    ("make", "name", "inputs"),
    [
        (Wrapped, "first.compiled", ("input.batch_0",)),
        (InPlace, "first.compiled", ("input.batch_0",)),
        (Function, "_loss", ("second.linear", "input.batch_1")),
        (_whole, "training_step", ("input.batch_0", "input.batch_1")),
    ],
)
def test_compiled_module_has_inputs_and_outputs(
    make: Callable[[], Any], name: str, inputs: tuple[str, ...]
) -> None:
    def graphs(*callbacks: Any) -> Any:
        torch._dynamo.reset()
        counters.clear()
        found = run(make, callbacks, max_steps=4)
        return found, counters["stats"]["unique_graphs"], counters["frames"]["total"]

    plain, *times = graphs()
    monitor = ScaleMonitor(every_n_steps=2)
    watched, *again = graphs(monitor)
    assert_same_bits(watched.compared()[1:], plain.compared()[1:])
    assert again == times
    names = monitor.snapshots[-1].names
    name = name.strip("_")
    assert monitor.snapshots[-1].inputs[names.index(name)] == inputs
    gradient = monitor.snapshots[-1].statistics(name, "backward")
    assert gradient is not None
    assert gradient.rms > 0
    # Their parameters are read where nothing is seen, and have rows all the same.
    weights = [one for one in names if one.startswith("first.") and one.endswith("weight")]
    assert weights == ["first.weight"]
    assert monitor.snapshots[-1].statistics(weights[0], "backward") is not None

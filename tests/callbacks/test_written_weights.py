"""Steps and hooks that write into weights, within a memory budget and under rules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters

from lightning_unitscale import RematCallback, UnitScaleCallback
from tests.callbacks.runs import run
from tests.helpers import assert_same_bits

Write = Callable[["Writes"], None]


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Writes(pl.LightningModule):
    """Writes in its step, or in a hook before it."""

    def __init__(self, write: Write, *, in_hook: bool = False, rate: float = 0.05) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.teacher = copy.deepcopy(self.second).requires_grad_(False)
        self.write, self.in_hook, self.rate = write, in_hook, rate

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.third(F.relu(self.second(x)) - self.teacher(x))

    def on_train_batch_start(self, *_: Any) -> None:
        if self.in_hook:
            self.write(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.in_hook:
            self.write(self)
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad]
        return torch.optim.SGD(trained, lr=self.rate)


def clamped(module: Writes) -> None:
    module.second.weight.data.clamp_(-0.1, 0.1)


def normalized(module: Writes) -> None:
    module.second.weight.data = F.normalize(module.second.weight.data, dim=1)


def by_vector(module: Writes) -> None:
    layers = [module.first, module.second]
    vector = parameters_to_vector(one for layer in layers for one in layer.parameters())
    parameters = (one for layer in layers for one in layer.parameters())
    vector_to_parameters(vector.detach() * 0.9, parameters)


def averaged(module: Writes) -> None:
    pairs = zip(module.teacher.parameters(), module.second.parameters(), strict=True)
    for old, new in pairs:
        old.data = old.data * 0.5 + new.data * 0.5


def swapped(module: Writes) -> None:
    first, second = module.teacher.weight, module.second.weight
    first.data, second.data = second.data, first.data


@torch.no_grad()
def replaced(module: Writes) -> None:
    module.third.bias.copy_(module.third.weight.sum(1))


WRITES = [clamped, normalized, by_vector, averaged, swapped, replaced]


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize(
    "in_hook", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["step", "hook"]
)
@pytest.mark.parametrize("write", WRITES)
def test_planned_weight_writes_are_bit_identical(write: Write, in_hook: bool) -> None:
    def make() -> Writes:
        return Writes(write, in_hook=in_hook)

    planned, plain = run(make, [RematCallback("min_cut")]), run(make)
    assert_same_bits((planned.outputs, planned.weights), (plain.outputs, plain.weights))


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
        torch.nn.utils.parametrizations.weight_norm,
        torch.nn.utils.parametrizations.spectral_norm,
        torch.nn.utils.parametrizations.orthogonal,
    ],
    ids=["symmetric", "weight norm", "spectral norm", "orthogonal"],
)
def test_plan_of_computed_weights(change: Callable[[nn.Module], Any]) -> None:
    def make() -> Writes:
        module = Writes(lambda _: None)
        change(module.second)
        return module

    planned, plain = run(make, [RematCallback("min_cut")]), run(make)
    assert_same_bits((planned.outputs, planned.weights), (plain.outputs, plain.weights))


class Expects(pl.Callback):
    """Compares a write in a step with the same write outside it."""

    def __init__(self) -> None:
        self.num_compared = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        # The plan of the rules is made before this one.
        self.expected = Writes(pl_module.write)
        self.expected.load_state_dict(pl_module.state_dict())
        self.expected.write(self.expected)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert_same_bits(dict(pl_module.state_dict()), dict(self.expected.state_dict()))
        self.num_compared += 1


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("write", WRITES)
def test_rules_keep_values_written_by_step(write: Write) -> None:
    expects = Expects()
    run(
        lambda: Writes(write, rate=0.0),
        [UnitScaleCallback("u-mup"), expects],
        max_steps=3,
    )
    assert expects.num_compared == 3

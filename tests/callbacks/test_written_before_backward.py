"""Tensors that change between a captured step and its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale import RematCallback
from tests.callbacks.runs import loader, run
from tests.helpers import assert_same_bits

Write = Callable[["Written"], None]


class Written(pl.LightningModule):
    """A student and a frozen teacher, wide enough that the smallest plan computes both again."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 6)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(6))
        self.teacher = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 6))
        self.teacher.requires_grad_(False)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(100 * x).tanh()) * self.scale
        return hidden + self.conv(hidden[:, None]).tanh()[:, 0] * self.scale.exp()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].repeat(64, 1)
        return (self(x) * self.teacher(x).exp()).tanh().square().mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.write(self)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.05)


def _trained(module: Written) -> list[nn.Parameter]:
    return [one for one in module.parameters() if one.requires_grad]


def data_is_replaced(module: Written) -> None:
    for param in _trained(module):
        param.data = param.data * 0.5


def data_is_written(module: Written) -> None:
    for param in _trained(module):
        param.data.mul_(0.5)


def weights_are_swapped(module: Written) -> None:
    first, other = module.first.weight, module.teacher[0].weight
    first.data, other.data = other.data, first.data


@torch.no_grad()
def teacher_follows(module: Written) -> None:
    for param in module.teacher.parameters():
        param.mul_(0.5).add_(0.1)


@torch.no_grad()
def teacher_follows_at_once(module: Written) -> None:
    torch._foreach_mul_(list(module.teacher.parameters()), 0.5)


def teacher_is_loaded(module: Written) -> None:
    state = module.teacher.state_dict()
    module.teacher.load_state_dict({name: value * 0.5 for name, value in state.items()})


def both(module: Written) -> None:
    data_is_replaced(module)
    teacher_follows(module)


WRITES = [
    both,
    data_is_replaced,
    data_is_written,
    weights_are_swapped,
    teacher_follows,
    teacher_follows_at_once,
    teacher_is_loaded,
]


@pytest.mark.slow_cases
@pytest.mark.parametrize("budget", [0.0, "min_cut"])
@pytest.mark.parametrize("write", WRITES)
def test_planned_run_matches_plain_run(write: Write, budget: Any) -> None:
    planned, plain = (
        run(lambda: Written(write), callbacks, max_steps=3)
        for callbacks in ([RematCallback(budget)], [])
    )
    assert_same_bits((planned.outputs, planned.weights), (plain.outputs, plain.weights))


def test_invalid_in_place_write_is_an_error() -> None:
    @torch.no_grad()
    def write(module: Written) -> None:
        module.second.weight.mul_(0.5)

    for callbacks in ([], [RematCallback(0.0)]):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(lambda: Written(write), callbacks, max_steps=2)


def test_dispatch_mode_ends_with_backward_pass() -> None:
    seen = []

    class Looks(pl.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            seen.append(len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))

        def on_after_backward(self, *_: Any) -> None:
            seen.append(len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))

    run(
        lambda: Written(lambda _: None),
        [RematCallback("min_cut")],
        others=lambda: [Looks()],
        max_steps=2,
        data=lambda: loader(8),
    )
    assert seen == [1, 0, 1, 0]
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()

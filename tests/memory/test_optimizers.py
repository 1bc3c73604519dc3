"""Optimizer state, against that of real optimizers after a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves

from lightning_unitscale.memory.real_memory import optimizer_state_bytes
from lightning_unitscale.profiler import profile_graph
from tests.memory.oracles import storage_bytes, sum_of

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AMSGrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "SGD": torch.optim.SGD,
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adafactor": torch.optim.Adafactor,
}


def _module() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def _real_state(optimizer: torch.optim.Optimizer, module: nn.Module, given: Tensor) -> int:
    sum_of(module(given)).backward()
    optimizer.step()
    return storage_bytes(tree_leaves(list(optimizer.state.values())))


@pytest.mark.slow_cases(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predicted_state_matches_real_optimizer(name: str) -> None:
    module, given = _module(), torch.randn(5, 8)
    optimizer = OPTIMIZERS[name](module.parameters())
    before = {param: dict(state) for param, state in optimizer.state.items()}
    by_class = profile_graph(module, given, optimizer=OPTIMIZERS[name]).optimizer_bytes
    by_instance = profile_graph(module, given, optimizer=optimizer).optimizer_bytes
    assert {param: dict(state) for param, state in optimizer.state.items()} == before
    assert by_class == by_instance == _real_state(optimizer, module, given)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "fused"])
def test_state_bytes_before_first_step(name: str) -> None:
    module, given = _module(), torch.randn(5, 8)
    module.append(nn.Linear(4, 4)).append(nn.Linear(4, 4))  # of which one stands for both
    optimizers = {**OPTIMIZERS, "fused": lambda params: torch.optim.AdamW(params, fused=True)}
    extra = nn.Parameter(torch.zeros(3))
    optimizer = optimizers[name]([{"params": module.parameters()}, {"params": [extra]}])
    extra.grad = torch.zeros(3)
    predicted = optimizer_state_bytes([optimizer])
    assert predicted == _real_state(optimizer, module, given)
    assert predicted == optimizer_state_bytes([optimizer])


def test_unmeasurable_state_counts_as_two_values() -> None:
    class Refuses(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise KeyError("closure")

    module = _module()
    with pytest.warns(UserWarning, match="Refuses: its state could not be measured"):
        found = optimizer_state_bytes([Refuses(module.parameters())])
    assert found == 2 * storage_bytes(module.parameters())


def test_step_counters_are_not_on_gpu() -> None:
    module, given = _module(), torch.randn(5, 8)
    profile = profile_graph(module, given, optimizer=torch.optim.Adam, device="cuda")
    assert profile.optimizer_bytes == 2 * profile.parameter_bytes


def test_gpu_default_is_foreach() -> None:
    module, given = _module(), torch.randn(5, 8)
    peaks = {
        foreach: profile_graph(
            module, given, device="cuda",
            optimizer=lambda p, foreach=foreach: torch.optim.Adam(p, foreach=foreach),
        ).timeline.live_bytes[-5:]
        for foreach in (None, True, False)
    }  # fmt: skip
    assert peaks[None] == peaks[True] != peaks[False]


def test_custom_optimizer_state_is_measured() -> None:
    class Halves(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param].setdefault(
                        "mean", torch.zeros_like(param, dtype=torch.bfloat16)
                    )
                    param.data.sub_(param.grad)

    profile = profile_graph(_module(), torch.randn(5, 8), optimizer=Halves)
    assert 2 * profile.optimizer_bytes == profile.parameter_bytes


def test_lr_schedule_is_not_advanced() -> None:
    module = _module()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    profile = profile_graph(module, torch.randn(5, 8), optimizer=optimizer)
    assert profile.optimizer_bytes == profile.parameter_bytes
    assert schedule.last_epoch == 0
    assert not optimizer.state


def test_frozen_parameters_have_no_state() -> None:
    module = _module()
    module[0].requires_grad_(False)
    profile = profile_graph(module, torch.randn(5, 8), optimizer=torch.optim.AdamW)
    trained = sum(4 * param.numel() for param in module[2].parameters())
    assert profile.gradient_bytes == trained
    assert profile.optimizer_bytes == 2 * trained + 2 * 4


def test_optimizer_of_other_module_is_an_error() -> None:
    optimizer = torch.optim.SGD(_module().parameters(), 0.1)
    with pytest.raises(ValueError, match=r"no parameter of the module.*Make a new one"):
        profile_graph(_module(), torch.randn(5, 8), optimizer=optimizer)


def test_factory_without_optimizer_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"it made a list. Expected an optimizer"):
        profile_graph(_module(), torch.randn(5, 8), optimizer=lambda p: list(p))

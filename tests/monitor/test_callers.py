"""An optimizer's closure is part of the step, but not what the optimizer computes itself."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_unitscale.monitor.names import Callers
from lightning_unitscale.patching import nothing

OPTIMIZER_STEP = Optimizer.profile_hook_step(nothing).__code__


class Multiplying(Optimizer):
    """An optimizer with its own matmuls, before and after the closure."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), {})

    def step(self, closure: Any = None) -> Any:
        weight = self.param_groups[0]["params"][0].detach()
        torch.mm(weight, weight.t())
        loss = None if closure is None else closure()
        torch.mm(weight, weight.t())
        return loss


class Paths(TorchFunctionMode):
    """Notes where matmuls are called: the path of a module, ``None`` for no part of the step."""

    def __init__(self, callers: Callers) -> None:
        super().__init__()
        self.callers = callers
        self.found: list[tuple[str, str | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = self.callers.find(sys._getframe(1))
        if func.__name__ in {"linear", "mm"}:
            self.found.append((func.__name__, None if caller is None else caller.path))
        return func(*args, **(kwargs or {}))


class Closures:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> Tensor:
        return self.module(torch.ones(4, 3)).sum()

    def method(self) -> Tensor:
        return self()


def _paths(module: nn.Module, step: Callable[[], Any]) -> list[tuple[str, str | None]]:
    with Paths(Callers(module, _paths.__code__, {OPTIMIZER_STEP})) as mode:
        step()
    return mode.found


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("kind", ["function", "object", "method", "partial"])
def test_closure_is_part_of_step(kind: str, by_keyword: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    several = Closures(module)
    closure = {
        "function": lambda: several(),
        "object": several,
        "method": several.method,
        "partial": functools.partial(several.method),
    }[kind]
    optimizer = Multiplying(module)
    given = {"closure": closure} if by_keyword else {}
    found = _paths(module, lambda: optimizer.step(*(() if by_keyword else (closure,)), **given))
    assert found == [("mm", None), ("linear", "0"), ("mm", None)]


def test_optimizer_without_closure_is_not_part_of_step() -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    assert _paths(module, lambda: Multiplying(module).step()) == [("mm", None)] * 2

"""Weights that a step averages into others are set to unit scale like all weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.rules.plan import Action, ParameterPlan
from lightning_unitscale.rules.roles import plan_parameters
from lightning_unitscale.rules.transform import unit_scale
from tests.helpers import assert_same_bits
from tests.rules.oracle import structure_of

Update = Callable[[nn.Parameter, nn.Parameter], Any]
Foreach = Callable[[list[nn.Parameter], list[nn.Parameter]], Any]


def of_each(update: Update) -> Foreach:
    def run(teacher: list[nn.Parameter], student: list[nn.Parameter]) -> None:
        for q, p in zip(teacher, student, strict=True):
            update(q, p)

    return run


def by_data(q: nn.Parameter, p: nn.Parameter) -> None:
    q.data = q.data * 0.9 + p.data * 0.1


def nothing(teacher: list[nn.Parameter], student: list[nn.Parameter]) -> None:
    pass


def by_foreach(teacher: list[nn.Parameter], student: list[nn.Parameter]) -> None:
    torch._foreach_mul_(teacher, 0.9)
    torch._foreach_add_(teacher, student, alpha=0.1)


AVERAGES: dict[str, Foreach] = {
    "data": of_each(by_data),
    "lerp_": of_each(lambda q, p: q.lerp_(p.detach(), 0.1)),
    "copy_": of_each(lambda q, p: q.copy_(q + 0.1 * (p - q))),
    "mul_, add_": of_each(lambda q, p: q.data.mul_(0.9).add_(p.data, alpha=0.1)),
    "div_": of_each(lambda q, p: q.mul_(9).add_(p).div_(10)),
    "a sum": of_each(lambda q, p: q.copy_((q + p) / 2)),
    "out": of_each(lambda q, p: torch.lerp(q, p, 0.1, out=q)),
    "views": of_each(lambda q, p: q.view(-1).lerp_(p.flatten(), 0.1)),
    "decay": of_each(lambda q, p: p.mul_(0.99)),
    "foreach": by_foreach,
    "foreach lerp": lambda teacher, student: torch._foreach_lerp_(teacher, student, 0.1),
}
OTHERS: dict[str, Foreach] = {
    "clamp": of_each(lambda q, p: q.lerp_(p, 0.1).clamp_(-1, 1)),
    "normalize": of_each(lambda q, p: q.copy_(F.normalize(p, dim=0))),
    "of gates": of_each(lambda q, p: q.lerp_(p, torch.sigmoid(p))),
    "a square": of_each(lambda q, p: q.copy_(p * q)),
    "inverse": of_each(lambda q, p: q.copy_(2.0 / p)),
    "a number": of_each(lambda q, p: q.copy_(p + 0.1)),
    "foreach clamp": lambda teacher, student: torch._foreach_clamp_min_(teacher + student, -1.0),
    "foreach matmul": lambda teacher, student: torch._foreach_mul_(teacher, student),
}


class Taught(nn.Module):
    """Follows a mean of its past values, which its step updates."""

    def __init__(self, update: Foreach = nothing, *, reads: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.update = update
        self.reads = reads

    def step(self) -> None:
        with torch.no_grad():
            self.update(list(self.teacher.parameters()), list(self.student.parameters()))

    def forward(self, x: Tensor) -> Tensor:
        self.step()
        target = self.teacher(x) if self.reads else torch.ones(())
        return (self.student(x) - target).square().mean() + self.student(x + 1).square().mean()


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def plans_of(module: nn.Module) -> dict[str, ParameterPlan]:
    return plan_parameters(structure_of(module, X), init_weights=True)


@pytest.fixture(scope="module")
def untouched() -> dict[str, ParameterPlan]:
    """The plan of the step that averages nothing."""
    return plans_of(Taught())


def actions_of(module: nn.Module) -> dict[str, Action]:
    return {fqn: plan.action for fqn, plan in plans_of(module).items()}


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("update", AVERAGES.values(), ids=AVERAGES)
def test_averages_do_not_change_plan(update: Foreach, untouched: dict[str, ParameterPlan]) -> None:
    structure = structure_of(Taught(update), X)
    plans = plan_parameters(structure, init_weights=True)
    assert plans == untouched
    assert plans["teacher.0.weight"].action == plans["student.0.weight"].action == "scaled"
    assert not structure.plain_adds


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("update", OTHERS.values(), ids=OTHERS)
def test_weights_with_other_updates_are_not_scaled(update: Foreach) -> None:
    actions = actions_of(Taught(update))
    assert actions["teacher.0.weight"] == actions["student.0.weight"] == "left"


@pytest.mark.parametrize("name", ["data", "lerp_", "foreach"])
def test_unread_average_has_scale_of_its_source(name: str) -> None:
    plans = plans_of(Taught(AVERAGES[name], reads=False))
    for fqn, plan in plans.items():
        if fqn.startswith("teacher"):
            source = plans[fqn.replace("teacher", "student")]
            assert replace(plan.info, fqn="") == replace(source.info, fqn="")
            assert plan.action == source.action != "left"


class ReadElsewhere(Taught):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.student[0].weight.exp().mean()


class Returned(Taught):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.teacher[0].weight * 2


def test_averaged_weights_share_one_scale() -> None:
    actions = actions_of(ReadElsewhere(AVERAGES["lerp_"]))
    assert actions["student.0.weight"] == actions["teacher.0.weight"] == "left"
    assert actions["student.2.weight"] == actions["teacher.2.weight"] == "scaled"


def test_returned_multiple_is_not_an_average() -> None:
    assert actions_of(Returned())["teacher.0.weight"] == "left"


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["foreach lerp", "lerp_", "copy_", "out", "views"])
def test_averaging_inside_step_matches_between_steps(name: str) -> None:
    """The first average of two equal tensors is that tensor, so that both begin alike."""
    inside, between = unit_scale(Taught(AVERAGES[name])), unit_scale(Taught())
    between.update = AVERAGES[name]  # type: ignore[assignment]
    plain = copy.copy(between)
    between.update = nothing  # type: ignore[assignment]
    losses = []
    for module in (inside, between):
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(module.student.parameters(), 0.1)  # type: ignore[union-attr]
        losses.append([])
        for _ in range(4):
            if module is between:
                Taught.step(plain)  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss = module(X)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.detach())
    assert losses[0][0] != losses[0][-1]
    assert_same_bits(losses[0], losses[1])
    assert_same_bits(list(inside.parameters()), list(between.parameters()))

"""Budgets as bytes and as floats: a float is always met, and plans are monotone in the budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT
from lightning_unitscale.memory.budgets import check_budget, limit_of
from lightning_unitscale.memory.planner import Planner
from lightning_unitscale.memory.remat_module import _planner
from tests.memory.networks import NETWORKS
from tests.memory.programs import random_problem


class UNet(nn.Module):
    """Convolutions with a connection past the lower half, and batch norm in training."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU())
        self.lower = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU())
        self.up = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.down(x)
        low = F.interpolate(self.lower(F.avg_pool2d(kept, 2)), scale_factor=2.0)
        return self.up(torch.cat([kept, low], 1)).square().mean()


def _gpt() -> tuple[Any, ...]:
    net, tokens = GPT(width=32, depth=3, context=32), torch.randint(256, (4, 32))
    return lambda x, y: F.cross_entropy(net(x).flatten(0, 1), y.flatten()), tokens, tokens


def _mlp() -> tuple[Any, ...]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(256, 32)


def _encoder() -> tuple[Any, ...]:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(8, 24, 32)


MODELS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "GPT": _gpt,
    "MLP": _mlp,
    "encoder": _encoder,
    "U-Net": lambda: (UNet(), torch.randn(4, 3, 32, 32)),
    **{name: NETWORKS[name] for name in ("attention", "batch_norm")},
}


def _assert_monotone(planner: Planner, num_budgets: int) -> None:
    """The peak falls and the time rises from the budget 1 to the budget 0, and each is met."""
    budgets: list[float] = np.linspace(1, 0, num_budgets).tolist()
    plans = [planner.plan(budget) for budget in budgets]
    floor, top = planner.floor.peak_bytes, planner.default.peak_bytes
    for budget, plan in zip(budgets, plans, strict=True):
        assert plan.peak_bytes <= floor + budget * (top - floor)
    for larger, smaller in itertools.pairwise(plans):
        assert smaller.peak_bytes <= larger.peak_bytes
        assert smaller.seconds >= larger.seconds


def _planner_of(name: str) -> Planner:
    torch.manual_seed(0)
    function, *inputs = MODELS[name]()
    return _planner(function, tuple(inputs), {}, None, 0)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["MLP", "U-Net"])
def test_peaks_fall_and_times_rise_with_a_smaller_budget(name: str) -> None:
    planner = _planner_of(name)
    _assert_monotone(planner, 15)
    assert planner.plan("min").peak_bytes < planner.plan(0.5).peak_bytes
    assert planner.plan(0.5).peak_bytes < planner.plan(1.0).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_plans_are_monotone_over_fifty_budgets(name: str) -> None:
    _assert_monotone(_planner_of(name), 50)


@pytest.mark.slow_cases
@pytest.mark.parametrize("seed", range(20))
def test_fifty_budgets_of_a_random_graph(seed: int) -> None:
    rng = np.random.default_rng(seed)
    resident, forward = rng.integers(0, 40, 2).tolist()
    planner = Planner(random_problem(rng, 30), resident_bytes=resident, forward_bytes=forward)
    _assert_monotone(planner, 50)


@pytest.mark.slow_cases
@pytest.mark.parametrize("history", [(), (0.0, 1.0), (0.93, 0.31)])
def test_plan_does_not_depend_on_earlier_plans(history: tuple[float, ...]) -> None:
    """All ranks make the same plan, also if one of them has planned before."""
    problem = random_problem(np.random.default_rng(3), 30)
    planner = Planner(problem)
    for budget in history:
        planner.plan(budget)
    for budget in (0.3, 0.62, 0.9):
        assert planner.plan(budget).hash == Planner(problem).plan(budget).hash


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *(("600MiB", 600 * 2**20), ("1.5 GB", 1_500_000_000), ("12 b", 12), (7, 7)),
        *((0.5, 0.5), (0.0, 0.0), (1.0, 1.0), ("min", 0.0), ("min_cut", "min_cut")),
    ],
)
def test_budget_strings_are_parsed(given: Any, expected: Any) -> None:
    found = check_budget(given)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("given", [1.5, -0.1, float("nan"), True, "abc", "minimum", 0, "0B", None])
def test_bad_budget_error_has_three_sentences(given: Any) -> None:
    with pytest.raises(ValueError, match=r"remat=.*: not .*\. Expected .*\. Pass ") as refused:
        check_budget(given, name="remat")
    assert "a float from 0.0 (the smallest peak" in str(refused.value)


def test_relative_budget_is_linear_in_bytes() -> None:
    assert [limit_of(share, 300, lambda: 100) for share in (0.0, 0.25, 1.0)] == [100, 150, 300]
    assert limit_of(50, 300, lambda: 100) == 50

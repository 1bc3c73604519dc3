"""Matmuls have the same names and units in captured graphs as in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.module_steps import matmuls_of
from lightning_unitscale.matmuls.gauge import Gauge
from lightning_unitscale.transforms import lossless_unit_scale, unit_scale
from tests.helpers import captured_copy


class Attention(nn.Module):
    """Two matmuls, of which rules multiply the second one's result alone."""

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(x[..., :1], x[..., :1].transpose(1, 2))  # sums of one term
        return torch.matmul(scores.softmax(-1), x)


class Broken(nn.Module):
    """A matmul, and two more after the graph breaks."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.matmul(x, x.transpose(1, 2))
        torch._dynamo.graph_break()
        return torch.matmul(torch.matmul(x, x).tanh(), x)


@torch.compiler.disable
def uncaptured(x: Tensor) -> Tensor:
    return torch.matmul(x, x)


class Between(nn.Module):
    """A matmul that no graph runs, between two that graphs run."""

    def forward(self, x: Tensor) -> Tensor:
        x = uncaptured(torch.matmul(x, x.transpose(1, 2)))
        return torch.matmul(x.tanh(), x)


class Before(nn.Module):
    """A matmul that no graph runs, before one that a graph runs."""

    def forward(self, x: Tensor) -> Tensor:
        x = uncaptured(torch.nn.functional.pad(x, (0, 0, 0, x.shape[2] - x.shape[1])))
        return torch.matmul(x.tanh(), x)


class Model(nn.Module):
    def __init__(self, middle: nn.Module, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.middle = middle
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))).square().mean() * 1e-3


def gauge_of(scaled: nn.Module, x: Tensor, times: int = 3) -> Gauge:
    """Return the units after some steps."""
    for _ in range(times):
        scaled(x).backward()
    gauge: Gauge = matmuls_of(scaled).gauge
    return gauge


@pytest.mark.parametrize(
    ("middle", "width", "count"),
    [(Attention, 16, 2), (Broken, 8, 3), (Between, 8, 3), (Before, 16, 2)],
)
def test_each_matmul_of_module_has_its_own_unit(
    middle: type[nn.Module], width: int, count: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16)
    model = Model(middle(), width)
    ours = gauge_of(unit_scale(model), x)
    uncaptured = gauge_of(lossless_unit_scale(model, x), x)
    assert set(ours) == set(uncaptured)
    gammas = {name: pair.log2_gamma for name, pair in ours.items() if "middle" in name}
    words = ["middle.matmul", *(f"middle.matmul_{number}" for number in range(1, count))]
    assert set(words) <= set(gammas)
    assert all(gammas[word] < -4 for word in words)
    assert len({gammas[word] for word in words}) > 1


@pytest.mark.filterwarnings("ignore:Model.forward. no graph could be captured")
def test_eager_call_uses_units_of_captured_call() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16)
    scaled = lossless_unit_scale(captured_copy(Model(Attention(), 16)), x)
    before = gauge_of(scaled, x)
    with torch.compiler.set_stance("force_eager"):
        scaled(x).backward()
    assert set(gauge_of(scaled, x, times=1)) == set(before)

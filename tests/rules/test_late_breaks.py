"""A graph break in a later step changes no factor, or raises an error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.rules.plan import Decision, RulePlan
from lightning_unitscale.rules.transform import unit_scale
from tests.helpers import assert_same_bits, run

X = torch.randn(6, 8)


class Block(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(F.gelu(hidden))


class Net(nn.Module):
    """A residual network, whose last sum weighs its branches by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(8, 4)
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x), torch.arange(6) % 4)


@pytest.mark.parametrize("place", ["", "first", "second"])
def test_graph_parts_keep_their_factors(place: str) -> None:
    scaled = unit_scale(Net())
    before = run(scaled, X)
    scaled.get_submodule(place).breaks = True  # type: ignore[assignment]
    assert_same_bits(run(scaled, X), before)


class Normed(nn.Module):
    """Layers of torch, which Dynamo does not capture by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("trains", [True, False])
def test_scaled_weight_read_outside_graphs_is_an_error(trains: bool) -> None:
    scaled = unit_scale(Normed())
    run(scaled, X)
    # Without a momentum, it reads the number of batches by ``float()``.
    scaled.layers[1].momentum = None  # type: ignore[index, union-attr]
    with torch.set_grad_enabled(trains), pytest.raises(CaptureError) as caught:
        scaled(X)
    assert "a matmul reads layers.0.weight outside of the captured graphs" in str(caught.value)
    assert "Tensor.item()" in str(caught.value)
    assert not scaled.layers[1].running_mean.isnan().any()  # type: ignore[index, union-attr]


class Penalized(nn.Module):
    """A loop with second derivatives, so Dynamo does not capture the function around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def slopes(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        return slope.square().mean()

    def forward(self, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for _ in range(2):
            loss = loss + self.layers(x).mean() + self.slopes(x)
        return loss


def test_error_has_user_line_and_solution() -> None:
    with pytest.raises(CaptureError) as caught:
        unit_scale(Penalized())(X.clone().requires_grad_())
    text = str(caught.value)
    assert "a matmul reads layers.0.weight outside of the captured graphs" in text
    assert "grad` at " in text and "test_late_breaks.py" in text
    # Not the package's own code, which stands between torch.autograd.grad and the engine.
    assert "fallback.py" not in text and "_engine_run_backward" not in text
    assert "method='lossless'" in text


def _plan(*names: str, output: float) -> RulePlan:
    decisions = {
        f"forward:{name}": Decision("add", ("x", ""), "residual", "", output=output + number)
        for number, name in enumerate(names)
    }
    return RulePlan(decisions)


def test_ambiguous_graph_part_is_an_error() -> None:
    plan = _plan("block.add", "block.add@1", output=0.5)
    assert plan.find("forward", "block.add@1", ("add", ("x", ""))) is not None
    with pytest.raises(CaptureError, match=r"block.add may be any of 2 operations"):
        plan.find("forward", "block.add@2", ("add", ("", "")))
    assert _plan("block.add", output=0.5).find("forward", "block.add@2", ("mul", ("", ""))) is None


def test_parts_without_factors_are_not_ambiguous() -> None:
    """Why an operation has none does not matter, such as that of ``detach`` in two branches."""
    decisions = {
        f"forward:detach{number}": Decision("detach", ("x",), origin, origin)
        for number, origin in (("", "kept"), ("@1", "derived"))
    }
    found = RulePlan(decisions).find("forward", "detach@2", ("detach", ("",)))
    assert found is not None
    assert not found.changes

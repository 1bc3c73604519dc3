"""Late units inside the user's torch.compile cause no recompilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_unitscale import UnitScaleCallback, attach
from tests.callbacks.late import SIZE, batches, optimizer_of
from tests.helpers import assert_same_bits

pytestmark = [
    pytest.mark.slow,  # Inductor compiles C++
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
NUM_STEPS = 8
# The step at which each tensor gives a unit, of those that give none at step 0.
FIRST = {
    "net.b.linear:weight": 1,
    "net.a.linear": 1,
    "net.down.linear:input": 2,
    "net.up.linear": 2,
    "net.aux.linear": 3,
}


class Net(nn.Module):
    """A factor of zeros, ReLUs that are dead at first, and a loss that is annealed from zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False)
        self.up, self.down, self.aux = (nn.Linear(SIZE, SIZE) for _ in range(3))
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor, shift: Tensor, weight: Tensor) -> Tensor:
        y = self.b(self.a(x)) + self.down(F.relu(self.up(x) - shift))
        return (y - x).square().mean() + weight * (self.aux(torch.tanh(x)) * x).mean()


class Module(nn.Module):
    def __init__(self, *, is_compiled: bool) -> None:
        super().__init__()
        self.net = Net()
        if is_compiled:
            self.net.compile()

    def forward(self, x: Tensor, step: int) -> Tensor:
        shift, weight = 100.0 * (step < 2), 1e-4 * max(step - 2, 0)
        return self.net(x, torch.tensor(shift), torch.tensor(weight))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(callbacks: list[Any], *, is_compiled: bool = True) -> dict[str, list[Any]]:
    """Losses, weights, and the known units after each step."""
    module = Module(is_compiled=is_compiled)
    optimizer = optimizer_of(module)
    found: dict[str, list[Any]] = {"losses": [], "gauges": [], "graphs": [], "live": []}
    with attach(module, optimizer, callbacks):
        for step, batch in enumerate(batches(NUM_STEPS)):
            loss = module(batch, step)
            loss.backward()
            found["losses"].append(loss.detach())
            parameters = module.named_parameters()
            found["live"].append([name for name, one in parameters if one.grad.any()])
            optimizer.step()
            optimizer.zero_grad()
            found["gauges"] += [one.gauge.state() for one in callbacks]
            found["graphs"].append(counters["stats"]["unique_graphs"])
    found["weights"] = [one.detach().clone() for one in module.parameters()]
    return found


@pytest.mark.parametrize("options", [{}, {"simulate": "fp8"}, {"precision": "fp8"}], ids=str)
def test_late_units_do_not_recompile(options: dict[str, Any]) -> None:
    plain = train([])
    torch._dynamo.reset()
    callback = UnitScaleCallback(recalibrate=None, **options)
    found = train([callback])
    assert found["live"] == plain["live"]
    # One graph, before units and with them; layers in FP8 are compiled in when they have theirs.
    assert len(set(found["graphs"])) == (3 if "precision" in options else 1)
    for tensor, step in FIRST.items():
        known = [tensor in gauge for gauge in found["gauges"]]
        assert known == [index >= step for index in range(NUM_STEPS)]
    assert found["gauges"][0].keys() | FIRST.keys() == found["gauges"][-1].keys()
    eager = train([UnitScaleCallback(recalibrate=None, **options)], is_compiled=False)
    assert found["gauges"] == eager["gauges"]
    if options:
        torch.testing.assert_close(found["losses"], eager["losses"])
    else:
        assert_same_bits((found["losses"], found["weights"]), (plain["losses"], plain["weights"]))

"""A step whose first call alone breaks the graph is captured once more."""

import threading

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.steps import ModuleSteps
from tests.helpers import assert_same_bits

NUM_CALLS = 4


class Prepared(nn.Module):
    """A module that prepares something under a lock in its first call, as libraries do."""

    breaks_always = False

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.is_ready = False
        self.lock = threading.Lock()
        self.logged: list[float] = []

    def log(self, loss: Tensor) -> None:
        self.logged.append(loss.item())

    def training_step(self, batch: Tensor) -> Tensor:
        hidden = self.layer(batch).relu()
        if not self.is_ready or self.breaks_always:
            with self.lock:
                self.is_ready = True
        loss = self.head(nn.functional.dropout(hidden, 0.5)).square().mean()
        self.log(loss)
        return loss


class NeverWhole(Prepared):
    """One that takes the lock in all calls."""

    breaks_always = True


def _run(module: Prepared) -> list[Tensor]:
    torch.manual_seed(1)
    results = []
    for size in (3, 3, 3, 3)[:NUM_CALLS]:
        module.zero_grad()
        loss = module.training_step(torch.randn(size, 4))
        loss.backward()
        results += [loss.detach(), *(param.grad.clone() for param in module.parameters())]
    return results


def _captured(kind: type[Prepared]) -> tuple[Prepared, ModuleSteps]:
    torch.manual_seed(0)
    module = kind()
    steps = ModuleSteps(module, ("training_step",), defer=("log",))
    steps.attach("test")
    return module, steps


@pytest.mark.parametrize(("kind", "is_whole"), [(Prepared, True), (NeverWhole, False)])
def test_what_the_first_call_has_removed_breaks_no_graph(
    kind: type[Prepared], is_whole: bool
) -> None:
    torch.manual_seed(0)
    plain = kind()
    expected = _run(plain)
    module, steps = _captured(kind)
    assert_same_bits(_run(module), expected)
    assert module.logged == plain.logged
    step = steps.steps["training_step"]
    assert (len(step.graphs) == 1) is is_whole
    assert bool(steps.graph_breaks) is not is_whole


def test_the_first_call_runs_once() -> None:
    module, steps = _captured(Prepared)
    module.training_step(torch.randn(3, 4))
    step = steps.steps["training_step"]
    assert step.second_capture.is_due
    assert len(step.graphs) == 2
    assert len(module.logged) == 1
    module.training_step(torch.randn(3, 4))
    assert not step.second_capture.is_due
    assert len(step.graphs) == 1

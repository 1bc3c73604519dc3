"""A step that breaks the graph only in its first call is captured again."""

import threading

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.remat import plan_remat
from lightning_unitscale.transforms import remat
from tests.helpers import assert_same_bits

NUM_CALLS = 4
LOCK = threading.Lock()


class Prepared(nn.Module):
    """A module that prepares something under a lock in its first call, as libraries do."""

    breaks_always = False

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.is_ready = False
        self.logged: list[float] = []

    def log(self, loss: Tensor) -> None:
        self.logged.append(loss.item())

    def training_step(self, batch: Tensor) -> Tensor:
        hidden = self.layer(batch).relu()
        if not self.is_ready or self.breaks_always:
            with LOCK:
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
def test_setup_in_first_call_breaks_only_first_graph(kind: type[Prepared], is_whole: bool) -> None:
    torch.manual_seed(0)
    plain = kind()
    expected = _run(plain)
    module, steps = _captured(kind)
    assert_same_bits(_run(module), expected)
    assert module.logged == plain.logged
    step = steps.steps["training_step"]
    assert (len(step.graphs) == 1) is is_whole
    assert bool(steps.graph_breaks) is not is_whole


def test_second_capture_does_not_rerun_first_call() -> None:
    module, steps = _captured(Prepared)
    module.training_step(torch.randn(3, 4))
    step = steps.steps["training_step"]
    assert step.second_capture.is_due
    assert len(step.graphs) == 2
    assert len(module.logged) == 1
    module.training_step(torch.randn(3, 4))
    assert not step.second_capture.is_due
    assert len(step.graphs) == 1


class Prepares(Prepared):
    """One that is called as a plain module."""

    def forward(self, batch: Tensor) -> Tensor:
        return self.training_step(batch)

    def log(self, loss: Tensor) -> None:
        pass


class NeverPrepared(Prepares):
    """One that takes the lock in all calls."""

    breaks_always = True


def _budget(share: float) -> int:
    """Bytes within which the whole step of a :class:`Prepares` is planned."""
    module = Prepares()
    module.is_ready = True
    plan = plan_remat(module, torch.randn(64, 4), budget=1.0)
    return int(share * plan.peak_bytes)


@pytest.mark.slow
def test_budget_in_bytes_applies_to_second_capture() -> None:
    torch.manual_seed(0)
    plain = Prepares()
    module = remat(plain, _budget(1.01))
    for _ in range(3):
        results = []
        for each in (plain, module):
            torch.manual_seed(1)
            each.zero_grad()
            loss = each(torch.randn(64, 4))
            loss.backward()
            results.append([loss.detach(), *(param.grad for param in each.parameters())])
        assert_same_bits(*results)
    assert len(module.remat_reports()) == 1


def test_budget_in_bytes_with_lasting_break_is_an_error() -> None:
    module = remat(NeverPrepared(), 10_000_000)
    with pytest.raises(ValueError, match="budget="):
        module(torch.randn(64, 4))


def test_relative_budget_applies_to_each_part() -> None:
    module = remat(NeverPrepared(), "min")
    module(torch.randn(64, 4)).backward()
    assert module.remat_reports()


@pytest.mark.slow
def test_impossible_budget_is_an_error_at_second_capture() -> None:
    module = remat(Prepares(), 16)
    module(torch.randn(64, 4)).backward()
    with pytest.raises(ValueError, match="is too small"):
        module(torch.randn(64, 4))

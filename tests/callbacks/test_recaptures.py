"""Steps that are captured too often run as written, but never after rules have scaled them."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_unitscale import RematCallback, UnitScaleCallback
from lightning_unitscale.capture import dynamo_capture as capture
from lightning_unitscale.capture import module_state
from lightning_unitscale.capture.module_steps import steps_of
from tests.callbacks.modules import Regression
from tests.callbacks.runs import loader, run
from tests.helpers import assert_same_bits

NUM_STEPS = 8


class Counted(Regression):
    """Notes how many graphs each step runs."""

    num_calls = 0

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.num_graphs: list[int] = []

    def factor(self) -> float:
        return 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.factor()

    def on_train_batch_end(self, *_: Any) -> None:
        steps = steps_of(self)
        if steps is not None:
            self.num_graphs.append(steps.steps["training_step"].num_graph_calls)


class ByText(Counted):
    """Depends on a number in a way that no graph can: it is captured in each step."""

    every = 1

    def factor(self) -> float:
        return 1.0 + int(f"{self.global_step // self.every}") / 8


class ByTextAtTimes(ByText):
    """Most steps run an earlier capture."""

    every = 3


class Cut(Counted):
    """A graph for each of many lines."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        torch._dynamo.graph_break()
        x = self.norm(self.first(x))
        torch._dynamo.graph_break()
        x = torch.tanh(x)
        torch._dynamo.graph_break()
        x = x + 0.5
        torch._dynamo.graph_break()
        return self.second(x)


class OneFunction(Counted):
    """One function is captured many times in a call, each time with another text."""

    def scaled(self, x: Tensor, text: str) -> Tensor:
        return x * (1.0 + len(text) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for length in range(8):
            x = self.scaled(x, "x" * length)
            torch._dynamo.graph_break()
        return super().forward(x)


def trained(kind: type[Counted], *callbacks: Any) -> tuple[Any, list[str]]:
    """A run, and its warnings that a step is captured too often."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(kind, list(callbacks), data=lambda: loader(4 * NUM_STEPS), max_steps=NUM_STEPS)
    texts = [str(one.message) for one in caught]
    return found, [text for text in texts if "captured again" in text or "run captured" in text]


def assert_equal_runs(found: Any, expected: Any) -> None:
    assert_same_bits(found.outputs, expected.outputs)
    assert_same_bits(found.weights, expected.weights)


@pytest.mark.slow
def test_step_recaptured_at_each_call_runs_uncaptured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module_state, "MANY_CAPTURES", 3)
    expected, _ = trained(ByText)
    found, (warning,) = trained(ByText, RematCallback("min_cut"))
    assert_equal_runs(found, expected)
    assert "ByText.training_step cannot run captured: it was captured again in 3 of " in warning
    assert "self._trainer" in warning and "runs uncaptured" in warning
    assert found.module.num_graphs[0] == 1 and found.module.num_graphs[-1] == 0


@pytest.mark.slow
def test_step_recaptured_occasionally_stays_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_state, "MANY_CAPTURES", 3)
    expected, _ = trained(ByTextAtTimes)
    found, said = trained(ByTextAtTimes, RematCallback("min_cut"))
    assert_equal_runs(found, expected)
    assert not said and found.module.num_graphs[-1] == 1


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "callback",
    [lambda: RematCallback("min_cut"), lambda: UnitScaleCallback("u-mup")],
    ids=["remat", "rules"],
)
@pytest.mark.parametrize(
    ("kind", "limits", "reason"),
    [
        (Cut, {"MANY_GRAPHS": 3}, "it is cut into more than 3 graphs"),
        (OneFunction, {"MANY_GRAPHS": 3}, "it is cut into more than 3 graphs"),
    ],
)
def test_step_in_many_graphs_runs_uncaptured(
    kind: Any, limits: Any, reason: str, callback: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in limits.items():
        monkeypatch.setattr(module_state, name, limit)
    expected, _ = trained(kind)
    found, (warning,) = trained(kind, callback())
    assert_equal_runs(found, expected)
    assert f"{kind.__name__}.training_step cannot run captured: {reason}" in warning
    assert "test_recaptures.py" in warning
    assert found.module.num_graphs[-1] == 0


def test_rules_are_skipped_if_first_step_exceeds_dynamo_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "RECOMPILE_LIMIT", 4)
    expected, _ = trained(OneFunction)
    found, (warning,) = trained(OneFunction, UnitScaleCallback("u-mup"))
    assert_equal_runs(found, expected)
    assert "too many times" in warning


@pytest.mark.slow
@pytest.mark.parametrize("method", ["u-mup", "unit-scaling"])
def test_dynamo_limit_never_disables_rules(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_state, "MANY_CAPTURES", 3)
    expected, (warning,) = trained(ByText, UnitScaleCallback(method))
    # How many depends on what Dynamo has learned about these attributes from earlier tests.
    assert re.match(r"ByText.training_step: it was captured again in \d of its first \d", warning)
    monkeypatch.setattr(capture, "RECOMPILE_LIMIT", 4)
    found, _ = trained(ByText, UnitScaleCallback(method))
    assert_equal_runs(found, expected)
    assert found.module.num_graphs == [1] * NUM_STEPS


class Skips(Counted):
    """Skips batches without samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if len(batch) == 0 else self.forward(batch).square().mean()


class SkipsWithin(Counted):
    """A separately captured function returns early."""

    def penalty(self, x: Tensor) -> Tensor | None:
        return None if len(x) == 0 else self.second(self.first(x)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.second(self.first(batch)).sum()
        torch._dynamo.graph_break()
        penalty = self.penalty(batch)
        torch._dynamo.graph_break()
        return loss if penalty is None else loss + penalty


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "callback",
    [lambda: RematCallback("min_cut"), lambda: UnitScaleCallback("u-mup")],
    ids=["remat", "rules"],
)
@pytest.mark.parametrize("kind", [Skips, SkipsWithin])
def test_call_without_operations_does_not_stop_capture(kind: type[Counted], callback: Any) -> None:
    """With rules, the unscaled model would run with the weights of the scaled one."""
    data = [torch.randn(n, 6) for n in (4, 0, 4, 5)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(is captured in|returned `None`)")
        found = run(kind, [callback()], data=lambda: DataLoader(data, batch_size=None), max_steps=4)
    first, _, *others = found.module.num_graphs
    assert others == [first, first] == 2 * [1 if kind is Skips else 3]

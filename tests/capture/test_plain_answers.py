"""Only torch itself sees that a step is being compiled."""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_unitscale
from lightning_unitscale.capture import answers
from lightning_unitscale.capture.module_steps import export_forward, steps_of
from lightning_unitscale.transforms import remat
from tests.helpers import assert_same_bits, captured_copy, run


class Asks(nn.Module):
    """Takes another algorithm if it is told so."""

    def __init__(self, question: Callable[[], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return (h * 7 if self.question() else h).sum()


def _by_a_helper() -> bool:
    return torch.compiler.is_compiling()


def _question_of(file: Path) -> Callable[[], bool]:
    """A function that asks, and that seems to be defined in ``file``."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile("def asks():\n    return torch.compiler.is_compiling()", file, "exec"), names)
    question: Callable[[], bool] = names["asks"]
    return question


QUESTIONS: dict[str, Callable[[], bool]] = {
    "compiler": torch.compiler.is_compiling,
    "dynamo": torch._dynamo.is_compiling,
    "is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
    "partial": functools.partial(torch.compiler.is_compiling),
    "helper": _by_a_helper,
    "similar": _question_of(Path(f"{torch.__path__[0]}library", "code.py")),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_is_compiling_is_false_for_users_and_libraries(name: str) -> None:
    module = Asks(QUESTIONS[name])
    x = torch.randn(2, 3)
    tracked = captured_copy(module)
    assert_same_bits(run(tracked, x), run(module, x))
    assert "No graph breaks" in tracked.explain()  # type: ignore[operator]


@pytest.mark.parametrize("package", [torch, lightning_unitscale])
def test_is_compiling_is_true_for_torch_and_this_package(package: Any) -> None:
    module = Asks(_question_of(Path(package.__path__[0], "code.py")))
    x = torch.randn(2, 3)
    torch.testing.assert_close(captured_copy(module)(x), module(x) * 7)


class Unsupported(nn.Module):
    """Runs code that Dynamo fails on, unless it is being compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if not torch.compiler.is_compiling():
            h = _fails_without_numbers(h)
        return (h * self.weight * 2).sum()


def _fails_without_numbers(h: Tensor) -> Tensor:
    assert not isinstance(h, torch._subclasses.FakeTensor)
    return h


torch.compiler.allow_in_graph(_fails_without_numbers)


def test_is_compiling_is_true_for_code_dynamo_cannot_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = Unsupported()
    x = torch.randn(2, 3)
    tracked = captured_copy(module)
    assert_same_bits(run(tracked, x), run(module, x))
    assert "No graph breaks" in tracked.explain()  # type: ignore[operator]
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


class UnsupportedTwice(Unsupported):
    """Fails in two places, each of which needs another answer."""

    def forward(self, x: Tensor) -> Tensor:
        h = x if _by_a_helper() else _fails_without_numbers(x)
        return super().forward(h)


def test_export_retries_after_each_trace_failure() -> None:
    module, x = UnsupportedTwice(), torch.randn(2, 3)
    exported = export_forward(module, (x,), {}, plain=True)
    assert torch.equal(exported(x), module(x))


KEPT: ContextVar[int] = ContextVar("kept")


class KeepsInAContextVariable(nn.Module):
    """Has another way for compilers, which cannot trace that of a plain call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.asks_in_vain = Asks(torch.compiler.is_compiling)

    def forward(self, x: Tensor) -> Tensor:
        other = self.asks_in_vain(x)
        if not _by_a_helper():
            KEPT.set(1)
        return other + self.linear(x).sum()


def test_branch_that_breaks_graph_is_avoided() -> None:
    module, x = KeepsInAContextVariable(), torch.randn(2, 3)
    tracked = captured_copy(module)
    assert_same_bits(run(tracked, x), run(module, x))
    assert "No graph breaks" in tracked.explain()  # type: ignore[operator]


class BreaksByItself(KeepsInAContextVariable):
    """Breaks the graph with any answer, before and after it asks."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        total = super().forward(x)
        torch._dynamo.graph_break()
        return total * 2


def test_unrelated_graph_breaks_change_no_answer() -> None:
    module, x = BreaksByItself(), torch.randn(2, 3)
    before = set(answers._TOLD.yes)
    tracked = captured_copy(module)
    assert_same_bits(run(tracked, x), run(module, x))
    # Who asks in vain has the plain way still, and the context variable breaks nothing.
    assert {asker[0][1] for asker in answers._TOLD.yes - before} == {"_by_a_helper"}
    explained = tracked.explain()  # type: ignore[operator]
    assert "ContextVar" not in explained and "graph_break" in explained


def test_export_without_failures_changes_no_answer() -> None:
    module = KeepsInAContextVariable()
    x = torch.randn(2, 3)
    told = set(answers._TOLD.yes)
    exported = export_forward(module, (x,), {}, plain=True)
    assert torch.equal(exported(x), module(x))
    assert told == answers._TOLD.yes


def test_export_with_graph_break_is_a_clear_error() -> None:
    class Breaks(Asks):
        def forward(self, x: Tensor) -> Tensor:
            total = super().forward(x)
            torch._dynamo.graph_break()
            return total

    told = set(answers._TOLD.yes)
    with pytest.raises(RuntimeError, match=r"Breaks\.forward cannot be captured as one graph"):
        export_forward(Breaks(_by_a_helper), (torch.randn(2, 3),), {}, plain=True)
    assert told == answers._TOLD.yes


class Marks(nn.Module):
    """Marks a tensor, always, or as caches of Transformers do where nothing is compiled."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        states = torch.zeros_like(x)
        if not (self.asks and torch.compiler.is_compiling()):
            torch._dynamo.mark_static_address(states)
        return self.linear(x + states).square().sum()


@pytest.mark.parametrize("asks", [True, False])
def test_compiler_hint_does_not_break_graph(asks: bool) -> None:
    module, x = Marks(asks), torch.randn(4, 3)
    planned = remat(module, "min_cut")
    assert_same_bits(run(planned, x), run(module, x))
    steps = steps_of(planned)
    assert steps is not None and not steps.graph_breaks


class SetsUpInItsFirstCall(nn.Module):
    """Installs something under a lock, as transformers installs its hooks."""

    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.num_set_up = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.num_set_up:
            with self.lock:
                self.num_set_up += 1
        return F.dropout(self.norm(self.linear(x))).sum()


def test_export_of_module_with_setup_in_first_call() -> None:
    module, x = SetsUpInItsFirstCall(), torch.randn(4, 3)
    other = copy.deepcopy(module)
    exported = export_forward(module, (x,), {}, plain=True)
    assert module.num_set_up == 1 and not module.norm.num_batches_tracked
    torch.manual_seed(0)
    loss = exported(x)
    torch.manual_seed(0)
    assert torch.equal(loss, other(x))


def test_export_restores_random_state() -> None:
    module, x = SetsUpInItsFirstCall(), torch.randn(4, 3)
    state = torch.get_rng_state()
    export_forward(module, (x,), {}, plain=True)
    assert torch.equal(state, torch.get_rng_state())

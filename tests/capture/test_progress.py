"""How long capture took is logged once, and that it takes long while it does: by a given clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_unitscale.capture.step_messages import PATIENCE_SECONDS, CaptureProgress
from lightning_unitscale.capture.steps import ModuleSteps


class Clock:
    """Stands still but for what it is told; runs timers whose time has come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def start_timer(self, seconds: float, run: Callable[[], None]) -> Callable[[], None]:
        timer = (self.now + seconds, run)
        self.timers.append(timer)
        return lambda: self.timers.remove(timer) if timer in self.timers else None

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer[0] <= self.now]
        for timer in due:
            self.timers.remove(timer)
            timer[1]()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _progress(clock: Clock, lines: list[str]) -> CaptureProgress:
    return CaptureProgress("Net.step", lines.append, clock, clock.start_timer)


def test_a_short_capture_is_reported_once(clock: Clock) -> None:
    lines: list[str] = []
    progress = _progress(clock, lines)
    progress.report(0, 0.0)
    assert lines == []
    with progress.capturing():
        clock.pass_by(3.0)
    progress.report(1, 1.0)
    progress.report(2, 1.0)
    assert lines == ["Net.step: captured in 2.0 s and planned in 1.0 s (1 graph)"]
    assert clock.timers == []


def test_without_plans_none_are_reported(clock: Clock) -> None:
    lines: list[str] = []
    progress = _progress(clock, lines)
    with progress.capturing():
        clock.pass_by(1.0)
    progress.report(2, 0.0)
    assert lines == ["Net.step: captured in 1.0 s (2 graphs)"]


def test_a_line_appears_while_it_takes_long(clock: Clock) -> None:
    lines: list[str] = []
    progress = _progress(clock, lines)
    with progress.capturing():
        clock.pass_by(PATIENCE_SECONDS - 1)
    # Between two functions a graph runs, which is no capture.
    clock.pass_by(60.0)
    assert lines == []
    with progress.capturing():
        clock.pass_by(1.0)
        assert len(lines) == 1 and "more than 5 s" in lines[0]
        clock.pass_by(10.0)
    with progress.capturing():
        clock.pass_by(10.0)
    assert len(lines) == 1
    assert progress.seconds == PATIENCE_SECONDS + 20.0


def test_an_error_stops_the_timer(clock: Clock) -> None:
    lines: list[str] = []
    progress = _progress(clock, lines)
    with pytest.raises(KeyError), progress.capturing():
        raise KeyError
    clock.pass_by(60.0)
    assert lines == []


def test_a_step_reports_its_capture() -> None:
    module = nn.Linear(3, 3)
    steps = ModuleSteps(module, ("forward",))
    lines: list[str] = []
    steps.say = lines.append
    steps.attach("test")
    for _ in range(2):
        module(torch.ones(2, 3))
    (line,) = lines
    assert line.startswith("Linear.forward: captured in ") and line.endswith("(1 graph)")
    steps.detach("test")

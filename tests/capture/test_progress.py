"""Log lines about the time of a capture, with a simulated clock."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_unitscale.capture import step_messages
from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.capture.step_messages import PATIENCE_SECONDS, CaptureProgress


class Clock:
    """A clock that advances only on request, and then runs due timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.due <= self.now]:
            timer.cancel()
            timer.run()


class Timer:
    """A timer of the clock; started when it is made."""

    def __init__(self, clock: Clock, seconds: float, run: Callable[[], None]) -> None:
        self.clock, self.due, self.run = clock, clock.now + seconds, run

    def start(self) -> None:
        self.clock.timers.append(self)

    def cancel(self) -> None:
        if self in self.clock.timers:
            self.clock.timers.remove(self)

    def is_alive(self) -> bool:
        return self in self.clock.timers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_messages.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(step_messages.threading, "Timer", functools.partial(Timer, clock))
    return clock


def _progress(lines: list[str]) -> CaptureProgress:
    return CaptureProgress("Net.step", lines.append)


def test_short_capture_is_reported_once(clock: Clock) -> None:
    lines: list[str] = []
    progress = _progress(lines)
    progress.report(0, 0.0)
    assert lines == []
    with progress.capturing():
        clock.pass_by(3.0)
    progress.report(1, 1.0)
    progress.report(2, 1.0)
    assert lines == ["Net.step: captured in 2.0 s and planned in 1.0 s (1 graph)"]
    assert clock.timers == []


def test_planning_time_is_reported_only_with_plans(clock: Clock) -> None:
    lines: list[str] = []
    progress = _progress(lines)
    with progress.capturing():
        clock.pass_by(1.0)
    progress.report(2, 0.0)
    assert lines == ["Net.step: captured in 1.0 s (2 graphs)"]


def test_slow_capture_logs_line_while_running(clock: Clock) -> None:
    lines: list[str] = []
    progress = _progress(lines)
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


def test_error_stops_the_timer(clock: Clock) -> None:
    lines: list[str] = []
    progress = _progress(lines)
    with pytest.raises(KeyError), progress.capturing():
        raise KeyError
    clock.pass_by(60.0)
    assert lines == []


def test_step_reports_its_capture() -> None:
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

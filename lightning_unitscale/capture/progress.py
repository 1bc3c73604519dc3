"""How long a step is captured and planned, in one line, and in another while it takes long."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

# Seconds after which somebody who waits wants to know what for.
PATIENCE_SECONDS = 5.0

StartTimer = Callable[[float, Callable[[], None]], Callable[[], None]]


def start_timer(seconds: float, run: Callable[[], None]) -> Callable[[], None]:
    """Call a function after a while, from a thread of its own; returns what stops that."""
    timer = threading.Timer(seconds, run)
    timer.daemon = True
    timer.start()
    return timer.cancel


class CaptureProgress:
    """Adds up the time in which a step is captured, and reports it.

    Attributes:
        seconds: How long capture took so far.
    """

    def __init__(
        self,
        title: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
        start_timer: StartTimer = start_timer,
    ) -> None:
        self.seconds = 0.0
        self._title = title
        self._say = say
        self._clock = clock
        self._start_timer = start_timer
        self._is_reported = False
        self._has_waited = False

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Within this context a function is captured, and its graph compiled and planned."""
        started = self._clock()
        stop_timer = None
        if not self._has_waited:
            left = max(0.0, PATIENCE_SECONDS - self.seconds)
            stop_timer = self._start_timer(left, self._say_that_it_takes_long)
        try:
            yield
        finally:
            if stop_timer is not None:
                stop_timer()
            self.seconds += self._clock() - started

    def report(self, num_graphs: int, planning_seconds: float) -> None:
        """Log once how long the first step was captured, and planned."""
        if self._is_reported or not num_graphs:
            return
        self._is_reported = True
        graphs = "1 graph" if num_graphs == 1 else f"{num_graphs} graphs"
        planned = f" and planned in {planning_seconds:.1f} s" if planning_seconds else ""
        captured = max(0.0, self.seconds - planning_seconds)
        self._say(f"{self._title}: captured in {captured:.1f} s{planned} ({graphs})")

    def _say_that_it_takes_long(self) -> None:
        self._has_waited = True
        self._say(
            f"{self._title}: capture and planning take more than {PATIENCE_SECONDS:.0f} s; "
            "the first step begins afterwards"
        )

"""The measured peak of a step, to hold the predicted one against."""

from __future__ import annotations

from typing import Any

import torch

from lightning_unitscale.remat.resident import storage_bytes

_MARK = "lightning_unitscale.peak_meter"


class PeakMeter:
    """Measures the most bytes alive at once between :meth:`mark` and :meth:`stop`.

    On a GPU that is the allocator's own maximum. A CPU's allocator keeps none, so its events are
    recorded and summed up. It does not record that a tensor is freed which was there before
    :meth:`start`: start a step early, so that the gradients of the measured step's predecessor are
    known, and name what is alive at the mark.

    Args:
        device: Where the step runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._alive: int | None = None
        self._profile: Any = None

    @property
    def is_marked(self) -> bool:
        """Whether what is measured has begun."""
        return self._alive is not None

    def start(self) -> None:
        """Start to record."""
        if self.device.type == "cpu":
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profile = torch.profiler.profile(
                activities=activities, profile_memory=True, acc_events=True
            )
            self._profile.start()

    def mark(self, alive: Any, *, beside: int = 0) -> None:
        """What follows is measured.

        Args:
            alive: Holds all tensors that are alive now.
            beside: Bytes of those that nobody can get hold of.
        """
        self._alive = storage_bytes(alive) + beside
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._profile is not None:
            with torch.profiler.record_function(_MARK):
                pass

    def stop(self) -> int | None:
        """Stop; returns the peak in bytes, or ``None`` if nothing was marked."""
        if self.device.type == "cuda" and self._alive is not None:
            return int(torch.cuda.max_memory_allocated(self.device))
        if self._profile is None:
            return None
        self._profile.stop()
        events = list(self._profile.profiler.kineto_results.events())
        self._profile = None
        return None if self._alive is None else _peak_after_mark(events, self._alive)


def _peak_after_mark(events: list[Any], alive: int) -> int:
    marked = next(one.start_ns() for one in events if one.name() == _MARK)
    peak = alive
    for one in sorted(
        (one for one in events if one.name() == "[memory]" and one.start_ns() >= marked),
        key=lambda one: one.start_ns(),
    ):
        alive += one.nbytes()
        peak = max(peak, alive)
    return peak

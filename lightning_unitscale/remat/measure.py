"""The measured peak of a step, to hold the predicted one against."""

from __future__ import annotations

from typing import Any

import torch

from lightning_unitscale.remat.resident import storage_bytes


class PeakMeter:
    """Measures the most bytes alive at once between :meth:`start` and :meth:`stop`.

    On a GPU that is the allocator's own maximum. A CPU's allocator keeps none, so its events are
    recorded and summed up; what was alive at the start has to be named.

    Args:
        device: Where the step runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._base = 0
        self._profile: Any = None

    def start(self, alive: Any) -> None:
        """Start; ``alive`` holds all tensors that are alive already."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        self._base = storage_bytes(alive)
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profile.start()

    def stop(self) -> int:
        """Stop; returns the peak in bytes."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        self._profile.stop()
        events = [
            one
            for one in self._profile.profiler.kineto_results.events()
            if one.name() == "[memory]"
        ]
        events.sort(key=lambda one: one.start_ns())
        alive = peak = 0
        for one in events:
            alive += one.nbytes()
            peak = max(peak, alive)
        self._profile = None
        return self._base + peak

"""Which optimizer steps ``ScaleMonitor`` samples."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_unitscale.arguments import check_count, shown


@dataclass(frozen=True)
class Sampling:
    """A schedule of samples."""

    every_n_steps: int
    first_step: int = 0
    last_step: int | None = None

    def __post_init__(self) -> None:
        check_count("every_n_steps", self.every_n_steps)
        if not _is_step(self.first_step):
            raise ValueError(
                f"first_step={shown(self.first_step)}: not an optimizer step; expected a "
                "whole number from 0; leave it out to sample from the first step on."
            )
        if self.last_step is None:
            return
        if not _is_step(self.last_step) or self.last_step < self.first_step:
            raise ValueError(
                f"last_step={shown(self.last_step)}: not a step from first_step={self.first_step} "
                "on; expected a whole number of at least that, or None; leave it out to sample to "
                "the end."
            )

    def covers(self, step: int) -> bool:
        """Return whether a step is within the window."""
        return self.first_step <= step and (self.last_step is None or step <= self.last_step)

    def wants(self, step: int, start: int, *, is_last: bool) -> bool:
        """Return whether a step is sampled.

        Beside every n-th: both ends of the window or of the training, and the step after the first,
        which is the first one that runs in measured units.
        """
        if not self.covers(step):
            return False
        is_second = step - max(start, self.first_step) in (0, 1)
        return step % self.every_n_steps == 0 or is_second or is_last or step == self.last_step


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

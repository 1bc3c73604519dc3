"""Which optimizer steps ``ScaleMonitor`` samples."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_unitscale.arguments import check_count


@dataclass(frozen=True)
class Sampling:
    """A schedule of samples.

    Args:
        every_n_steps: Optimizer steps from one sample to the next.
        first_step: The first step that may be sampled.
        last_step: The last one; ``None`` for no end.

    Raises:
        ValueError: If an argument is out of its range.
    """

    every_n_steps: int
    first_step: int = 0
    last_step: int | None = None

    def __post_init__(self) -> None:
        check_count("every_n_steps", self.every_n_steps)
        if not _is_step(self.first_step):
            raise ValueError(
                f"first_step={self.first_step!r}: not an optimizer step; expected a whole number "
                "from 0; leave it out to sample from the first step on."
            )
        if self.last_step is None:
            return
        if not _is_step(self.last_step) or self.last_step < self.first_step:
            raise ValueError(
                f"last_step={self.last_step!r}: not a step from first_step={self.first_step} on; "
                "expected a whole number of at least that, or None; leave it out to sample to the "
                "end."
            )

    def covers(self, step: int) -> bool:
        """Return whether a step is within the window."""
        return self.first_step <= step and (self.last_step is None or step <= self.last_step)

    def wants(self, step: int, start: int, *, is_last: bool) -> bool:
        """Return whether a step is sampled.

        Beside every n-th: both ends of the window or of the training, and the step after the first,
        which is the first one that runs in measured units.

        Args:
            step: The optimizer step.
            start: The step that the training began or went on with.
            is_last: Whether the step is known to be the last of the training.
        """
        if not self.covers(step):
            return False
        is_second = step - max(start, self.first_step) in (0, 1)
        return step % self.every_n_steps == 0 or is_second or is_last or step == self.last_step


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

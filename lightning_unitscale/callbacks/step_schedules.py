"""Schedule optimizer steps: to sample, to recalibrate units, and to agree on units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_unitscale.arguments import check_count, shown
from lightning_unitscale.loops.ranks import is_distributed
from lightning_unitscale.matmuls.measured_operands import is_late_look

# The steps at which "auto" measures first: the scales of a fresh model move most.
_EARLY_LOOKS = frozenset({8, 16, 32, 64})
_LOOK_EVERY = 128


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
                f"first_step={shown(self.first_step)}: not an optimizer step. Expected a "
                "whole number from 0. Leave it out to sample from the first step on."
            )
        if self.last_step is None:
            return
        if not _is_step(self.last_step) or self.last_step < self.first_step:
            raise ValueError(
                f"last_step={shown(self.last_step)}: not a step from first_step={self.first_step} "
                "on. Expected a whole number of at least that, or None. Leave it out to sample to "
                "the end."
            )

    def covers(self, step: int) -> bool:
        """Check whether a step is within the window."""
        return self.first_step <= step and (self.last_step is None or step <= self.last_step)

    def wants(self, step: int, start: int, *, is_last: bool) -> bool:
        """Check whether a step is sampled.

        Every n-th step, both ends of the window or of the training, and the second step, which is
        the first one that runs in measured units.
        """
        if not self.covers(step):
            return False
        is_second = step - max(start, self.first_step) in (0, 1)
        return step % self.every_n_steps == 0 or is_second or is_last or step == self.last_step


class RecalibrationSchedule:
    """The optimizer steps at which units are recalibrated."""

    def __init__(self, recalibrate: Literal["auto"] | int | None) -> None:
        is_number = isinstance(recalibrate, int) and not isinstance(recalibrate, bool)
        is_word = recalibrate is None or (isinstance(recalibrate, str) and recalibrate == "auto")
        if not (is_word or (is_number and recalibrate > 0)):  # type: ignore[operator]
            raise ValueError(
                f"recalibrate={shown(recalibrate)}: no such interval. Expected 'auto', None or a "
                "positive number of optimizer steps. Pass recalibrate='auto'."
            )
        self._recalibrate = recalibrate

    @property
    def is_automatic(self) -> bool:
        """Check whether only units that no longer fit change."""
        return self._recalibrate == "auto"

    def looks_at(self, step: int) -> bool:
        """Check whether units are measured again at a step."""
        if self._recalibrate is None or step <= 0:
            return False
        if self._recalibrate == "auto":
            return step in _EARLY_LOOKS or step % _LOOK_EVERY == 0
        return step % int(self._recalibrate) == 0


class LateAgreement:
    """The optimizer steps at which ranks agree on the units of tensors that were zero at first.

    Each rank counts the same steps. Ranks meet at steps 1, 2, 4, 8 and every 8th, while any rank
    lacks a unit. The count restarts when a training begins, and after all units are measured again.
    """

    def __init__(self) -> None:
        self._num_steps: int | None = None
        # True while ranks continue to meet.
        self.is_open = False

    @property
    def is_awaited(self) -> bool:
        """Check whether units wait until ranks meet."""
        return self.is_open and is_distributed()

    def start(self) -> None:
        """Begin to meet, if ranks have never met."""
        if self._num_steps is None:
            self.begin()

    def begin(self) -> None:
        """Begin to meet."""
        self._num_steps, self.is_open = 0, True

    def meets(self) -> bool:
        """Count an optimizer step, and return whether ranks meet after it."""
        self._num_steps = (self._num_steps or 0) + 1
        return self.is_open and is_late_look(self._num_steps)


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

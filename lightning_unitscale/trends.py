"""Warns of tensors whose largest magnitude grows towards the end of a format.

The rule: through the last eight sampled values of log2 of a tensor's largest stored magnitude goes
a line, by least squares. The tensor is on its way out of a format if

- the line rises, by at least three standard errors of its slope;
- over the eight samples it rises by at least half a power of two, since what creeps, stops;
- no two samples in succession make up half of that rise: a jump is no growth;
- the tensor is still inside, and the line is outside before ``horizon`` steps are over, and before
  four times the steps that the samples span are, since no line goes on for ever.

Standard error of the slope: with residuals ``r`` of ``n`` samples at steps ``t``,
``sqrt(sum(r^2) / (n - 2) / sum((t - mean(t))^2))`` (ordinary least squares).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from lightning_unitscale.alerts import ScaleAlert
from lightning_unitscale.exponents import FloatArray
from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.snapshot import Direction, ScaleSnapshot
from lightning_unitscale.violations import InputScales, log2_amax

NUM_SAMPLES: Final = 8
_STANDARD_ERRORS: Final = 3.0
_LEAST_RISE: Final = 0.5
_LARGEST_JUMP: Final = 0.5
_LONGEST_FORECAST: Final = 4
_DIRECTIONS: Final[tuple[Direction, ...]] = ("forward", "backward")


class AmaxTrends:
    """Remembers the last samples of all tensors and sees where they lead.

    Args:
        formats: The formats to stay inside of.
        horizon: How many steps ahead to look.
    """

    def __init__(self, formats: Sequence[NumberFormat], horizon: int) -> None:
        self._formats = tuple(formats)
        self._horizon = horizon
        self._names: tuple[str, ...] = ()
        self._steps: deque[int] = deque(maxlen=NUM_SAMPLES)
        self._values: dict[Direction, deque[FloatArray]] = {
            one: deque(maxlen=NUM_SAMPLES) for one in _DIRECTIONS
        }

    def add(self, snapshot: ScaleSnapshot) -> tuple[ScaleAlert, ...]:
        """Take in a snapshot; returns the tensors that are on their way out of a format."""
        later = not self._steps or snapshot.step > self._steps[-1]
        if snapshot.names != self._names or not later:
            # Other tensors, or a second fit: what was before says nothing.
            self._names = snapshot.names
            self._steps.clear()
            for values in self._values.values():
                values.clear()
        self._steps.append(snapshot.step)
        for direction in _DIRECTIONS:
            self._values[direction].append(log2_amax(snapshot, direction))
        if len(self._steps) < NUM_SAMPLES:
            return ()
        return tuple(one for direction in _DIRECTIONS for one in self._leaving(snapshot, direction))

    def _leaving(self, snapshot: ScaleSnapshot, direction: Direction) -> list[ScaleAlert]:
        steps = np.array(self._steps, dtype=np.float64)
        values = np.stack(self._values[direction])
        slopes, ends, errors = fitted_lines(steps, values)
        span = steps[-1] - steps[0]
        horizon = min(float(self._horizon), _LONGEST_FORECAST * span)
        rise = slopes * span
        with np.errstate(invalid="ignore"):
            rising = (slopes >= _STANDARD_ERRORS * errors) & (rise >= _LEAST_RISE)
            rising &= np.diff(values, axis=0).max(axis=0) < _LARGEST_JUMP * rise
        found = []
        inputs = InputScales(snapshot, direction)
        for place in np.flatnonzero(rising):
            for item in self._formats:
                limit = math.log2(item.overflow_threshold)
                left = (limit - ends[place]) / slopes[place]
                if values[-1, place] > limit or left > horizon:
                    continue
                left = max(math.ceil(left), 1)
                text = (
                    f"has a largest magnitude of 2^{values[-1, place]:.1f} that doubles every "
                    f"{1 / slopes[place]:.3g} steps: it leaves {item.name} in about {left} steps"
                )
                found.append(
                    ScaleAlert(
                        kind="trend",
                        step=snapshot.step,
                        tensor=snapshot.names[place],
                        module=snapshot.modules[place],
                        direction=direction,
                        text=text,
                        format=item.name,
                        value=float(left),
                        threshold=horizon,
                        inputs=inputs.of(int(place)),
                    )
                )
        return found


def fitted_lines(
    steps: FloatArray, values: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Least-squares lines through the columns of ``values``.

    Args:
        steps: Shape ``(n,)``, at least three, increasing.
        values: Shape ``(n, tensors)``.

    Returns:
        Slopes, values at the last step and standard errors of the slopes, each ``(tensors,)``; NaN
        where a value is not finite.
    """
    values = np.where(np.isfinite(values), values, np.nan)
    centered = steps - steps.mean()
    spread = float(centered @ centered)
    slopes: FloatArray = centered @ (values - values.mean(axis=0)) / spread
    means: FloatArray = values.mean(axis=0)
    residuals = values - means - centered[:, None] * slopes
    errors: FloatArray = np.sqrt(np.square(residuals).sum(axis=0) / (len(steps) - 2) / spread)
    return slopes, means + slopes * centered[-1], errors

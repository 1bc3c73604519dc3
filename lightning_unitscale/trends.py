"""Warns of tensors whose largest magnitude grows towards the end of a format.

The rule: through the last eight sampled values of log2 of a tensor's largest stored magnitude goes
a line, by least squares. The tensor is on its way out of a format if

- the line rises, by at least three standard errors of its slope;
- over the eight samples it rises by at least half a power of two, since what creeps, stops;
- no two samples in succession make up half of that rise: a jump is no growth;
- a line through the last four samples rises at least half as fast: what slows down, stops;
- the tensor is still inside, and at the slower of the two rates it is outside before ``horizon``
  steps are over, and before twice the steps that the samples span are, since no line goes on for
  ever.

The last two are about the beginning of a training, when nearly everything grows for a while: of 54
forecasts made without them in 400 steps of the demo's GPT none came true.

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
_LEAST_CONTINUATION: Final = 0.5
_LONGEST_FORECAST: Final = 2
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
        late, _, _ = fitted_lines(steps[NUM_SAMPLES // 2 :], values[NUM_SAMPLES // 2 :])
        rates = np.minimum(slopes, late)
        span = steps[-1] - steps[0]
        horizon = min(float(self._horizon), _LONGEST_FORECAST * span)
        rise = slopes * span
        with np.errstate(invalid="ignore"):
            rising = (slopes >= _STANDARD_ERRORS * errors) & (rise >= _LEAST_RISE)
            rising &= np.diff(values, axis=0).max(axis=0) < _LARGEST_JUMP * rise
            rising &= late >= _LEAST_CONTINUATION * slopes
        found = []
        inputs = InputScales(snapshot, direction)
        for place in np.flatnonzero(rising):
            left, item = self._next_limit(values[-1, place], ends[place], rates[place])
            if item is None or left > horizon:
                continue
            left = max(math.ceil(left), 1)
            text = (
                f"has a largest magnitude of 2^{values[-1, place]:.1f} that doubles every "
                f"{1 / rates[place]:.3g} steps: it leaves {item.name} in about {left} steps"
            )
            found.append(
                inputs.alert(
                    int(place),
                    "trend",
                    text,
                    format=item.name,
                    value=float(left),
                    threshold=horizon,
                )
            )
        return found

    def _next_limit(
        self, value: float, end: float, rate: float
    ) -> tuple[float, NumberFormat | None]:
        """Of the formats that a tensor is inside of, the first it leaves, and in how many steps."""
        limits = [(math.log2(one.overflow_threshold), one) for one in self._formats]
        inside = [(limit, one) for limit, one in limits if value <= limit]
        if not inside:
            return math.inf, None
        limit, first = min(inside, key=lambda pair: pair[0])
        return (limit - end) / rate, first


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

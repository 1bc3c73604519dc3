"""Detect stored tensors that will soon leave a format.

The rule: fit a least-squares line to the last eight samples of log2 of a tensor's largest stored
magnitude. The tensor will leave a format if

- the line rises, by at least three standard errors of its slope;
- over the eight samples it rises by half a power of two, since slow growth usually stops;
- no two successive samples make up half of that rise, since a jump is not growth;
- a line through the last four samples rises at least half as fast, since growth that slows down
  usually stops;
- the tensor is still within the range, and at the slower of the two rates it leaves it within
  ``horizon`` steps and within twice the span of the samples, since no line continues forever.

The last two conditions are for the start of training, when most tensors grow for a while. Without
them, 400 steps of the demo's GPT gave 54 forecasts, all of them false.

Standard error of the slope: with residuals ``r`` of ``n`` samples at steps ``t``,
``sqrt(sum(r^2) / (n - 2) / sum((t - mean(t))^2))`` (ordinary least squares).

New units change the stored values. So the line uses only samples with the unit of the last sample.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.scales.alerts import ScaleAlert
from lightning_unitscale.scales.layout import DIRECTIONS, FloatArray
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.violations import AlertMaker, judged_now

NUM_SAMPLES: Final = 8
_STANDARD_ERRORS: Final = 3.0
_LEAST_RISE: Final = 0.5
_LARGEST_JUMP: Final = 0.5
_LEAST_CONTINUATION: Final = 0.5
_LONGEST_FORECAST: Final = 2


class AmaxTrends:
    """The last samples of all tensors, and the trends in them."""

    def __init__(self, formats: Sequence[NumberFormat], horizon: int) -> None:
        self._formats = tuple(formats)
        self._horizon = horizon
        # For each sample, also log2 of the largest magnitudes and of the divisors, gradients last.
        self._samples: deque[tuple[ScaleSnapshot, FloatArray, npt.NDArray[np.int64]]]
        self._samples = deque(maxlen=NUM_SAMPLES)

    def add(self, snapshot: ScaleSnapshot, num_merged: int = 1) -> tuple[ScaleAlert, ...]:
        """Add a snapshot."""
        last = self._samples[-1][0] if self._samples else snapshot
        if snapshot.names != last.names or snapshot.step <= last.step:
            # Other tensors, or a second fit, so earlier samples are useless.
            self._samples.clear()
        values = np.concatenate(list(map(snapshot.log2_amax, DIRECTIONS)))
        units = np.concatenate(list(map(snapshot.log2_divisors, DIRECTIONS)))
        self._samples.append((snapshot, values, units))
        if len(self._samples) < NUM_SAMPLES:
            return ()
        return tuple(self._leaving(snapshot, num_merged))

    def _leaving(self, snapshot: ScaleSnapshot, num_merged: int) -> list[ScaleAlert]:
        steps = np.array([sample.step for sample, *_ in self._samples], dtype=np.float64)
        # Values first, then gradients, here and below.
        values = np.stack([values for _, values, _ in self._samples])
        slopes, ends, errors = fitted_lines(steps, values)
        late, _, _ = fitted_lines(steps[NUM_SAMPLES // 2 :], values[NUM_SAMPLES // 2 :])
        rates = np.minimum(slopes, late)
        span = steps[-1] - steps[0]
        horizon = min(float(self._horizon), _LONGEST_FORECAST * span)
        rise = slopes * span
        units = np.stack([units for *_, units in self._samples])
        judged = [judged_now(snapshot, direction, num_merged) for direction in DIRECTIONS]
        is_judged = np.concatenate(judged) & (units == units[-1]).all(axis=0)
        with np.errstate(invalid="ignore"):
            rising = (slopes >= _STANDARD_ERRORS * errors) & (rise >= _LEAST_RISE)
            rising &= np.diff(values, axis=0).max(axis=0) < _LARGEST_JUMP * rise
            rising &= late >= _LEAST_CONTINUATION * slopes
        alerts = []
        makers = [AlertMaker(snapshot, direction) for direction in DIRECTIONS]
        for index in np.flatnonzero(rising & is_judged):
            value, rate = values[-1, index], rates[index]
            limits = [(math.log2(item.overflow_threshold), item) for item in self._formats]
            inside = [(limit, item) for limit, item in limits if value <= limit]
            if not inside:
                continue
            # The format that the tensor leaves first.
            limit, item = min(inside, key=operator.itemgetter(0))
            left = (limit - ends[index]) / rate
            if left > horizon:
                continue
            left = max(math.ceil(left), 1)
            text = (
                f"its largest magnitude, 2^{value:.1f}, doubles every {1 / rate:.3g} steps and "
                f"leaves {item.name} in about {left} steps"
            )
            alerts.append(
                makers[index // len(snapshot)].alert(
                    int(index) % len(snapshot),
                    "trend",
                    text,
                    format=item.name,
                    value=float(left),
                    threshold=horizon,
                )
            )
        return alerts


def fitted_lines(
    steps: FloatArray, values: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Fit least-squares lines to the columns of ``values``."""
    values = np.where(np.isfinite(values), values, np.nan)
    centered = steps - steps.mean()
    spread = float(centered @ centered)
    slopes: FloatArray = centered @ (values - values.mean(axis=0)) / spread
    means: FloatArray = values.mean(axis=0)
    residuals = values - means - centered[:, None] * slopes
    errors: FloatArray = np.sqrt(np.square(residuals).sum(axis=0) / (len(steps) - 2) / spread)
    return slopes, means + slopes * centered[-1], errors

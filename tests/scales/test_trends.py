"""Tensors that will soon leave a format."""

import math

import numpy as np
import pytest

from lightning_unitscale.formats import E4M3FN, FP16, get_format
from lightning_unitscale.scales.trends import NUM_SAMPLES, AmaxTrends, fitted_lines
from tests.scales.snapshots import of


def test_fitted_lines_match_scipy():
    generator = np.random.default_rng(0)
    steps = np.array([0.0, 5.0, 10.0, 30.0, 31.0])
    values = generator.normal(size=(5, 3))
    slopes, ends, errors = fitted_lines(steps, values)
    from scipy.stats import linregress

    for column in range(3):
        line = linregress(steps, values[:, column])
        expected = (line.slope, line.intercept + 31 * line.slope, line.stderr)
        assert (slopes[column], ends[column], errors[column]) == pytest.approx(expected)


def run_trend(log2_values, formats=(FP16,), horizon=500, every=10):
    trends = AmaxTrends(formats, horizon)
    alerts = []
    for place, value in enumerate(log2_values):
        alerts += trends.add(of([[2.0**value, 1.0], [1.0]], step=every * place))
    return alerts


def test_growth_alerts_before_overflow():
    # A binade every 10 steps; FP16 ends just below 2^16.
    values = [6 + k for k in range(NUM_SAMPLES)]
    (alert,) = run_trend(values)
    assert (alert.kind, alert.tensor, alert.direction) == ("trend", "m.a", "forward")
    assert (alert.step, alert.format) == (70, "FP16")
    assert alert.value == pytest.approx(30, abs=1) and "doubles every 10 steps" in alert.text
    assert [one.format for one in run_trend(values, (FP16, E4M3FN))] == ["FP16"]  # E4M3FN is left
    assert run_trend(values, horizon=29) == []
    # Of several formats, the first that it leaves.
    assert [one.format for one in run_trend(values, (get_format("BF16"), FP16))] == ["FP16"]
    assert len(run_trend([*values, 14.0, 15.0])) == 3


@pytest.mark.parametrize(
    "values",
    [
        [8.0] * 12,
        [15.0 - k for k in range(12)],
        [8 + 0.3 * (-1) ** k for k in range(12)],  # noise
        [8.0] * 6 + [15.0] * 6,  # a jump
        [15.9 + 0.005 * k for k in range(12)],  # creeping
        [-10 + k for k in range(12)],  # far away: not within twice what was seen
        [12 + 3.5 * (1 - 2.0**-k) for k in range(12)],  # slowing down, and ends inside
        [6.0 + k for k in range(NUM_SAMPLES - 1)],  # too few
        [6.0 + k for k in range(4)] + [-math.inf] * 3 + [10.0],
    ],
)
def test_no_alert_without_growth(values):
    assert run_trend(values) == []


def test_other_tensors_start_new_trend():
    trends = AmaxTrends((FP16,), 500)
    for k in range(NUM_SAMPLES - 1):
        trends.add(of([[2.0 ** (6 + k), 1.0]], step=k))
    assert trends.add(of([[2.0**13, 1.0], [1.0]], step=7)) == ()
    # So does a second fit.
    trends = AmaxTrends((FP16,), 500)
    for step in (0, 1, 2, 3, 4, 5, 6, 0):
        assert trends.add(of([[2.0 ** (6 + step), 1.0]], step=step)) == ()


def test_other_units_start_new_trend():
    """The value does not grow, but the stored value does, since its unit changes."""
    trends = AmaxTrends((FP16,), 500)
    for k in range(2 * NUM_SAMPLES):
        # A value of 2^6 in units that are taken anew at every sample up to the eighth.
        units = {"log2_sigma": np.array([6 - min(k, NUM_SAMPLES - 1)])}
        alerts = trends.add(of([[2.0**13, 1.0]], step=k, **units))
        assert alerts == ()
    # In one unit it is a trend, after as many samples as ever.
    for k in range(NUM_SAMPLES):
        at = 2 * NUM_SAMPLES + k
        alerts = trends.add(of([[2.0 ** (8 + k), 1.0]], step=at, log2_sigma=np.array([2])))
        assert len(alerts) == (k == NUM_SAMPLES - 1)


@pytest.mark.parametrize(("name", "num_merged"), [("m.nll_loss", 1), ("m.mul", 2)])
def test_scalars_and_losses_have_no_trend(name, num_merged):
    trends = AmaxTrends((FP16,), 500)
    for k in range(NUM_SAMPLES):
        grown = of([[2.0 ** (6 + k), 1.0]], step=k, names=(name,))
        assert trends.add(grown, num_merged) == ()

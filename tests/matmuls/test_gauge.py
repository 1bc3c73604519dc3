"""The gauge is an immutable mapping to powers of two."""

import copy
import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_unitscale.matmuls.gauge import (
    MAX_LOG2_GAMMA,
    MAX_LOG2_SIGMA,
    ONE,
    Gauge,
    GaugePair,
    Unit,
    nearest_exponent,
)


@pytest.fixture
def gauge() -> Gauge:
    return Gauge({"a.linear:weight": GaugePair(-3, 0), "a.linear": GaugePair(2, -17)})


def test_gauge_is_frozen(gauge: Gauge) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        gauge.pairs = {}
    with pytest.raises(TypeError):
        gauge.pairs["a.linear"] = GaugePair()
    with pytest.raises(TypeError):
        gauge["a.linear"] = GaugePair()
    with pytest.raises(dataclasses.FrozenInstanceError):
        gauge["a.linear"].log2_sigma = 1
    source = {"x": GaugePair(1, 1)}
    made = Gauge(source)
    source["x"] = GaugePair(5, 5)
    assert made["x"] == GaugePair(1, 1)


def test_gauge_is_a_mapping_that_compares_by_value(gauge: Gauge) -> None:
    same = Gauge(dict(reversed(list(gauge.items()))))
    assert gauge == same
    assert hash(gauge) == hash(same)
    assert len({gauge, same}) == 1
    other = gauge.updated({"a.linear": GaugePair(2, -16)})
    assert gauge != other
    assert gauge["a.linear"].log2_gamma == -17
    assert other["a.linear:weight"] == gauge["a.linear:weight"]
    assert list(gauge) == ["a.linear:weight", "a.linear"]
    assert "unknown" not in gauge
    assert gauge.pair("unknown") == GaugePair(0, 0)
    with pytest.raises(KeyError):
        gauge["unknown"]


def test_gauge_survives_serialization(gauge: Gauge) -> None:
    assert Gauge.from_state(gauge.state()) == gauge
    assert Gauge.from_state(json.loads(json.dumps(gauge.state()))) == gauge
    assert pickle.loads(pickle.dumps(gauge)) == gauge
    assert copy.deepcopy(gauge) == gauge
    assert copy.copy(gauge) == gauge
    assert Gauge.from_state({}) == Gauge()


def test_gauge_prints_as_a_table(gauge: Gauge) -> None:
    lines = str(gauge).splitlines()
    assert lines[0].split() == ["tensor", "log2", "sigma", "log2", "gamma"]
    assert ["a.linear", "2", "-17"] in [line.split() for line in lines]


@pytest.mark.parametrize("rms", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_degenerate_rms_has_unit_one(rms: float) -> None:
    assert nearest_exponent(rms, 30) == 0


def test_exponents_are_clamped() -> None:
    assert nearest_exponent(1e300, 30) == 30
    assert nearest_exponent(5e-324, 30) == -30
    assert nearest_exponent(2.0**-60, MAX_LOG2_GAMMA) == -60


@given(st.floats(2.0**-29, 2.0**29))
def test_nearest_power_is_within_sqrt_two(rms: float) -> None:
    exponent = nearest_exponent(rms, MAX_LOG2_SIGMA)
    assert 0.7071067 <= math.ldexp(rms, -exponent) <= 1.4142136
    distance = abs(math.log2(rms) - exponent)
    assert all(distance <= abs(math.log2(rms) - other) for other in (exponent - 1, exponent + 1))


def test_unit_exponent_reads_gauge(gauge: Gauge) -> None:
    assert Unit("a.linear").exponent(gauge) == 2
    assert Unit(gradient="a.linear", log2=-4).exponent(gauge) == -21
    assert Unit("unknown") != ONE and Unit("unknown").exponent(gauge) == ONE.exponent(gauge) == 0

"""The gauge is a frozen value, and its factors are a group of powers of two."""

import copy
import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unitscale.lossless.gauge import (
    MAX_LOG2_GAMMA,
    MAX_LOG2_SIGMA,
    ONE,
    Factor,
    Gauge,
    GaugePair,
    gamma,
    nearest_exponent,
    sigma,
)

_names = st.sampled_from(["a", "b", "c"])
_pairs = st.builds(GaugePair, st.integers(-30, 30), st.integers(-60, 60))
_gauges = st.dictionaries(_names, _pairs).map(Gauge)
_terms = st.lists(st.tuples(_names, st.integers(-3, 3)), max_size=3)
_factors = st.builds(
    lambda sigmas, gammas, constant: math.prod(
        (
            *(_power(sigma(name), count) for name, count in sigmas),
            *(_power(gamma(name), count) for name, count in gammas),
        ),
        start=Factor(constant=constant),
    ),
    _terms,
    _terms,
    st.integers(-5, 5),
)


def _power(factor: Factor, count: int) -> Factor:
    result = ONE
    for _ in range(abs(count)):
        result = result * factor if count > 0 else result / factor
    return result


@pytest.fixture
def gauge() -> Gauge:
    return Gauge({"a.linear:weight": GaugePair(-3, 0), "a.linear": GaugePair(2, -17)})


def test_a_gauge_is_frozen(gauge: Gauge) -> None:
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


def test_a_gauge_is_a_mapping_that_compares_by_value(gauge: Gauge) -> None:
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


def test_a_gauge_survives_storage(gauge: Gauge) -> None:
    assert Gauge.from_state(gauge.state()) == gauge
    assert Gauge.from_state(json.loads(json.dumps(gauge.state()))) == gauge
    assert pickle.loads(pickle.dumps(gauge)) == gauge
    assert copy.deepcopy(gauge) == gauge
    assert copy.copy(gauge) == gauge
    assert Gauge.from_state({}) == Gauge()


def test_a_gauge_prints_as_a_table(gauge: Gauge) -> None:
    lines = str(gauge).splitlines()
    assert lines[0].split() == ["tensor", "log2", "sigma", "log2", "gamma"]
    assert ["a.linear", "2", "-17"] in [line.split() for line in lines]


@pytest.mark.parametrize("rms", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_what_has_no_scale_gets_units_one(rms: float) -> None:
    assert nearest_exponent(rms, 30) == 0


def test_exponents_are_limited() -> None:
    assert nearest_exponent(1e300, 30) == 30
    assert nearest_exponent(5e-324, 30) == -30
    assert nearest_exponent(2.0**-60, MAX_LOG2_GAMMA) == -60


@given(st.floats(2.0**-29, 2.0**29))
def test_the_nearest_power_leaves_a_value_within_sqrt_two(rms: float) -> None:
    exponent = nearest_exponent(rms, MAX_LOG2_SIGMA)
    assert 0.7071067 <= math.ldexp(rms, -exponent) <= 1.4142136
    distance = abs(math.log2(rms) - exponent)
    assert all(distance <= abs(math.log2(rms) - other) for other in (exponent - 1, exponent + 1))


@settings(max_examples=60)
@given(_factors, _factors, _factors, _gauges)
def test_factors_are_an_abelian_group(a: Factor, b: Factor, c: Factor, gauge: Gauge) -> None:
    assert (a * b).exponent(gauge) == a.exponent(gauge) + b.exponent(gauge)
    assert a.inverse().exponent(gauge) == -a.exponent(gauge)
    # Equal factors must compare equal, or one would get two rows and 1 would be multiplied by.
    assert a * b == b * a
    assert (a * b) * c == a * (b * c)
    assert a / a == ONE
    assert a * ONE == a
    assert (a / b).inverse() == b / a
    assert hash(a * b) == hash(b * a)


def test_the_exponent_of_a_factor_reads_the_gauge(gauge: Gauge) -> None:
    factor = sigma("a.linear") * sigma("a.linear") / gamma("a.linear") / sigma("unknown")
    assert factor.exponent(gauge) == 2 + 2 + 17
    assert (factor * Factor(constant=-4)).exponent(gauge) == 17

"""Formats against torch.finfo and against torch's own casts, at every threshold and beside it."""

import math

import pytest
import torch

from lightning_unitscale.formats import (
    BF16,
    E4M3FN,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    NumberFormat,
    get_format,
)
from tests import helpers

DTYPES = {
    FP32: torch.float32,
    BF16: torch.bfloat16,
    FP16: torch.float16,
    E4M3FN: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
}


@pytest.mark.parametrize("format", DTYPES, ids=str)
def test_formats_match_torch_finfo(format):
    info = torch.finfo(DTYPES[format])
    assert format.max == info.max
    assert format.smallest_normal == info.smallest_normal
    assert format.eps == info.eps
    assert format.bits == info.bits


# A cast to FP32 changes nothing of what a test has in FP32.
@pytest.mark.parametrize("format", [item for item in DTYPES if item != FP32], ids=str)
def test_thresholds_match_torch_casts(format):
    def cast(value):
        return float(helpers.cast(torch.tensor(value, dtype=torch.float32), DTYPES[format]).float())

    def above(value):
        limit = torch.tensor(math.inf)
        return float(torch.nextafter(torch.tensor(value, dtype=torch.float32), limit))

    def below(value):
        return float(torch.nextafter(torch.tensor(value, dtype=torch.float32), torch.tensor(0.0)))

    assert cast(format.flush_threshold) == 0
    assert cast(above(format.flush_threshold)) == format.smallest_subnormal
    assert cast(format.subnormal_threshold) == format.smallest_normal
    assert 0 < cast(below(format.subnormal_threshold)) < format.smallest_normal
    if format.has_infinity:
        assert cast(format.overflow_threshold) == math.inf
        assert cast(below(format.overflow_threshold)) == format.max
    else:
        assert format.overflow_threshold == format.max == cast(2 * format.max)


def test_formats_match_documented_table():
    assert (E4M3FN.max, E4M3FN.smallest_normal, E4M3FN.smallest_subnormal) == (448, 2**-6, 2**-9)
    assert (E5M2.max, E5M2.flush_threshold, E5M2.overflow_threshold) == (57344, 2**-17, 61440)
    assert (FP16.max, FP16.flush_threshold, FP16.overflow_threshold) == (65504, 2**-25, 65520)
    assert (BF16.smallest_subnormal, BF16.flush_threshold) == (2.0**-133, 2.0**-134)


def test_custom_format_from_bits():
    own = NumberFormat("mine", exponent_bits=4, mantissa_bits=3)
    assert own.max == 240 and own.has_infinity
    assert own.smallest_normal == E4M3FN.smallest_normal
    assert NumberFormat("FP16", 5, 10) == FP16
    assert str(own) == "mine"


@pytest.mark.parametrize(
    "name, format",
    [
        *FORMATS.items(),
        ("fp16", FP16),
        ("e4m3", E4M3FN),
        ("torch.float8_e5m2", E5M2),
        ("half", FP16),
    ],
)
def test_lookup_by_name(name, format):
    assert get_format(name) is format
    assert get_format(format) is format


def test_lookup_by_bits():
    assert get_format("E3M4") == NumberFormat("E3M4", 3, 4)
    assert get_format("e2m3fn") == NumberFormat("E2M3FN", 2, 3, finite_only=True)


@pytest.mark.parametrize("name", ["", "FP8", "E4", "E4M3FNUZ", "int8"])
def test_unknown_format_name_is_an_error(name):
    with pytest.raises(ValueError, match=r"format=.*unknown number format. Expected one of FP32"):
        get_format(name)


@pytest.mark.parametrize("name", ["E5M0", "E1M2", "E9M2", "E5M25"])
def test_bits_out_of_range_are_an_error(name):
    with pytest.raises(ValueError, match=r"_bits=\d+: out of range"):
        get_format(name)


def test_bad_format_arguments_are_an_error():
    with pytest.raises(TypeError, match="Expected a name or a NumberFormat, got int"):
        get_format(16)
    with pytest.raises(ValueError, match="a format needs a name"):
        NumberFormat("", 5, 2)

"""The cast to FP8 in Triton's interpreter; run by test_triton_cast.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unitscale.functional.low_precision import GRADIENTS, MULTIPLE, to_fp8
from lightning_unitscale.functional.triton_cast import cast_matrix, cast_tiles, turn_matrix

pytestmark = [
    # NumPy, which computes here, warns of infinities.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # Of the interpreter of Triton 3.6.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.timeout(1500),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAUNCHES: list[None] = []
cast_tiles.add_pre_run_hook(lambda *args, **kwargs: LAUNCHES.append(None))


def _filled(matrix):
    """Bytes in rows, with zeros up to a multiple of 16."""
    return F.pad(matrix.contiguous().view(torch.uint8), (0, -matrix.shape[1] % MULTIPLE))


def assert_cast(matrix, factor, dtype, wants=(True, True)):
    LAUNCHES.clear()
    expected = to_fp8(matrix, factor, dtype)
    pair = (_filled(expected), _filled(expected.t()))
    # Earlier contents must not be visible.
    casts = [
        torch.full_like(each, 0x55).view(dtype) if is_wanted else None
        for each, is_wanted in zip(pair, wants, strict=True)
    ]
    cast_matrix(matrix, factor, dtype, *casts)
    assert len(LAUNCHES) == 1
    for each, cast in zip(pair, casts, strict=True):
        assert cast is None or torch.equal(cast.view(torch.uint8), each)


@st.composite
def matrices(draw):
    """Any type, size and strides, all codes of FP32 or numbers near FP8's range."""
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.integers(1, 80)), draw(st.integers(1, 80))
    steps = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    numel = math.prod(shape) * math.prod(steps)
    if draw(st.booleans()):
        codes = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64)
        values = codes.to(torch.int32).view(torch.float32)
    else:
        exponents = torch.randint(-22, 20, (numel,), generator=generator)
        values = torch.randn(numel, generator=generator) * torch.exp2(exponents)
    matrix = values.view(shape[0] * steps[0], -1)[:: steps[0], :: steps[1]].to(dtype)
    # Conversion has removed the gaps.
    matrix = matrix.repeat_interleave(steps[1], 1)[:, :: steps[1]]
    if draw(st.booleans()):
        matrix = matrix[:1].expand(shape[0], -1)
    return matrix.t() if draw(st.booleans()) else matrix


FACTORS = st.sampled_from([1.0, 0.5, 2.0**-9, 2.0**30, 2.0**120]) | st.floats(0.5, 1.0, width=32)


@settings(max_examples=500)
@given(
    matrix=matrices(),
    factor=FACTORS,
    is_tensor=st.booleans(),
    dtype=st.sampled_from([*GRADIENTS.values()]),
    wants=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_cast_of_any_matrix(matrix, factor, is_tensor, dtype, wants):
    assert_cast(matrix, torch.tensor(factor) if is_tensor else factor, dtype, wants)


@pytest.mark.parametrize("dtype", GRADIENTS.values(), ids=str)
def test_cast_of_codes_midpoints_and_neighbors(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middles, torch.tensor([1e30, -0.0, math.inf, -math.inf, math.nan])])
    up, down = (torch.nextafter(values, torch.tensor(end)) for end in (math.inf, -math.inf))
    values = torch.cat([values, up, down, torch.tensor([2.0**-149, -(2.0**-126)])])
    for factor in (1.0, 2.0**-3):
        assert_cast((values / factor)[None], factor, dtype)
        assert_cast((values / factor)[:, None], torch.tensor(factor), dtype)


@pytest.mark.parametrize("dtype", GRADIENTS.values(), ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
def test_cast_of_every_16_bit_number(source, dtype):
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(source).view(256, 256)
    for factor in (1.0, 0.7310585786300049):
        assert_cast(codes, factor, dtype)


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    is_turned=st.booleans(),
    dtype=st.sampled_from([*GRADIENTS.values()]),
)
def test_transpose_of_fp8_matrices(shape, is_turned, dtype):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    matrix = (codes.t() if is_turned else codes).view(dtype)
    turned = torch.full(matrix.shape[::-1], 0x55, dtype=torch.uint8)
    turn_matrix(matrix, turned.view(dtype))
    assert torch.equal(turned, matrix.view(torch.uint8).t())

"""Rounding against torch's own casts, against exact arithmetic, and in distribution."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from lightning_unitscale.formats import BF16, E4M3FN, E5M2, FP16, FP32, NumberFormat, get_format
from lightning_unitscale.quantize import quantize, rounding_keys
from tests.helpers import cast, same_bits

CASTS = {
    E4M3FN: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    FP16: torch.float16,
    BF16: torch.bfloat16,
    FP32: torch.float32,
}
INPUTS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# OCP MX's small formats, one like IEEE 754, and the narrowest and the widest exponents.
OTHERS = ["E3M2FN", "E2M3FN", "E2M1FN", "E3M4", "E2M1", "E7M3", "E7M22", "E8M3", "E5M23", "E6M9FN"]


def _same(first: Tensor, second: Tensor) -> bool:
    """The same bits, but that one NaN is as good as another."""
    nan = torch.full_like(first, math.nan)
    return same_bits(
        torch.where(first.isnan(), nan, first), torch.where(second.isnan(), nan, second)
    )


def _codes(dtype: torch.dtype) -> Tensor:
    """Every number of a type of 8 or 16 bits."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def _numbers(format: NumberFormat) -> Tensor:
    """Every finite number of a format from zero up, in FP64, and the first one out of its range."""
    normal = 1 + torch.arange(2**format.mantissa_bits).double() * format.eps
    exponents = torch.arange(format.min_exponent, format.max_exponent + 1).double()
    numbers = (2.0 ** exponents[:, None] * normal).flatten()
    subnormal = torch.arange(2**format.mantissa_bits).double() * format.smallest_subnormal
    numbers = torch.cat([subnormal, numbers[numbers <= format.max]])
    return torch.cat([numbers, 2 * numbers[-1:] - numbers[-2:-1]])


def _neighborhood(points: Tensor) -> Tensor:
    """FP32 points with the FP32 numbers on both sides of each, of both signs."""
    points = points.float()
    below = torch.nextafter(points, torch.tensor(-math.inf))
    above = torch.nextafter(points, torch.tensor(math.inf))
    points = torch.cat([points, below, above])
    return torch.cat([points, -points])


def _interesting(format: NumberFormat) -> Tensor:
    """Numbers, midpoints and their neighbors; zeros, NaN, infinities, the ends of FP32."""
    numbers = _numbers(format)
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    special = torch.tensor([0.0, math.inf, math.nan, 2.0**-149, FP32.max])
    return torch.cat([_neighborhood(torch.cat([numbers, midpoints])), special, -special])


def _round_exactly(value: float, format: NumberFormat) -> float:
    """Round half to even by rational arithmetic."""
    if not math.isfinite(value) or value == 0:
        limited = math.copysign(format.max, value) if format.finite_only else value
        return value if math.isnan(value) or value == 0 else limited
    exponent = max(math.frexp(value)[1] - 1, format.min_exponent)
    spacing = Fraction(2) ** (min(exponent, format.max_exponent) - format.mantissa_bits)
    result = float(round(Fraction(value) / spacing) * spacing)
    if abs(result) > format.max:
        result = format.max if format.finite_only else math.inf
    return math.copysign(abs(result), value)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("format", [E4M3FN, E5M2], ids=str)
def test_representable_values_are_unchanged(format: NumberFormat, dtype: torch.dtype) -> None:
    codes = _codes(CASTS[format]).to(dtype)
    result = quantize(codes, format)
    assert result.dtype == dtype
    assert _same(result, codes)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("format", [E4M3FN, E5M2, FP16], ids=str)
def test_numbers_midpoints_and_neighbors_match_casts(
    format: NumberFormat, dtype: torch.dtype
) -> None:
    values = _interesting(format).to(dtype)
    assert _same(quantize(values, format), cast(values, CASTS[format]).to(dtype))
    # In the format's own type, where NaN has one code of either sign, every bit.
    if dtype is torch.float32:
        assert same_bits(quantize(values, format).to(CASTS[format]), cast(values, CASTS[format]))


def test_ties_go_to_even() -> None:
    ties = torch.tensor([1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, -5 * 2.0**-10, 464.0])
    expected = torch.tensor([1.0, 1.25, 0.0, 2.0**-8, -(2.0**-8), 448.0])
    assert same_bits(quantize(ties, "E4M3FN"), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", CASTS, ids=str)
def test_every_16_bit_input_matches_cast(format: NumberFormat, dtype: torch.dtype) -> None:
    values = _codes(dtype)
    assert _same(quantize(values, format), cast(values, CASTS[format]).to(dtype))


@pytest.mark.parametrize("format", CASTS, ids=str)
def test_random_numbers_match_casts(format: NumberFormat) -> None:
    codes = torch.randint(-(2**31), 2**31, (10**6,))
    values = codes.to(torch.int32).view(torch.float32)  # all of FP32, NaNs and subnormals too
    normal = torch.randn(10**6) * format.smallest_normal * 4
    for one in (values, normal, torch.randn(10**6)):
        assert _same(quantize(one, format), cast(one, CASTS[format]).float())


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_match_exact_arithmetic(name: str) -> None:
    format = get_format(name)
    if format.mantissa_bits > 10:
        values = torch.randn(2000) * 2.0 ** torch.randint(-149, 128, (2000,))
    else:
        values = _interesting(format)[:20_000]
    expected = torch.tensor([_round_exactly(one, format) for one in values.tolist()])
    assert _same(quantize(values, format), expected)


def test_ocp_mx_element_formats() -> None:
    far = torch.tensor(1e9)
    assert [float(quantize(far, one)) for one in ("E3M2FN", "E2M3FN", "E2M1FN")] == [28, 7.5, 6]
    six = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6])
    assert same_bits(quantize(six, "E2M1FN"), six)
    assert math.isnan(quantize(torch.tensor(math.nan), "E2M1FN"))


def test_saturation() -> None:
    values = torch.tensor([1e9, -1e9, math.inf, -math.inf, math.nan, 448, 464, 480, 61440])

    def result(format: str, saturate: bool | None = None) -> list[str]:
        return [f"{one:g}" for one in quantize(values, format, saturate=saturate).tolist()]

    clipped = ["448", "-448", "448", "-448", "nan", "448", "448", "448", "448"]
    lost = ["nan", "nan", "nan", "nan", "nan", "448", "448", "nan", "nan"]
    assert result("E4M3FN") == result("E4M3FN", True) == clipped
    assert result("E4M3FN", False) == lost
    infinite = ["inf", "-inf", "inf", "-inf", "nan", "448", "448", "512", "inf"]
    largest = ["57344", "-57344", "57344", "-57344", "nan", "448", "448", "512", "57344"]
    assert result("E5M2") == result("E5M2", False) == infinite
    assert result("E5M2", True) == largest
    assert result("BF16", True)[2] == f"{BF16.max:g}"


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_dtype_without_largest_number_of_format(rounding: str) -> None:
    for dtype, format in ((torch.bfloat16, FP16), (torch.float16, BF16)):
        value = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
        result = quantize(value, format, rounding, saturate=True)
        assert float(result) == (2 - 2**-7) * 2**15


@pytest.mark.parametrize("format", ["E4M3FN", "E5M2", "E2M1FN", "BF16", "FP16"])
def test_stochastic_rounding_is_unbiased(format: str) -> None:
    n = 10**6
    generator = torch.Generator().manual_seed(7)
    smallest = get_format(format).smallest_subnormal
    for value in (1.3, -0.7003, 2.2, 0.3 * smallest, 2.5 * smallest):
        tensor = torch.full((n,), value)
        error = quantize(tensor, format, "stochastic", generator).double() - tensor.double()
        assert error.mean().abs() < 4 * error.std() / math.sqrt(n) + 1e-30
        assert len(error.unique()) == 2


def test_stochastic_rounding_of_different_numbers_is_unbiased() -> None:
    values = torch.randn(10**6)
    error = quantize(values, "E4M3FN", "stochastic").double() - values.double()
    assert error.mean().abs() < 4 * error.std() / 1e3
    # Neighbors in memory are rounded independently of each other, and so are calls.
    assert torch.corrcoef(torch.stack([error[1:], error[:-1]]))[0, 1].abs() < 4e-3
    other = quantize(values, "E4M3FN", "stochastic").double() - values.double()
    same = torch.full((10**6,), 1.3125)
    up = [quantize(same, "E4M3FN", "stochastic") > 1.3 for _ in range(2)]
    assert torch.corrcoef(torch.stack(up).double())[0, 1].abs() < 4e-3
    assert not torch.equal(error, other)


@pytest.mark.parametrize("format", ["E4M3FN", "BF16"])
def test_stochastic_rounding_gives_a_neighbor_and_keeps_numbers(format: str) -> None:
    numbers = quantize(torch.randn(10**4), format)
    assert same_bits(quantize(numbers, format, "stochastic"), numbers)
    values = torch.randn(10**4)
    result = quantize(values, format, "stochastic")
    spacing = get_format(format).eps * 2.0 ** values.abs().log2().floor()
    assert ((result - values).abs() < spacing.clamp_min(2.0**-9)).all()
    special = torch.tensor([0.0, -0.0, math.nan, -1e-30])
    result = quantize(special, format, "stochastic")
    assert torch.equal(torch.signbit(result), torch.signbit(special))
    assert result[2].isnan() and not result[:2].any()


def test_stochastic_rounding_at_the_ends_of_the_range() -> None:
    far = torch.tensor([math.inf, -math.inf, 1e9, 460.0])
    assert quantize(far, "E4M3FN", "stochastic").tolist() == [448, -448, 448, 448]
    # Between the largest number and the first one out of range, the latter may be drawn.
    near = quantize(torch.full((1000,), 60000.0), "E5M2", "stochastic")
    assert near.unique().tolist() == [57344, math.inf]


def test_same_seed_gives_same_rounding() -> None:
    values = torch.randn(1000, dtype=torch.float16)

    def result(seed: int) -> Tensor:
        return quantize(values, "E4M3FN", "stochastic", torch.Generator().manual_seed(seed))

    assert same_bits(result(1), result(1))
    assert not same_bits(result(1), result(2))
    torch.manual_seed(5)
    first = quantize(values, "E4M3FN", "stochastic")
    torch.manual_seed(5)
    assert same_bits(quantize(values, "E4M3FN", "stochastic"), first)
    assert not same_bits(quantize(values, "E4M3FN", "stochastic"), first)
    generator = torch.Generator().manual_seed(1)
    (key,) = rounding_keys(1, torch.Generator().manual_seed(1))
    assert same_bits(
        quantize(values, "E4M3FN", "stochastic", key),
        quantize(values, "E4M3FN", "stochastic", generator),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_quantize_is_bit_identical(backend: str) -> None:
    key = rounding_keys(1)[0]

    def every(tensor: Tensor, key: Tensor) -> list[Tensor]:
        formats = (E4M3FN, E5M2, FP16, BF16)
        return [
            quantize(tensor, one, rounding, None if rounding == "nearest" else key)
            for one, rounding in itertools.product(formats, ("nearest", "stochastic"))
        ]

    compiled = torch.compile(every, backend=backend, fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.cat([torch.randn(1000), _interesting(E4M3FN)]).to(dtype)
        for one, other in zip(compiled(values, key), every(values, key), strict=True):
            assert _same(one, other)


def test_compiled_with_default_generator() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(tensor: Tensor) -> Tensor:
        return quantize(tensor, "E4M3FN", "stochastic")

    values = torch.randn(1000)
    first, second = compiled(values), compiled(values)
    assert not same_bits(first, second)


def test_any_layout_without_changing_input() -> None:
    values = torch.randn(4, 6)
    before = values.clone()
    for one in (values.T, values[:, ::2], values[0].expand(3, 6), values[:0], values[0, 0]):
        expected = one.to(torch.float8_e4m3fn).float()
        assert torch.equal(quantize(one, "E4M3FN"), expected)
        result = quantize(one, "FP32")
        assert torch.equal(result, one)
        assert one.numel() == 0 or result.data_ptr() != one.data_ptr()
    assert same_bits(values, before)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_gradient_is_straight_through(rounding: str) -> None:
    values = torch.randn(5, requires_grad=True)
    grad = torch.randn(5)
    quantize(values, "E2M1FN", rounding).backward(grad)
    assert same_bits(values.grad, grad)


def test_formats_given_as_bits() -> None:
    values = torch.randn(100) * 100
    assert same_bits(quantize(values, (4, 3)), quantize(values, "E4M3FN"))
    assert same_bits(quantize(values, (5, 10)), quantize(values, "FP16"))
    assert same_bits(quantize(values, [3, 4]), quantize(values, NumberFormat("mine", 3, 4)))


def test_bad_input_is_an_error() -> None:
    values = torch.randn(3)
    for bits, message in (
        ((4, 0), r"mantissa_bits=0: out of range. Expected 1 to"),
        ((1, 3), r"exponent_bits=1: out of range. Expected 2 to"),
        ("E8M24", r"format=E8M24: values are .* Expected at most 23 mantissa bits"),
        ("E8M3FN", r"format=E8M3FN: values are .* maximum of at most 3\.4e\+38"),
        ("FP9", r"format='FP9': unknown number format"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize(values, bits)
    for bits in ((4, 3, 1), (4.0, 3), (True, 3)):
        with pytest.raises(TypeError, match="Expected two integers, "):
            quantize(values, bits)
    with pytest.raises(ValueError, match=r"rounding='odd': unknown rounding. Expected 'nearest'"):
        quantize(values, "FP16", "odd")
    with pytest.raises(ValueError, match=r"generator=.+: rounding='nearest' draws"):
        quantize(values, "FP16", "nearest", torch.Generator())
    with pytest.raises(ValueError, match=r"generator of shape \(3,\) and torch.float32: not a key"):
        quantize(values, "FP16", "stochastic", values)
    with pytest.raises(TypeError, match=r"tensor of torch.int64: only floating-point numbers"):
        quantize(torch.arange(3), "FP16")
    with pytest.raises(TypeError, match=r"tensor of torch.complex64: only floating-point"):
        quantize(torch.zeros(2, dtype=torch.complex64), "FP16")
    with pytest.raises(TypeError, match=r"tensor=1.0: only"):
        quantize(1.0, "FP16")

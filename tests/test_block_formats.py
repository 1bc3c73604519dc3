"""Block formats against torchao, and against the specifications in exact rationals."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_unitscale.formats import (
    BLOCK_FORMATS,
    E4M3FN,
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
    get_format,
    get_number_format,
)
from lightning_unitscale.quantize import quantize, quantize_blocks, rounding_keys
from tests.block_oracle import by_reading, by_torchao, near_rows, patterns

FORMATS = list(BLOCK_FORMATS.values())
ROW = 64


def _same(first: Tensor, second: Tensor) -> bool:
    """The same bits, but that one NaN is as good as another."""
    assert first.dtype == second.dtype == torch.float32
    equal = first.view(torch.int32) == second.view(torch.int32)
    return bool((equal | (first.isnan() & second.isnan())).all())


def _equals_torchao(format: BlockFormat, count: int, seed: int) -> None:
    pytest.importorskip("torchao")
    for made in (patterns(count, seed), near_rows(count, format.block_size, seed)):
        rows = made.reshape(-1, ROW)
        scales: list[Any] = [None]
        if format.has_tensor_scale:
            finite = torch.where(rows.isfinite(), rows, 0.0)
            scales = [torch.tensor(1.0), torch.tensor(0.0371), finite.abs().amax() / 2688]
        for scale in scales:
            found = quantize_blocks(rows, format, tensor_scale=scale)
            assert _same(found, by_torchao(rows, format, scale)), (format, scale)
        if format.has_tensor_scale:  # its own scale, from the largest magnitude
            assert _same(quantize_blocks(finite, format), by_torchao(finite, format, scales[-1]))


@pytest.mark.slow_cases(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_matches_torchao_bit_for_bit(format: BlockFormat) -> None:
    _equals_torchao(format, ROW * 2_000, seed=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_matches_torchao_on_many_patterns(format: BlockFormat) -> None:
    for seed in range(5):
        _equals_torchao(format, ROW * 32_000, seed=10 + seed)


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_matches_specification_in_exact_arithmetic(format: BlockFormat) -> None:
    size = format.block_size
    blocks = [
        *near_rows(size * 8, size, seed=2),
        *patterns(size * 8, seed=3).reshape(-1, size),
        # Where scales end, below the normal numbers and at the largest ones.
        *(near_rows(size * 4, size, seed=4) * 2.0**-120),
        torch.full((size,), torch.finfo(torch.float32).max),
        torch.arange(size).float() * 2.0**-149,
        torch.zeros(size),
    ]
    for block in blocks:
        values = torch.where(block.isfinite(), block, 0.0)
        scales = (2.0**-3, 0.0371) if format.has_tensor_scale else (None,)
        for scale in scales:
            found = quantize_blocks(values, format, tensor_scale=scale)
            given = 1.0 if scale is None else torch.tensor(scale).item()
            expected = torch.tensor(by_reading(values.tolist(), format, given))
            if scale == 0.0371:  # the factors of this scale are themselves rounded
                near = torch.isclose(found, expected, rtol=2.0**-20, atol=0.0)
                assert near.float().mean() > 0.9
            else:
                limit = torch.finfo(torch.float32).max
                assert torch.equal(found, expected.clamp(-limit, limit)), values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_dtype_is_rounded_like_fp32(dtype: torch.dtype, format: BlockFormat) -> None:
    scale = 1.0 if format.has_tensor_scale else None
    tensor = (torch.randn(4, 70) * 100).to(dtype)
    found = quantize_blocks(tensor, format, tensor_scale=scale)
    assert found.dtype == dtype
    expected = quantize_blocks(tensor.float(), format, tensor_scale=scale)
    assert torch.equal(found.float(), expected)
    # The largest number of a type is not rounded beyond it.
    largest = torch.full((32,), torch.finfo(torch.float16).max).to(dtype)
    assert quantize_blocks(largest, format, tensor_scale=scale).isfinite().all()


def test_blocks_run_along_axis_and_last_may_be_shorter() -> None:
    tensor = torch.randn(3, 50, 5) * 2.0 ** torch.randn(3, 50, 5)
    found = quantize_blocks(tensor, "MXFP4", axis=1)
    for start, end in ((0, 32), (32, 50)):
        part = quantize_blocks(tensor[:, start:end].transpose(1, 2), "MXFP4").transpose(1, 2)
        assert torch.equal(found[:, start:end], part)
    joined = quantize_blocks(tensor, "MXFP4", axis=(0, 2))
    rows = tensor.permute(1, 0, 2).reshape(50, 15)
    expected = quantize_blocks(rows, "MXFP4").reshape(50, 3, 5).permute(1, 0, 2)
    assert torch.equal(joined, expected)
    turned = tensor.permute(2, 0, 1)
    assert quantize_blocks(turned, "MXFP4").stride() == turned.stride()
    assert quantize_blocks(tensor[:0], NVFP4).shape == (0, 50, 5)


@pytest.mark.parametrize("format", [MXFP8_E4M3, NVFP4], ids=str)
def test_square_blocks_commute_with_transpose(format: BlockFormat) -> None:
    matrix = torch.randn(2, 40, 70)
    found = quantize_blocks(matrix, format, square=True)
    turned = quantize_blocks(matrix.mT, format, axis=-2, square=True)
    assert torch.equal(found, turned.mT)
    size = format.block_size
    scale = matrix.abs().amax() / 2688 if format is NVFP4 else None
    corner = matrix[:, :size, :size].reshape(2, -1)
    widened = BlockFormat("wide", format.element, size**2, format.scale)
    expected = quantize_blocks(corner, widened, tensor_scale=scale)
    assert torch.equal(found[:, :size, :size].reshape(2, -1), expected)


def test_zeros_nan_and_infinities_are_defined() -> None:
    zeros = torch.tensor([0.0, -0.0] * 16)
    for format in FORMATS:
        found = quantize_blocks(zeros, format)
        assert torch.equal(found, zeros) and torch.equal(found.signbit(), zeros.signbit())
    rows = torch.ones(3, 32)
    rows[0, 5], rows[1, 5] = math.nan, -math.inf
    found = quantize_blocks(rows, "MXFP8")
    assert found[0].isnan().all() and found[1, 5] == -math.inf
    assert found[1].isfinite().sum() == 31 and torch.equal(found[2], rows[2])
    found = quantize_blocks(rows, NVFP4, tensor_scale=1.0)
    assert found[0, :16].isnan().all() and found[0, 16:].eq(1.03125).all(), "6 times FP8's 1/6"
    assert found[1, 5] == -2688.0 and found[1, :5].eq(0).all()
    assert quantize_blocks(rows, NVFP4).isnan().all()


def test_constant_power_of_two_scale_is_as_accurate_as_tensor_scale() -> None:
    numbers = torch.randn(64, 4096)

    def error(scale: float | None) -> float:
        found = quantize_blocks(numbers, NVFP4, tensor_scale=scale)
        return ((found - numbers).square().mean() / numbers.square().mean()).item()

    own = error(None)
    assert 0.0088 < own < 0.0093
    constants = [error(2.0**power) for power in (-8, -6, -4, -2)]
    assert max(constants) - min(constants) == 0.0, "powers of two give the same numbers"
    assert abs(constants[0] / own - 1) < 0.01


def test_stochastic_rounding_is_unbiased_and_reproducible() -> None:
    row = torch.randn(64)
    many = row.expand(20_000, 64).contiguous()
    found = quantize_blocks(many, NVFP4, -1, 1.0, "stochastic")
    # Only a largest element that its scale does not reach is clipped.
    nearest = quantize_blocks(row, NVFP4, tensor_scale=1.0)
    inside = row.abs() < nearest.abs().unflatten(0, (-1, 16)).amax(-1).repeat_interleave(16)
    spacing = row.abs().amax() / 3
    assert (found.mean(0) - row)[inside].abs().max() < 4 * spacing / math.sqrt(20_000)
    key = rounding_keys(1)[0]
    first, second = (
        quantize_blocks(row, MXFP4, rounding="stochastic", generator=key) for _ in "ab"
    )
    assert torch.equal(first, second)


def test_gradient_is_straight_through() -> None:
    tensor = torch.randn(4, 32, requires_grad=True)
    quantize_blocks(tensor, "NVFP4").sum().backward()
    assert torch.equal(tensor.grad, torch.ones(4, 32))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_quantization_is_bit_identical(backend: str) -> None:
    tensor, key = torch.randn(5, 70) * 2.0 ** torch.randn(5, 70).mul(8), rounding_keys(1)[0]

    def function(tensor: Tensor, key: Tensor) -> list[Tensor]:
        return [
            quantize_blocks(tensor, "MXFP8"),
            quantize_blocks(tensor, NVFP4, -1, 0.0371, "stochastic", key),
            quantize_blocks(tensor, MXFP4, square=True),
        ]

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for found, expected in zip(compiled(tensor, key), function(tensor, key), strict=True):
        assert _same(found, expected)


def test_block_formats_are_found_by_name() -> None:
    assert get_format("mxfp8") is MXFP8_E4M3 and get_format("NVFP4") is NVFP4
    assert get_format("mxfp6_e3m2").element == get_format("E3M2FN")
    assert [(one.block_size, one.has_tensor_scale) for one in (MXFP4, NVFP4)] == [
        (32, False),
        (16, True),
    ]
    assert NVFP4.largest_block == 2688.0 and str(NVFP4) == "NVFP4"


def _call(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: quantize_blocks(torch.ones(4, 32), *args, **kwargs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_call("E4M3"), r"^format=E4M3FN: not a block format. Expected a block"),
        (_call("MXFP5"), r"^format='MXFP5': unknown number format. Expected one of FP32.*NVFP4"),
        (_call("MXFP4", 2), r"^axis=2: not dimensions of a tensor of shape \(4, 32\)"),
        (_call("MXFP4", 1.5), r"^axis=1.5: not dimensions of a tensor of .* Expected numbers from"),
        (_call("MXFP4", None), r"^axis=None: not dimensions of a tensor"),
        (_call("MXFP4", (0, -2)), r"^axis=\(0, -2\): names a dimension twice"),
        (_call("MXFP4", (0, 1), square=True), r"^axis=\(0, 1\): square blocks lie in the last two"),
        (_call("MXFP4", tensor_scale=1.0), r"^tensor_scale=1.0: MXFP4 has scales for blocks only"),
        (_call("NVFP4", tensor_scale=0.0), r"^tensor_scale=0.0: not a scale of a tensor"),
        (_call("NVFP4", rounding="up"), r"^rounding='up': unknown rounding"),
        (_call("NVFP4", generator=torch.Generator()), r"draws no random numbers"),
        (lambda: quantize(torch.ones(2), "NVFP4"), r"^format=NVFP4: a block format, whose range"),
        (lambda: get_number_format("MXFP8"), r"Pass for example E4M3FN"),
    ],
)
def test_bad_arguments_are_an_error(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
    assert E4M3FN.max == 448.0

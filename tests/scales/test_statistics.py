"""Every way to a statistics row against brute force in NumPy and against torch's own casts."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from lightning_unitscale.capture.operators import RULES
from lightning_unitscale.formats import BF16, E4M3FN, E5M2, FP16, FP32, NumberFormat
from lightning_unitscale.scales.host_rows import host_row
from lightning_unitscale.scales.layout import (
    FORMAT_KINDS,
    MAX_EXPONENT,
    MIN_EXPONENT,
    MOMENTS,
    RowLayout,
)
from lightning_unitscale.scales.reduce import merge_rows
from lightning_unitscale.scales.statistics import statistics_row, step_rows
from lightning_unitscale.scales.torch_rows import functional_row, sample_stride
from tests.helpers import CalledOperators

DTYPES = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    E4M3FN: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
}
LAYOUT = RowLayout(formats=(*DTYPES, FP32), sample_size=None)
LIGHT = RowLayout().measured
COMPILED = RowLayout(formats=(), sample_size=4096)


@pytest.fixture(params=[statistics_row, functional_row], ids=["operator", "functional"])
def row_of(request):
    """The two ways: one operator, and torch operations."""
    return request.param


def expected_row(tensor, layout, factor=1.0):
    """The definition, element by element."""
    values = tensor.double().flatten().numpy()
    finite = values[np.isfinite(values)]
    magnitude = np.abs(finite)
    above_zero = magnitude[magnitude > 0]
    row = [
        values.size,
        np.sum(values == 0),
        np.sum(np.isnan(values)),
        np.sum(np.isinf(values)),
        math.fsum(finite),
        math.fsum(magnitude),
        math.fsum(magnitude**2),
        magnitude.max(initial=0.0),
        above_zero.min(initial=math.inf),
    ]
    for item in layout.formats:
        row += counts_by_cast(torch.from_numpy(finite * factor), item)
    if layout.histogram:
        exponents = np.frexp(above_zero)[1] - 1
        bins = np.clip(exponents, MIN_EXPONENT, MAX_EXPONENT) - MIN_EXPONENT
        row += [values.size, *np.bincount(bins, minlength=MAX_EXPONENT - MIN_EXPONENT + 1)]
    return torch.tensor(np.array(row, dtype=np.float64))


def counts_by_cast(finite, item):
    """Elements of an FP64 tensor that overflow, become subnormal, vanish, when they are cast."""
    magnitude = finite.abs()
    if item in DTYPES:
        # Exact: the tensors are FP32 (or narrower) times a power of two that stays in its range.
        cast = finite.float().to(DTYPES[item]).double().abs()
    else:
        cast = finite.float().double().abs()
    # A saturating cast hides what it clips, so that is seen before it.
    over = cast.isinf() if item.has_infinity else magnitude > item.max
    subnormal = (cast > 0) & (cast < item.smallest_normal)
    flushed = (cast == 0) & (magnitude > 0)
    return [int(over.sum()), int(subnormal.sum()), int(flushed.sum())]


def assert_row(row, expected, layout):
    assert row.dtype == torch.float64 and row.shape == (layout.num_columns,)
    sums = slice(layout.index("sum"), layout.index("square_sum") + 1)
    exact = torch.ones(layout.num_columns, dtype=torch.bool)
    exact[sums] = False
    wrong = (row != expected) & exact
    names = [layout.columns[i] for i in wrong.nonzero().flatten()]
    assert not names, (names, row[wrong], expected[wrong])
    # Sums of both signs cancel: their error is relative to the sum of magnitudes.
    # The sum of magnitudes of a light row is of the sample.
    magnitude = float(expected[sums].abs()[:2].max())
    rtol = 1e-6 if layout.sample_size is None else 1e-5  # of a light row, from FP32
    torch.testing.assert_close(row[sums][1:], expected[sums][1:], rtol=rtol, atol=0.0)
    assert abs(float(row[sums][0] - expected[sums][0])) <= rtol * magnitude


def boundary_values():
    """Every threshold of every format and its FP32 neighbors, of both signs."""
    values = [0.0, -0.0, 2.0**-149, 2.0**-126, 3.4028234663852886e38, math.inf, -math.inf, math.nan]
    for item in LAYOUT.formats:
        values += [item.max, item.smallest_normal, item.smallest_subnormal]
        values += [item.flush_threshold, item.subnormal_threshold, item.overflow_threshold]
    values = torch.tensor(values, dtype=torch.float64).float()
    up = torch.nextafter(values, torch.tensor(math.inf))
    down = torch.nextafter(values, torch.tensor(-math.inf))
    values = torch.cat([values, up, down])
    return torch.cat([values, -values])


@pytest.mark.parametrize("log2_scale", [-140, -126, -83, -20, -10, -5, 0, 3, 9, 15, 60, 120])
def test_random_values_at_any_scale(row_of, log2_scale):
    tensor = torch.randn(37, 61) * 2.0**log2_scale
    assert_row(row_of(tensor, LAYOUT), expected_row(tensor, LAYOUT), LAYOUT)


def test_boundary_values(row_of):
    tensor = boundary_values()
    assert_row(row_of(tensor, LAYOUT), expected_row(tensor, LAYOUT), LAYOUT)


def test_values_of_all_magnitudes(row_of):
    codes = torch.randint(-(2**31), 2**31, (6000,), dtype=torch.int64).to(torch.int32)
    tensor = codes.view(torch.float32)
    # Squares of 1e38 do not leave FP64, and neither do their sums.
    assert_row(row_of(tensor, LAYOUT), expected_row(tensor, LAYOUT), LAYOUT)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(array=arrays(np.float32, array_shapes(max_dims=3, max_side=9), elements=st.floats(width=32)))
def test_adversarial_values(row_of, array):
    tensor = torch.from_numpy(array)
    assert_row(row_of(tensor, LAYOUT), expected_row(tensor, LAYOUT), LAYOUT)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_other_dtypes(row_of, dtype):
    tensor = torch.cat([torch.randn(3000), torch.randn(3000) * 2**-13, torch.zeros(9)]).to(dtype)
    assert_row(row_of(tensor, LAYOUT), expected_row(tensor, LAYOUT), LAYOUT)


def test_fp64_beyond_fp32(row_of):
    tensor = torch.tensor([1e-200, -1e-60, 1e100, 5e-324, 0.0], dtype=torch.float64)
    row = row_of(tensor, LAYOUT)
    counts = row[LAYOUT.exponents]
    assert counts[0] == 3 and counts[-1] == 1 and counts.sum() == 4
    assert row[LAYOUT.index("FP32.overflow")] == 1 and row[LAYOUT.index("FP32.flushed")] == 3
    assert row[LAYOUT.index("abs_max")] == 1e100 and row[LAYOUT.index("abs_min")] == 5e-324


def test_fp64_thresholds_are_compared_in_fp64(row_of):
    limit = E5M2.overflow_threshold
    tensor = torch.tensor([limit, math.nextafter(limit, 0.0), -limit], dtype=torch.float64)
    assert row_of(tensor, LAYOUT)[LAYOUT.index("E5M2.overflow")] == 2
    limit = E4M3FN.overflow_threshold
    tensor = torch.tensor([limit, math.nextafter(limit, math.inf)], dtype=torch.float64)
    assert row_of(tensor, LAYOUT)[LAYOUT.index("E4M3FN.overflow")] == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(-3.0),
        torch.tensor(math.nan),
        torch.zeros(5, 0),
        torch.zeros(0, dtype=torch.float64),
        torch.zeros(70, 70),
        torch.full((70, 70), math.nan),
        torch.full((70, 70), -math.inf),
        torch.randn(20, 30, 40).transpose(0, 2),
        torch.randn(20, 30)[::3, 1::2],
        torch.randn(7, 1).expand(7, 500),
        torch.randn(()).expand(60, 50),
        torch.randn(90, 40)[:, 7],
        torch.randn(1, 1, 1),
        torch.randn(3, 5, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(8, requires_grad=True),
        torch.nn.Parameter(torch.randn(8, 4)),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}",
)
def test_shapes_and_strides(row_of, tensor):
    row = row_of(tensor, LAYOUT)
    assert not row.requires_grad
    assert_row(row, expected_row(tensor.detach(), LAYOUT), LAYOUT)


def test_nonfinite_elements_are_counted_separately(row_of):
    tensor = torch.randn(5000)
    plain = tensor.clone()
    tensor[10:20], tensor[4000:4003], tensor[4500] = math.nan, math.inf, -math.inf
    row = row_of(tensor, LAYOUT)
    assert_row(row, expected_row(tensor, LAYOUT), LAYOUT)
    kept = plain[torch.isfinite(tensor)].double()
    assert float(row[LAYOUT.index("square_sum")]) == pytest.approx(float(kept.square().sum()))
    assert row[LAYOUT.index("E4M3FN.overflow")] == 0
    assert not row.isnan().any()


@pytest.mark.parametrize("log2_factor", [-70, -8, -1, 5, 20, 66])
def test_counts_of_the_stored_value(row_of, log2_factor):
    # Chosen so that the matmul is exact in FP32, which the oracle computes and we do not.
    tensor = torch.randn(4000) * 2.0 ** (-log2_factor - 6)
    stored = boundary_values()
    stored = stored[(stored.abs() > 2.0**-40) & (stored.abs() < 2.0**40)]
    tensor = torch.cat([tensor, stored * 2.0**-log2_factor, torch.zeros(3)])
    factor = torch.tensor(2.0**log2_factor)
    row = row_of(tensor, LAYOUT, factor=factor)
    assert_row(row, expected_row(tensor, LAYOUT, 2.0**log2_factor), LAYOUT)


@pytest.mark.slow
def test_counts_above_2_to_24():
    tensor = torch.ones(1).expand(2**24 + 3)
    row = functional_row(tensor, RowLayout(histogram=False))
    assert row[0] == 2**24 + 3 and row[4] == 2**24 + 3
    row = statistics_row(tensor.contiguous() * 1e5, RowLayout(histogram=False))
    assert row[RowLayout().index("FP16.overflow")] == 2**24 + 3


@pytest.mark.parametrize("log2_scale", [-140, -83, -40, 0, 83, 120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_light_rows_match_reference(dtype, log2_scale):
    """Tensors with more elements than a sample and than one partial sum, of any magnitude."""
    tensor = (torch.randn(401, 1000) * 2.0**log2_scale).to(dtype)
    for one in (
        tensor,
        tensor.t(),
        tensor[:, 100:300],
        tensor[:3],
        tensor.relu(),
        tensor[::2, ::3],
    ):
        assert_row(statistics_row(one, LIGHT), functional_row(one, LIGHT), LIGHT)
        assert_row(statistics_row(one, MOMENTS), functional_row(one, MOMENTS), MOMENTS)


@pytest.mark.slow
def test_light_rows_of_rare_values_and_layouts():
    tensor = torch.randn(300, 200)
    tensor[7, 3:9], tensor[250, 0], tensor[0, 0] = math.nan, math.inf, -math.inf
    for one in (
        tensor,
        tensor.nan_to_num().double() * 1e-200,
        torch.randn(90_000) * 2.0**-140,
        torch.zeros(70_000),
        torch.randn(1, 1, 300).expand(200, 100, 300),
        torch.randn(30_000, 1).expand(30_000, 4),
        torch.randn(()).expand(60, 500),
        torch.randn(40_000, dtype=torch.complex64).conj().imag,
    ):
        row = statistics_row(one, LIGHT)
        assert_row(row, functional_row(one, LIGHT), LIGHT)
        whole = expected_row(one, RowLayout((), sample_size=None))
        for name in ("numel", "nans", "infs", "abs_max"):
            assert row[LIGHT.index(name)] == whole[LIGHT.index(name)]


@pytest.mark.parametrize("constant", [1e-25, 1e25, 3e38])
def test_sums_are_range_safe(row_of, constant):
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.full((300, 100), constant, dtype=dtype)
        value = float(tensor[0, 0])
        for layout in (LIGHT, MOMENTS):
            row = row_of(tensor, layout)
            assert float(row[4]) == pytest.approx(3e4 * value, rel=1e-5)
            assert float(row[6]) == pytest.approx(3e4 * value * value, rel=1e-5)


def test_sample_covers_all_channels(row_of):
    # Channels of very different scale, whose number shares factors with most strides.
    for channels in (2, 48, 192, 256, 768, 1000):
        tensor = torch.randn(700_000 // channels, channels)
        tensor *= torch.exp2(torch.linspace(-20, 4, channels))
        sampled = row_of(tensor, LIGHT)
        exact = functional_row(tensor, RowLayout(formats=(), sample_size=None))
        number = sampled[LIGHT.index("sampled")]
        assert 10_000 < number <= 16_384
        error = sampled[LIGHT.exponents] / number - exact[LIGHT.exponents] / tensor.numel()
        assert error.cumsum(0).abs().max() < 0.01


@pytest.mark.parametrize("numel", [16_389, 20_000, 31_999, 50_000, 1_000_003])
def test_sample_covers_all_parts(row_of, numel):
    tensor = torch.exp2(torch.arange(numel) * 10 // numel)  # ten equal parts, in ten octaves
    row = row_of(tensor, LIGHT)
    number = row[LIGHT.index("sampled")]
    shares = row[LIGHT.index("2^0") : LIGHT.index("2^10")] / number
    assert 1000 < number <= 16_384
    torch.testing.assert_close(shares, torch.full_like(shares, 0.1), rtol=0, atol=0.002)


@pytest.mark.parametrize(
    ("numel", "row_length"),
    [(8192 * 50_304, 50_304), (2**28, 16_384), (2**24, 4096), (100 * 50_257, 50_257), (2**19, 1)],
)
def test_sample_stride_spreads_evenly(numel, row_length):
    """Strides share no factor with a row, and their positions in rows are spread evenly."""
    stride = sample_stride(numel, row_length, 16_384)
    assert math.gcd(stride, row_length) == 1
    number = -(-numel // stride)
    assert 6000 < number <= 16_384
    places = np.sort(np.arange(number) * stride % row_length) / row_length
    if row_length > 1:
        assert np.abs(places - np.arange(number) / number).max() < 0.01


def test_sample_of_correlated_neighbors(row_of):
    # Runs of 64 equal elements at random scales.
    scales = torch.randint(-12, 0, (8192, 1), generator=torch.Generator().manual_seed(2))
    tensor = torch.exp2(scales.float()).expand(-1, 64).contiguous()
    sampled, exact = row_of(tensor, LIGHT), row_of(tensor, RowLayout((), sample_size=None))
    number = sampled[LIGHT.index("sampled")]
    error = sampled[LIGHT.exponents] / number - exact[LIGHT.exponents] / tensor.numel()
    assert error.cumsum(0).abs().max() < 0.01


def test_small_tensor_is_read_completely(row_of):
    tensor = torch.randn(16_384)
    light, exact = row_of(tensor, LIGHT), row_of(tensor, RowLayout((), sample_size=None))
    assert_row(light, exact, LIGHT)


def test_step_rows_match_single_rows():
    """For any number of tensors in the buffer, in any order."""
    tensors = [torch.randn(1 + 997 * k % 40_000) * 2.0 ** (k % 9 - 4) for k in range(150)]
    tensors[7][3] = math.nan
    tensors += [torch.zeros(0), torch.zeros(9), torch.randn(5).bfloat16(), torch.randn(9).double()]
    rows = step_rows(LIGHT)
    taken = [rows.add(tensor) for tensor in tensors]
    read = rows.send()
    for index in (*reversed(range(len(tensors))),):
        (row,) = read([[taken[index]]])
        assert_row(row, functional_row(tensors[index], LIGHT), LIGHT)
    merged, absent = read([taken[:3], []])
    expected = functools.reduce(
        lambda one, other: merge_rows(one, other, LIGHT),
        (functional_row(tensor, LIGHT) for tensor in tensors[:3]),
    )
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-4)
    assert not absent.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_measured_tensor_stays_resizable(dtype):
    """FSDP resizes gathered tensors. NumPy's view of a tensor would fix its size permanently."""
    tensor = torch.randn(300, 7).to(dtype)
    for layout in (LIGHT, MOMENTS, RowLayout(formats=(FP16,), histogram=True)):
        statistics_row(tensor, layout)
    rows = step_rows(LIGHT)
    row = rows.add(tensor)
    rows.send()([[row]])
    assert tensor.untyped_storage().resizable()


def test_columns_follow_the_layout(row_of):
    own = NumberFormat("own", 3, 2)
    layout = RowLayout(formats=(own,), histogram=False)
    assert layout.columns[-3:] == ("own.overflow", "own.subnormal", "own.flushed")
    row = row_of(torch.tensor([20.0, 0.1, 0.01]), layout)
    assert row[-3:].tolist() == [1, 1, 1]
    bare = RowLayout(formats=(), histogram=False)
    assert row_of(torch.ones(3), bare).tolist() == [3, 0, 0, 0, 3, 3, 3, 1, 1]


def test_unsupported_dtypes_and_layouts_are_an_error():
    for tensor in (torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.complex64)):
        with pytest.raises(ValueError, match=r"tensor\.dtype=.*Expected a real floating-point"):
            statistics_row(tensor, LAYOUT)
    with pytest.raises(ValueError, match="sparse"):
        statistics_row(torch.eye(3).to_sparse(), LAYOUT)


def test_bad_layout_arguments_are_an_error():
    with pytest.raises(ValueError, match="given twice"):
        RowLayout(formats=(FP16, FP16))
    with pytest.raises(ValueError, match=r"sample_size=0: out of range. Expected at least 1"):
        RowLayout(sample_size=0)
    with pytest.raises(KeyError, match="'rms': not in this layout"):
        RowLayout().index("rms")


def test_layout_survives_text_round_trip():
    layout = RowLayout(formats=(NumberFormat("own", 3, 2, finite_only=True), FP16), sample_size=7)
    assert RowLayout.from_key(layout.key) == layout


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, slot, layout):
        ctx.layout = layout
        return tensor.view_as(tensor), statistics_row(tensor, layout)

    @staticmethod
    def backward(ctx, grad, _):
        return grad, statistics_row(grad, ctx.layout), None


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", [COMPILED, MOMENTS], ids=["light", "exact"])
def test_rows_inside_compiled_step(layout, backend):
    def step(tensor, slot):
        tensor, row = _Probe.apply(torch.nn.functional.gelu(tensor * 3), slot, layout)
        return tensor.square().sum() * 2.0**-30, tensor, row

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for shape in ((70, 300), (40, 30)):
        tensor = torch.randn(shape, requires_grad=True)
        slot = torch.zeros(layout.num_columns, dtype=torch.float64, requires_grad=True)
        loss, value, row = compiled(tensor, slot)
        loss.backward()
        value = value.detach()
        assert_row(row.detach(), functional_row(value, layout), layout)
        assert_row(slot.grad, functional_row(value * 2.0**-29, layout), layout)


def test_exact_counts_of_the_stored_value_in_a_graph():
    layout, factor = RowLayout((FP16,), sample_size=None), torch.tensor(2.0**-9)
    compiled = torch.compile(
        lambda tensor, factor: statistics_row(tensor, layout, factor=factor), backend="aot_eager"
    )
    tensor = torch.randn(40, 30) * 3
    assert_row(compiled(tensor, factor), functional_row(tensor, layout, factor=factor), layout)


@pytest.mark.parametrize("layout", [LIGHT, MOMENTS], ids=["light", "exact"])
def test_rows_call_no_matmul(layout):
    """A session would take a dot product of theirs for one of the module's."""
    tensor = torch.randn(300, 100)
    with CalledOperators() as called:
        host_row(tensor, layout)
    words = {operator.name().partition("::")[2] for operator in called.operators}
    assert words and not words & {rule.operator.partition(".")[0] for rule in RULES}


def test_overflow_outside_sample():
    """One element overflows, at each position; and elements on both sides of a format's limit."""
    layout = RowLayout()
    overflow = layout.index("E4M3FN.overflow")
    for place in range(5):
        tensor = torch.randn(40_000)
        tensor[place] = 1000.0
        assert float(statistics_row(tensor, layout)[overflow]) >= 1
    for constant, share in ((E4M3FN.max, 0), (450.0, 1), (2.0**-10, 0)):
        row = statistics_row(torch.full((40_000,), constant), layout)
        assert float(row[overflow]) == 40_000 * share
    assert float(row[layout.index("E4M3FN.flushed")]) == 40_000
    assert float(row[layout.index("E4M3FN.subnormal")]) == 0


def test_sampled_fractions_are_near_exact_fractions():
    layout, exact = RowLayout(), RowLayout(sample_size=None)
    tensor = torch.randn(300_000) * torch.exp2(torch.rand(300_000) * 40 - 30)
    found, wanted = statistics_row(tensor, layout), functional_row(tensor, exact)
    for item in layout.formats:
        for kind in FORMAT_KINDS:
            column = layout.index(f"{item.name}.{kind}")
            assert abs(float(found[column] - wanted[column])) < 0.01 * len(tensor)
    means = (row[layout.index("abs_sum")] / row[0] for row in (found, wanted))
    assert next(means) == pytest.approx(float(next(means)), rel=0.1)

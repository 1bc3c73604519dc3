"""Every way to a statistics row against brute force in NumPy and against torch's own casts."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from lightning_unitscale.formats import BF16, E4M3FN, E5M2, FP16, FP32, NumberFormat
from lightning_unitscale.scales import cpu_kernel
from lightning_unitscale.scales.layout import MAX_EXPONENT, MIN_EXPONENT, RowLayout
from lightning_unitscale.scales.statistics import functional_row, statistics_row

DTYPES = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    E4M3FN: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
}
LAYOUT = RowLayout(formats=(*DTYPES, FP32), sample_size=None)
COMPILED = RowLayout(formats=(FP16, E4M3FN), sample_size=4096)


@pytest.fixture(params=["kernel", "functional"])
def row_of(request):
    """The two ways: one compiled kernel, and torch operations."""
    if request.param == "functional":
        return functional_row
    if request.param == "kernel" and not cpu_kernel.is_available():
        pytest.skip("no C compiler")
    return statistics_row


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
    magnitude = float(expected[layout.index("abs_sum")])
    torch.testing.assert_close(row[sums][1:], expected[sums][1:], rtol=1e-6, atol=0.0)
    assert abs(float(row[sums][0] - expected[sums][0])) <= 1e-6 * magnitude


def boundary_values():
    """Every threshold of every format and its FP32 neighbours, of both signs."""
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
def test_other_types(row_of, dtype):
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


def test_nonfinite_elements_are_counted_apart(row_of):
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
    # Chosen so that the product is exact in FP32, which the oracle computes and we do not.
    tensor = torch.randn(4000) * 2.0 ** (-log2_factor - 6)
    stored = boundary_values()
    stored = stored[(stored.abs() > 2.0**-40) & (stored.abs() < 2.0**40)]
    tensor = torch.cat([tensor, stored * 2.0**-log2_factor, torch.zeros(3)])
    factor = torch.tensor(2.0**log2_factor)
    row = row_of(tensor, LAYOUT, factor=factor)
    assert_row(row, expected_row(tensor, LAYOUT, 2.0**log2_factor), LAYOUT)


def test_counts_beyond_what_fp32_can_count():
    tensor = torch.ones(1).expand(2**24 + 3)
    row = functional_row(tensor, RowLayout(histogram=False))
    assert row[0] == 2**24 + 3 and row[4] == 2**24 + 3
    row = statistics_row(tensor.contiguous() * 1e5, RowLayout(histogram=False))
    assert row[RowLayout().index("FP16.overflow")] == 2**24 + 3


def test_sampled_exponents(row_of):
    # Channels of very different scale: a fixed stride would see only a few of them.
    tensor = torch.randn(512, 192) * torch.exp2(torch.linspace(-20, 4, 192))
    layout = RowLayout(sample_size=16_384)
    sampled, exact = row_of(tensor, layout), row_of(tensor, RowLayout(sample_size=None))
    counts = sampled[layout.exponents]
    assert sampled[layout.index("sampled")] == counts.sum() == 16_384
    error = counts / 16_384 - exact[layout.exponents] / tensor.numel()
    assert error.abs().max() < 0.01
    assert error.cumsum(0).abs().max() < 0.01
    assert torch.equal(counts, functional_row(tensor, layout)[layout.exponents])


@pytest.mark.parametrize("numel", [16_389, 20_000, 31_999, 50_000, 1_000_003])
def test_a_sample_is_of_all_parts(row_of, numel):
    tensor = torch.exp2(torch.arange(numel) * 10 // numel)  # ten equal parts, in ten octaves
    layout = RowLayout()
    row = row_of(tensor, layout)
    shares = row[layout.index("2^0") : layout.index("2^10")] / row[layout.index("sampled")]
    assert row[layout.index("sampled")] == 16_384
    torch.testing.assert_close(shares, torch.full_like(shares, 0.1), rtol=0, atol=0.002)
    assert torch.equal(row, functional_row(tensor, layout))


def test_samples_of_neighbours_that_are_alike(row_of):
    # Runs of 64 equal elements at random scales: as far from independent as groups can be.
    scales = torch.randint(-12, 0, (8192, 1), generator=torch.Generator().manual_seed(2))
    tensor = torch.exp2(scales.float()).expand(-1, 64).contiguous()
    layout = RowLayout()
    sampled, exact = row_of(tensor, layout), row_of(tensor, RowLayout(sample_size=None))
    error = sampled[layout.exponents] / 16_384 - exact[layout.exponents] / tensor.numel()
    assert error.abs().max() < 0.01
    assert error.cumsum(0).abs().max() < 0.01


def test_a_small_tensor_is_counted_whole(row_of):
    tensor = torch.randn(16_384)
    assert torch.equal(
        row_of(tensor, RowLayout())[18:], row_of(tensor, RowLayout(sample_size=None))[18:]
    )


def test_columns_follow_the_layout(row_of):
    own = NumberFormat("own", 3, 2)
    layout = RowLayout(formats=(own,), histogram=False)
    assert layout.columns[-3:] == ("own.overflow", "own.subnormal", "own.flushed")
    row = row_of(torch.tensor([20.0, 0.1, 0.01]), layout)
    assert row[-3:].tolist() == [1, 1, 1]
    bare = RowLayout(formats=(), histogram=False)
    assert row_of(torch.ones(3), bare).tolist() == [3, 0, 0, 0, 3, 3, 3, 1, 1]


def test_more_formats_than_the_kernel_takes(row_of):
    formats = tuple(NumberFormat(f"f{i}", 2 + i % 7, 1 + i % 9) for i in range(20))
    layout = RowLayout(formats=formats, histogram=False)
    tensor = torch.randn(500)
    assert torch.equal(row_of(tensor, layout)[7:], functional_row(tensor, layout)[7:])


def test_threads_do_not_change_a_bit():
    tensor = torch.randn(300_000)
    one = statistics_row(tensor, LAYOUT)
    torch.set_num_threads(2)
    try:
        two = statistics_row(tensor, LAYOUT)
    finally:
        torch.set_num_threads(1)
    if cpu_kernel.is_available():
        assert torch.equal(one, two)
    assert_row(two, one, LAYOUT)


def test_what_has_no_statistics():
    for tensor in (torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.complex64)):
        with pytest.raises(ValueError, match=r"tensor\.dtype=.*expected a real floating-point"):
            statistics_row(tensor, LAYOUT)
    with pytest.raises(ValueError, match="sparse"):
        statistics_row(torch.eye(3).to_sparse(), LAYOUT)


def test_layout_misuse():
    with pytest.raises(ValueError, match="given twice"):
        RowLayout(formats=(FP16, FP16))
    with pytest.raises(ValueError, match="sample_size=3: out of range; expected at least 4"):
        RowLayout(sample_size=3)
    with pytest.raises(KeyError, match="'rms': not in this layout"):
        RowLayout().index("rms")


def test_layout_travels_as_text():
    layout = RowLayout(formats=(NumberFormat("own", 3, 2, finite_only=True), FP16), sample_size=7)
    assert RowLayout.from_key(layout.key) == layout


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, slot, row_of):
        ctx.row_of = row_of
        return tensor.view_as(tensor), row_of(tensor, COMPILED)

    @staticmethod
    def backward(ctx, grad, _):
        return grad, ctx.row_of(grad, COMPILED), None


@pytest.mark.parametrize(
    ("row_of", "backend"),
    [(statistics_row, "aot_eager"), (statistics_row, "inductor"), (functional_row, "aot_eager")],
)
def test_inside_a_compiled_step(row_of, backend):
    def step(tensor, factor, slot):
        tensor, row = _Probe.apply(torch.nn.functional.gelu(tensor * 3), slot, row_of)
        loss = tensor.square().sum() * 2.0**-30
        return loss, tensor, row, row_of(tensor, COMPILED, factor=factor)

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    factor = torch.tensor(2.0**-9)
    for shape in ((70, 300), (40, 30)):
        tensor = torch.randn(shape, requires_grad=True)
        slot = torch.zeros(COMPILED.num_columns, dtype=torch.float64, requires_grad=True)
        loss, value, row, stored = compiled(tensor, factor, slot)
        loss.backward()
        value = value.detach()
        assert_row(row.detach(), functional_row(value, COMPILED), COMPILED)
        assert_row(stored, functional_row(value, COMPILED, factor=factor), COMPILED)
        assert_row(slot.grad, functional_row(value * 2.0**-29, COMPILED), COMPILED)


def test_inductor_compiles_the_functional_row():
    compiled = torch.compile(functional_row, backend="inductor", fullgraph=True)
    tensor, factor = torch.randn(40, 30) * 3, torch.tensor(2.0**-9)
    assert_row(
        compiled(tensor, COMPILED, factor=factor),
        functional_row(tensor, COMPILED, factor=factor),
        COMPILED,
    )


WITHOUT_A_COMPILER = """
import torch
from lightning_unitscale.scales import cpu_kernel
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.statistics import functional_row, statistics_row

layout, tensor, factor = RowLayout(), torch.randn(50), torch.tensor(0.5)
found = statistics_row(tensor, layout)
assert not cpu_kernel.is_available()
torch.testing.assert_close(found, functional_row(tensor, layout))
found = statistics_row(tensor, layout, factor=factor)
torch.testing.assert_close(found, functional_row(tensor, layout, factor=factor))
half = tensor.half()
torch.testing.assert_close(statistics_row(half, layout), functional_row(half, layout))
"""


def test_without_a_compiler(tmp_path):
    environment = {**os.environ, "CC": str(tmp_path / "no such compiler")}
    subprocess.run(
        [sys.executable, "-c", WITHOUT_A_COMPILER], env=environment, check=True, timeout=120
    )


def test_with_a_torch_that_lacks_a_function(monkeypatch):
    monkeypatch.setattr(cpu_kernel, "TORCH_FUNCTIONS", ("torch_no_such_function",))
    assert not cpu_kernel.register(None, "unitscale_test_nothing")

"""The kernels of a statistics row in Triton's interpreter; run by test_triton_statistics.py.

Triton decides when it is imported whether it interprets, so this is a process of its own.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unitscale.formats import BF16, E4M3FN, E5M2, FP16, FP32, NumberFormat
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.statistics import functional_row
from lightning_unitscale.scales.triton_statistics import joint_row, partial_rows, triton_row

pytestmark = [
    # NumPy, which computes here, warns of infinities.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # Of the interpreter of Triton 3.6.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.timeout(1500),
]

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]
LAYOUT = RowLayout(formats=(E5M2,), sample_size=None)
EVERYTHING = RowLayout(formats=(FP16, BF16, E4M3FN, E5M2, FP32, NumberFormat("own", 3, 2)))
SUMS = ("sum", "abs_sum", "square_sum")

LAUNCHES: list[str] = []
partial_rows.add_pre_run_hook(lambda *args, **kwargs: LAUNCHES.append("partial_rows"))
joint_row.add_pre_run_hook(lambda *args, **kwargs: LAUNCHES.append("joint_row"))


def assert_row(tensor, layout, factor=None, in_order=None):
    """The bits of the reference, and sums as near to the exact ones as the kernels say."""
    LAUNCHES.clear()
    row = triton_row(tensor, layout, factor)
    assert len(LAUNCHES) <= 2
    expected = functional_row(tensor if in_order is None else in_order, layout, factor=factor)
    assert row.dtype == expected.dtype and row.shape == expected.shape
    is_sum = torch.zeros(layout.num_columns, dtype=torch.bool)
    is_sum[[layout.index(name) for name in SUMS]] = True
    wrong = (row != expected) & ~is_sum
    names = [layout.columns[i] for i in wrong.nonzero().flatten()]
    assert not names, (names, row[wrong], expected[wrong])
    values = tensor.double().flatten()
    values = values[values.isfinite()].tolist()
    # What is wide of FP64's range has infinite sums in both.
    magnitude = (
        math.fsum(map(abs, values)) if max(map(abs, values), default=0) < 1e300 else math.inf
    )
    if magnitude < 1e150:
        squares = [value * value for value in values]
        exact = (math.fsum(values), magnitude, math.fsum(squares))
        bytes_read = tensor.numel() * max(tensor.element_size(), 2)
        relative = 2.0**-53 * (96 + bytes_read / 2**19)
        for name, sum, scale in zip(SUMS, exact, (magnitude, *exact[1:]), strict=True):
            assert abs(row[layout.index(name)].item() - sum) <= relative * scale, name
    elif magnitude < math.inf:
        torch.testing.assert_close(row[is_sum], expected[is_sum])


def special_values(generator, numel):
    """Every exponent and sign of FP32, subnormals, NaN and infinities among them."""
    codes = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64)
    return codes.to(torch.int32).view(torch.float32)


@st.composite
def tensors(draw):
    """Any type, up to six dimensions, gaps, permutations, repeated elements, any magnitude."""
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = draw(st.lists(st.integers(0, 5), max_size=5))
    if draw(st.booleans()):
        sizes = [draw(st.integers(1, 1500))]
    steps = [draw(st.integers(1, 3)) for _ in sizes]
    whole = [size * step for size, step in zip(sizes, steps, strict=True)]
    numel = math.prod(whole)
    if draw(st.booleans()):
        values = special_values(generator, numel)
    else:
        scale = 2.0 ** draw(st.integers(-150, 120))
        values = torch.randn(numel, generator=generator) * scale
        values[torch.rand(numel, generator=generator) < 0.1] = 0.0
    if dtype == torch.float64:
        values = values.double() * 2.0 ** draw(st.integers(-900, 800))
    tensor = values.to(dtype).view(whole)
    tensor = tensor[tuple(slice(draw(st.integers(0, step - 1)), None, step) for step in steps)]
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(-1).expand(*tensor.shape, draw(st.integers(1, 3)))
    return tensor


@settings(max_examples=500)
@given(tensor=tensors(), log2_factor=st.none() | st.integers(-120, 120))
def test_any_tensor(tensor, log2_factor):
    factor = None if log2_factor is None else torch.tensor(2.0**log2_factor)
    assert_row(tensor, LAYOUT, factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_programs(dtype):
    """More elements than one program reads, and a last program that is not full."""
    generator = torch.Generator().manual_seed(3)
    tensor = torch.randn(20_003, generator=generator) * 0.1
    tensor[:3000] = special_values(generator, 3000)
    assert_row(tensor.to(dtype), RowLayout(sample_size=None))


@pytest.mark.parametrize("factor", [None, 2.0**-30])
def test_thresholds_and_their_neighbours(factor):
    edges = torch.tensor(EVERYTHING.edges, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        at = edges.to(dtype) if factor is None else (edges / factor).to(dtype)
        values = [at, *(torch.nextafter(at, torch.full_like(at, end)) for end in (0.0, math.inf))]
        tensor = torch.cat(values)
        assert_row(tensor, EVERYTHING, None if factor is None else torch.tensor(factor))


@pytest.mark.parametrize(
    ("numel", "sample_size"),
    [(1003, 4), (1003, 1000), (1003, 16_384), (16_391, 1000), (16_391, 16_384), (40_000, 16_384)],
)
def test_samples_of_exponents(numel, sample_size):
    generator = torch.Generator().manual_seed(numel)
    tensor = torch.exp2(torch.rand(numel, generator=generator) * 40 - 20).bfloat16()
    layout = RowLayout(formats=(), sample_size=sample_size)
    assert_row(tensor, layout)
    # A tensor is sampled in the order of memory.
    turned = tensor[: numel // 4 * 4].view(4, -1)
    assert_row(turned.t(), layout, in_order=turned)
    parts = torch.stack([tensor, -tensor], -1)
    assert_row(parts[:, 1], layout)


@pytest.mark.parametrize(
    "layout",
    [
        RowLayout(formats=(), histogram=False),
        RowLayout(histogram=False),
        RowLayout(formats=tuple(NumberFormat(f"f{i}", 2 + i % 7, 1 + i % 9) for i in range(20))),
    ],
    ids=["no format", "no exponents", "twenty formats"],
)
def test_layouts(layout):
    assert_row(torch.randn(5000), layout)


@pytest.mark.parametrize("strides", [(2**30, 2**15, 1), (2**29, 3, 2**28), (2**31 + 5, 2, 1)])
def test_elements_that_lie_far_apart(strides):
    """Beyond what 31 bits can count; memory that nobody looks at is not there."""
    sizes = (2, 3, 4)
    numel = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    tensor = torch.empty(numel, dtype=torch.bfloat16).as_strided(sizes, strides)
    tensor.copy_(torch.arange(24.0).view(sizes))
    assert_row(tensor, LAYOUT)


def test_no_elements_and_one():
    for shape in ((), (0,), (3, 0), (1, 1, 1, 1, 1)):
        assert_row(torch.ones(shape), LAYOUT)


def test_the_same_bits_each_time():
    tensor = torch.randn(30_000)
    first = triton_row(tensor, LAYOUT)
    assert torch.equal(first, triton_row(tensor, LAYOUT))

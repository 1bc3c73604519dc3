"""The kernels of a statistics row in Triton's interpreter; run by test_triton_statistics.py.

Triton decides when it is imported whether it interprets, so this is a process of its own.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unitscale.scales.layout import MOMENTS, RowLayout
from lightning_unitscale.scales.torch_rows import functional_row
from lightning_unitscale.scales.triton_kernels import joint_rows, partial_rows
from lightning_unitscale.scales.triton_statistics import TritonRows, triton_row

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
LIGHT = RowLayout().measured
SUMS = ("sum", "abs_sum", "square_sum")

LAUNCHES: list[str] = []
for kernel in (partial_rows, joint_rows):
    kernel.add_pre_run_hook(lambda *args, **kwargs: LAUNCHES.append("a kernel"))


def assert_row(tensor, layout, row=None):
    """The bits of the reference, and sums as near to the exact ones as the kernels say."""
    LAUNCHES.clear()
    row = triton_row(tensor, layout) if row is None else row
    assert len(LAUNCHES) <= 2
    expected = functional_row(tensor, layout)
    assert row.dtype == expected.dtype and row.shape == expected.shape
    is_sum = torch.zeros(layout.num_columns, dtype=torch.bool)
    is_sum[[layout.index(name) for name in SUMS]] = True
    wrong = (row != expected) & ~is_sum
    names = [layout.columns[i] for i in wrong.nonzero().flatten()]
    assert not names, (names, row[wrong], expected[wrong])
    # Infinite beyond the range of FP64 in both.
    finite = is_sum & (expected.abs() < 1e300)
    scale = expected.clone()
    values = tensor.double()
    scale[layout.index("sum")] = torch.where(values.isfinite(), values, 0.0).abs().sum()
    error = (row - expected).abs()
    assert (error[finite] <= 2.0**-21 * scale[finite] + 1e-300).all()


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
@given(tensor=tensors(), layout=st.sampled_from([LIGHT, MOMENTS]))
def test_row_of_any_tensor(tensor, layout):
    assert_row(tensor, layout)


@pytest.mark.parametrize("layout", [LIGHT, MOMENTS], ids=["light", "exact"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_from_several_programs(dtype, layout):
    """More elements than one program reads, and a last program that is not full."""
    generator = torch.Generator().manual_seed(3)
    tensor = torch.randn(20_003, generator=generator) * 0.1
    tensor[:3000] = special_values(generator, 3000)
    assert_row(tensor.to(dtype), layout)


@pytest.mark.parametrize("constant", [1e-25, 1e25, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_range_safe(dtype, constant):
    tensor = torch.full((9000,), constant, dtype=dtype)
    tensor[::2] *= -0.5
    for layout in (LIGHT, MOMENTS):
        assert_row(tensor, layout)


@pytest.mark.parametrize(
    ("numel", "sample_size"),
    [(1003, 1), (1003, 1000), (1003, 16_384), (16_391, 1000), (16_391, 16_384), (40_000, 16_384)],
)
def test_row_from_samples(numel, sample_size):
    generator = torch.Generator().manual_seed(numel)
    tensor = torch.exp2(torch.rand(numel, generator=generator) * 40 - 20).bfloat16()
    layout = RowLayout(formats=(), sample_size=sample_size)
    assert_row(tensor, layout)
    # A tensor is sampled in the order of memory.
    turned = tensor[: numel // 4 * 4].view(4, -1)
    assert_row(turned.t(), layout)
    parts = torch.stack([tensor, -tensor], -1)
    assert_row(parts[:, 1], layout)


@pytest.mark.parametrize("strides", [(2**30, 2**15, 1), (2**29, 3, 2**28), (2**31 + 5, 2, 1)])
def test_strides_beyond_31_bits(strides):
    """More elements than 31 bits can count; memory that is not read does not exist."""
    sizes = (2, 3, 4)
    numel = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    tensor = torch.empty(numel, dtype=torch.bfloat16).as_strided(sizes, strides)
    tensor.copy_(torch.arange(24.0).view(sizes))
    for layout in (LIGHT, MOMENTS):
        assert_row(tensor, layout)


def test_empty_and_single_element_tensors():
    for shape in ((), (0,), (3, 0), (1, 1, 1, 1, 1)):
        for layout in (LIGHT, MOMENTS):
            assert_row(torch.ones(shape), layout)


def test_expanded_tensors():
    for tensor in (torch.tensor(2.5).expand(300, 70), torch.randn(5, 1, 9).expand(5, 1000, 9)):
        for layout in (LIGHT, MOMENTS):
            assert_row(tensor, layout)


def test_rows_are_deterministic():
    tensor = torch.randn(30_000)
    first = triton_row(tensor, LIGHT)
    assert torch.equal(first, triton_row(tensor, LIGHT))


@pytest.mark.parametrize("layout", [LIGHT, MOMENTS], ids=["light", "exact"])
def test_many_rows_share_memory(layout):
    """Each has one launch, and 64 of them one more."""
    rows = TritonRows(layout, torch.device("cpu"))
    tensors = [torch.randn(37 * index % 3001) for index in range(130)]
    LAUNCHES.clear()
    assert [rows.add(tensor) for tensor in tensors] == list(range(130))
    found = rows.finish()
    assert len(LAUNCHES) <= 129 + 4  # one is empty, and is a batch of its own
    for tensor, row in zip(tensors, found, strict=True):
        assert_row(tensor, layout, row)

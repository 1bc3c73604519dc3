"""The compiled kernel reads tensors where they lie; the reference reads copies."""

import functools
import platform

import pytest
import torch

from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.scales import cpu_kernel
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.statistics import ROW_OPERATOR, ROW_SCHEMA, functional_row

LAYOUT = RowLayout(sample_size=None)
X = torch.randn(6, 40, 96) * torch.logspace(-20, 5, 96, base=2)
needs_kernel = pytest.mark.skipif(not cpu_kernel.is_available(), reason="no C compiler")
# With whether the kernel reads it where it lies.
VIEWS = {
    "whole": (X, True),
    "transposed": (X.transpose(0, 2), True),
    "part of the last dimension": (X[:, :, 32:64], True),
    "the same, transposed": (X[:, :, 32:64].permute(2, 0, 1), True),
    "part of the middle": (X[:, 3:9], True),
    "part of the first": (X[2:4], True),
    "one of the middle": (X[:, 5:6], True),
    "two gaps": (X[:, 3:9, 32:64], False),
    "steps": (X[:, :, ::2], False),
    "short rows": (X[:, :, :8], False),
    "expanded": (X[:, :1].expand(6, 40, 96), False),
    "overlapping": (X.as_strided((100, 40), (20, 1)), False),
    "one element": (X[0, 0, 0], True),
}


def kernel_row(tensor, layout, operator=ROW_OPERATOR):
    return operator(tensor, [], layout.key)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", VIEWS)
def test_a_row_of_a_view(name, dtype):
    view, where_it_lies = VIEWS[name]
    whole = X.to(dtype)
    view = whole.as_strided(view.shape, view.stride(), view.storage_offset())
    kernel_row(whole, LAYOUT)  # makes the layout known
    activities = [torch.profiler.ProfilerActivity.CPU]
    # Without it torch 2.11 warns that it keeps the events of one cycle only.
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        row = kernel_row(view, LAYOUT)
    handed_on = "lightning_unitscale::statistics_row_of_any"
    assert (handed_on in {event.name for event in profile.events()}) != where_it_lies
    expected = functional_row(view, LAYOUT)
    moments = slice(4, 7)
    torch.testing.assert_close(row[moments], expected[moments], rtol=1e-5, atol=1e-3)
    row[moments] = expected[moments] = 0
    torch.testing.assert_close(row, expected, rtol=0, atol=0)


@needs_kernel
def test_a_factor_outlives_a_row_that_is_handed_on():
    """The factor belongs to who calls: freed twice, the memory would be others' after a while."""
    kernel_row(X, LAYOUT)  # makes the layout known
    tensor, factor = X.double(), torch.tensor(8.0)
    expected = ROW_OPERATOR(tensor, [factor], LAYOUT.key)
    for _ in range(500):
        row = ROW_OPERATOR(tensor[:2], [factor], LAYOUT.key)
        torch.full((), -1.0)  # takes what was freed
    assert factor == 8.0 and row.shape == expected.shape
    torch.testing.assert_close(ROW_OPERATOR(tensor, [factor], LAYOUT.key), expected)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [None, 2.0**-9, 2.0**20])
def test_all_numbers_of_two_bytes(dtype, factor):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    # Sums in FP32 of what is beyond 2**64 are infinite in the reference.
    x = x[(x.abs().float() < 2.0**60) | ~x.isfinite()]
    scale = [] if factor is None else [torch.tensor(factor)]
    row = ROW_OPERATOR(x, scale, LAYOUT.key)
    assert_counts(row, functional_row(x, LAYOUT, factor=scale[0] if scale else None))


@needs_kernel
@pytest.mark.parametrize("numel", [1, 15, 16, 17, 2047, 2048, 2049, 3000, 65_536, 65_537, 140_000])
@pytest.mark.parametrize("sample_size", [100, 16_384])
def test_a_sample_across_blocks(numel, sample_size):
    layout = RowLayout(sample_size=sample_size)
    x = torch.randn(numel) * 2.0 ** torch.randint(-60, 60, (numel,))
    x[::7] = 0.0
    x[5::1000] = torch.nan
    x[6::1500] = -torch.inf
    row, expected = kernel_row(x, layout), functional_row(x, layout)
    moments = slice(4, 7)
    # Numbers of 2**60 next to small ones: relative to the sum of magnitudes.
    torch.testing.assert_close(row[5:7], expected[5:7], rtol=1e-5, atol=0)
    assert abs(row[4] - expected[4]) <= 1e-5 * expected[5]
    row[moments] = expected[moments] = 0
    torch.testing.assert_close(row, expected, rtol=0, atol=0)


# What the kernel becomes on processors of other kinds: vectors of 16, 32 or 64 bytes.
TARGETS = {
    "AVX512": ("-mavx512f", "-mavx512bw"),
    "AVX512 without bytes": ("-mavx512f",),
    "AVX2": ("-mavx2", "-mfma"),
    "DEFAULT": (),
}


@functools.cache
def kernel_for(target):
    """The library for a target, with operators of its own that call it."""
    library = cpu_kernel.compile_kernel(TARGETS[target])
    namespace = f"unitscale_test_{list(TARGETS).index(target)}"
    definitions = torch.library.Library(namespace, "DEF")
    definitions.define(f"statistics_row{ROW_SCHEMA}")
    assert cpu_kernel.register(library, namespace)
    return library, definitions, getattr(torch.ops, namespace)


@pytest.fixture(params=TARGETS)
def target_row(request, monkeypatch):
    """Rows by the kernel for another processor, if this one can run that."""
    order = ["AVX512", "AVX2", "DEFAULT"]
    capability = torch.backends.cpu.get_cpu_capability()
    wanted = request.param.split()[0]
    if wanted != "DEFAULT" and (
        platform.machine() not in {"x86_64", "AMD64"}
        or capability not in order
        or order.index(capability) > order.index(wanted)
    ):
        pytest.skip(f"a processor of capability {capability}")
    library, _, operators = kernel_for(request.param)

    def row_of(tensor, layout):
        assert layout.key in known or cpu_kernel.add_layout(library, layout)
        known.add(layout.key)
        return operators.statistics_row.default(tensor, [], layout.key)

    known = set()
    # The library is to be tested, and nothing else.
    monkeypatch.setattr(cpu_kernel, "add_new_layout", None)
    return row_of


def assert_counts(row, expected):
    """Sums may be off in their last digits, in proportion to the magnitudes; nothing else may."""
    torch.testing.assert_close(row[5:7], expected[5:7], rtol=1e-5, atol=0)
    assert abs(row[4] - expected[4]) <= 1e-5 * expected[5]
    torch.testing.assert_close(row[:4], expected[:4], rtol=0, atol=0)
    torch.testing.assert_close(row[7:], expected[7:], rtol=0, atol=0)


def special_values(numel):
    """All magnitudes and the cuts, with subnormals, zeros, NaN and infinities among them."""
    generator = torch.Generator().manual_seed(numel)
    codes = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64)
    values = codes.to(torch.int32).view(torch.float32)
    cuts = torch.tensor(LAYOUT.fp32_cuts)
    boundary = torch.cat([cuts, torch.nextafter(cuts, torch.tensor(0.0)), -cuts])
    values[3::7] = boundary[torch.arange(len(values[3::7])) % len(boundary)]
    values[5::11] = 2.0 ** -torch.arange(149, 120, -1)[torch.arange(len(values[5::11])) % 29]
    values[9::13] = 0.0
    return values


@needs_kernel
@pytest.mark.parametrize("numel", [1, 3, 31, 512, 2047, 20_000, 70_001])
def test_kinds_of_processors(target_row, numel):
    calm = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    # FP32 sums of what is beyond 2**64 are infinite in the reference as well: keep to what is not.
    wild = special_values(numel)
    wild = torch.where(wild.abs() < 2.0**60, wild, torch.where(wild.isfinite(), calm, wild))
    cases = [calm, calm * 1e-6, calm.relu(), torch.zeros(numel), wild, wild[: numel // 2 + 1]]
    for sample_size in (None, 1000):
        layout = RowLayout(sample_size=sample_size)
        for x in (*cases, calm * 2.0**-130, calm[: numel // 2 + 1].repeat(2).view(2, -1)[:, :16]):
            assert_counts(target_row(x, layout), functional_row(x, layout))


@needs_kernel
def test_more_cuts_than_one_loop_takes(target_row):
    formats = [NumberFormat(f"E{e}M{m}", e, m) for e in (3, 4, 5) for m in (1, 2, 3, 4)]
    layout = RowLayout(tuple(formats), sample_size=None)
    x = torch.randn(5000) * 2.0 ** torch.randint(-20, 12, (5000,))
    assert_counts(target_row(x, layout), functional_row(x, layout))


@needs_kernel
def test_parts_and_tensors_of_several_chunks(target_row):
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(2, 300, 3, 128, generator=generator)
    parts = whole.unbind(2)
    scaled = [torch.randn(n, generator=generator) * 2.0**-e for n, e in ((70_001, 9), (1, 0))]
    tensors = [*parts, *scaled, whole.mT, special_values(3000).clamp(-1e9, 1e9)]
    layout = RowLayout(sample_size=1000)
    for tensor in tensors:
        # A dense tensor is sampled in the order of memory.
        in_order = whole if tensor.data_ptr() == whole.data_ptr() and tensor.dim() == 4 else tensor
        assert_counts(target_row(tensor, layout), functional_row(in_order, layout))


@needs_kernel
@pytest.mark.parametrize("length", [16, 32, 48, 96, 384, 1000, 2016, 2048, 2080, 66_000])
def test_rows_with_gaps(target_row, length):
    """Looked at where they lie or copied; what is in the gaps does not count."""
    generator = torch.Generator().manual_seed(length)
    rows = max(2, 140_000 // length)
    calm = torch.randn(rows, length, generator=generator)
    wild = special_values(calm.numel()).clamp(-1e9, 1e9).view_as(calm)
    # Blocks with zeros, with what FP32 cannot add up, and with neither, in turn.
    mixed = torch.where(torch.arange(rows)[:, None] % 40 == 0, wild, calm)
    for sample_size in (None, 1000, 16_384):
        layout = RowLayout(sample_size=sample_size)
        for values in (calm, calm * 2.0**-128, wild, mixed):
            around = torch.full((rows, length + 160), torch.nan)
            part = around[:, 96 : 96 + length]
            part.copy_(values)
            assert not part.is_contiguous()
            assert_counts(target_row(part, layout), functional_row(part, layout))


@needs_kernel
def test_rows_far_apart(target_row):
    far = torch.empty(2**24 + 128)
    rows = far.as_strided((2, 64), (2**24 + 64, 1))
    rows.copy_(torch.randn(2, 64))
    assert_counts(target_row(rows, LAYOUT), functional_row(rows, LAYOUT))


@needs_kernel
def test_exponents_of_all_kinds(target_row):
    """More different exponents than are looked for one by one, with zeros and no zeros."""
    for first, last in ((-149, 127), (-126, 127), (-100, -20), (0, 0)):
        powers = torch.arange(first, last + 1, dtype=torch.float64)
        x = (1.5 * 2.0 ** powers.repeat(9000 // len(powers) + 1)).float()
        for tensor in (x, torch.where(torch.arange(len(x)) % 3 == 0, 0.0, x)):
            for sample_size in (None, 700):
                layout = RowLayout(sample_size=sample_size)
                row, expected = target_row(tensor, layout), functional_row(tensor, layout)
                torch.testing.assert_close(row[7:], expected[7:], rtol=0, atol=0)
                torch.testing.assert_close(row[:4], expected[:4], rtol=0, atol=0)


@needs_kernel
def test_blocks_unlike_the_one_before(target_row):
    """What the last block had open is no matter of the next one's counts."""
    generator = torch.Generator().manual_seed(4)
    scales = 2.0 ** torch.randint(-40, 20, (60, 1), generator=generator)
    x = (torch.randn(60, 700, generator=generator) * scales).flatten()
    x[10_000:14_000] = 0.0
    x[20_000], x[20_001], x[30_000] = torch.nan, torch.inf, 2.0**-25
    layout = RowLayout(sample_size=None)
    assert_counts(target_row(x, layout), functional_row(x, layout))


@needs_kernel
@pytest.mark.parametrize("sample_size", [70_000, 45_000, 20_000, 3_000, 60, 7])
def test_samples_of_all_strides(target_row, sample_size):
    """Within a block and beyond it; with exponents that most, few and none of the elements have."""
    generator = torch.Generator().manual_seed(sample_size)
    x = torch.randn(140_001, generator=generator)
    rare = x.clone()
    rare[torch.randperm(len(x), generator=generator)[:300]] *= 2.0**-60
    alone = torch.zeros_like(x)
    alone[:: len(x) // 40] = torch.inf
    alone[1 :: len(x) // 50] = 2.0**-140
    layout = RowLayout(sample_size=sample_size)
    for tensor in (x, rare, alone, torch.where(x > 2.0, torch.nan, rare), x[1:], x.relu()):
        assert_counts(target_row(tensor, layout), functional_row(tensor, layout))


@needs_kernel
def test_as_many_cuts_as_there_may_be(target_row):
    """Blocks that lie on both sides of none, some and more cuts than one loop counts, in turn."""
    formats = [NumberFormat(f"E{e}M{m}", e, m) for e in (2, 3, 4, 5) for m in (1, 2, 3, 4)]
    layout = RowLayout(tuple(formats), sample_size=None)
    assert len(set(layout.fp32_cuts)) > 32 and len(layout.fp32_cuts) == cpu_kernel.MAX_CUTS
    generator = torch.Generator().manual_seed(6)
    cuts = torch.tensor(layout.fp32_cuts)
    values = torch.cat([cuts, torch.nextafter(cuts, torch.tensor(0.0)), torch.zeros(3)])
    number = torch.randint(1, len(values), (40,), generator=generator)
    chosen = [torch.randint(int(n), (700,), generator=generator) for n in number]
    x = values[torch.cat(chosen)]
    for tensor in (x, -x, torch.where(x == 0, torch.inf, x), torch.where(x == 0, torch.nan, x)):
        assert_counts(target_row(tensor, layout), functional_row(tensor, layout))

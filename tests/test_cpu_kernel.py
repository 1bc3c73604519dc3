"""The compiled kernel reads tensors where they lie; the reference reads copies."""

import pytest
import torch

from lightning_unitscale import cpu_kernel
from lightning_unitscale.cpu_kernel import kernel_row, rows_in_memory
from lightning_unitscale.row_layout import RowLayout
from lightning_unitscale.statistics import functional_row

LAYOUT = RowLayout(sample_size=None)
X = torch.randn(6, 40, 96) * torch.logspace(-20, 5, 96, base=2)
needs_kernel = pytest.mark.skipif(not cpu_kernel.is_available(), reason="no C compiler")
VIEWS = {
    "whole": (X, (23040, 23040)),
    "transposed": (X.transpose(0, 2), (23040, 23040)),
    "part of the last dimension": (X[:, :, 32:64], (32, 96)),
    "the same, transposed": (X[:, :, 32:64].permute(2, 0, 1), (32, 96)),
    "part of the middle": (X[:, 3:9], (576, 3840)),
    "part of the first": (X[2:4], (7680, 7680)),
    "one of the middle": (X[:, 5:6], (96, 3840)),
    "two gaps": (X[:, 3:9, 32:64], None),
    "steps": (X[:, :, ::2], None),
    "short rows": (X[:, :, :8], None),
    "expanded": (X[:, :1].expand(6, 40, 96), None),
    "overlapping": (X.as_strided((100, 40), (20, 1)), None),
    "one element": (X[0, 0, 0], (1, 1)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_how_elements_lie(name):
    view, expected = VIEWS[name]
    assert rows_in_memory(view) == expected


@needs_kernel
@pytest.mark.parametrize("name", VIEWS)
def test_a_row_of_a_view(name):
    view, _ = VIEWS[name]
    row, expected = kernel_row(view, LAYOUT, LAYOUT.fp32_cuts), functional_row(view, LAYOUT)
    moments = slice(4, 7)
    torch.testing.assert_close(row[moments], expected[moments], rtol=1e-5, atol=1e-3)
    row[moments] = expected[moments] = 0
    torch.testing.assert_close(row, expected, rtol=0, atol=0)


@needs_kernel
@pytest.mark.parametrize("numel", [1, 15, 16, 17, 2047, 2048, 2049, 3000, 65_536, 65_537, 140_000])
@pytest.mark.parametrize("sample_size", [100, 16_384])
def test_a_sample_across_blocks(numel, sample_size):
    layout = RowLayout(sample_size=sample_size)
    x = torch.randn(numel) * 2.0 ** torch.randint(-60, 60, (numel,))
    x[::7] = 0.0
    x[5::1000] = torch.nan
    x[6::1500] = -torch.inf
    row, expected = kernel_row(x, layout, layout.fp32_cuts), functional_row(x, layout)
    moments = slice(4, 7)
    # Numbers of 2**60 next to small ones: relative to the sum of magnitudes.
    torch.testing.assert_close(row[5:7], expected[5:7], rtol=1e-5, atol=0)
    assert abs(row[4] - expected[4]) <= 1e-5 * expected[5]
    row[moments] = expected[moments] = 0
    torch.testing.assert_close(row, expected, rtol=0, atol=0)

"""Workspaces of kernels, against the allocator's events of single operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_unitscale.memory.costs import workspace_bytes
from tests.memory.oracles import bytes_allocated

aten = torch.ops.aten
# The formulas are those of kernels for vectors of 512 bits.
needs_avx512 = pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="oneDNN blocks otherwise"
)


def _allocated(function: Callable[[], object]) -> int:
    """The most bytes alive during a call beyond its results."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profiled:
            result = function()
    finally:
        torch.set_num_threads(threads)
    peak, alive = bytes_allocated(profiled)
    del result
    return peak - alive


def _predicted(operator: object, arguments: tuple[object, ...], result: object) -> int:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return workspace_bytes(operator, arguments, result, "cpu")
    finally:
        torch.set_num_threads(threads)


@needs_avx512
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "size", "batch", "groups"),
    [
        ((128, 256), 1, 1, 12, 16, 1),
        ((128, 256), 1, 2, 12, 16, 1),
        ((128, 256), 3, 2, 12, 16, 1),
        ((64, 64), 3, 2, 24, 16, 1),
        ((64, 64), 2, 2, 24, 4, 1),
        ((64, 64), 3, 2, 24, 4, 64),
        ((64, 256), 1, 2, 56, 2, 1),
        ((128, 256), 1, 3, 12, 16, 1),
        ((256, 512), 1, 2, 6, 16, 1),
    ],
)
def test_convolutions(
    channels: tuple[int, int], kernel: int, stride: int, size: int, batch: int, groups: int
) -> None:
    x = torch.randn(batch, channels[0], size, size)
    weight = torch.randn(channels[1], channels[0] // groups, kernel, kernel)
    padding = kernel // 2 if kernel % 2 else 0
    options = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    forward = (x, weight, None, *options)
    y = aten.convolution(*forward)
    seen = _allocated(lambda: aten.convolution(*forward))
    assert _predicted(aten.convolution.default, forward, y) == seen

    backward = (torch.randn_like(y), x, weight, None, *options, [True, True, False])
    results: tuple[Tensor, ...] = aten.convolution_backward(*backward)
    seen = _allocated(lambda: aten.convolution_backward(*backward))
    predicted = _predicted(aten.convolution_backward.default, backward, results)
    assert predicted == pytest.approx(seen, rel=0.01)


@needs_avx512
@pytest.mark.parametrize(("taps", "size"), [(7, 8), (5, 14), (7, 14)])
def test_one_filter_per_channel_on_channels_last_images(taps: int, size: int) -> None:
    given = torch.randn(4, 32, size, size).to(memory_format=torch.channels_last)
    weight = torch.randn(32, 1, taps, taps)
    grad = torch.randn_like(given)
    padding = [taps // 2] * 2
    rest = ([32], [1, 1], padding, [1, 1], False, [0, 0], 32, [True, True, True])
    arguments = (grad, given, weight, *rest)
    result = aten.convolution_backward(*arguments)
    measured = _allocated(lambda: aten.convolution_backward(*arguments))
    expected = _predicted(aten.convolution_backward, arguments, result)
    assert measured == pytest.approx(expected, abs=1024)


def test_drawing_a_mask_takes_nothing_beside_it() -> None:
    arguments = (torch.empty(1000), 0.5)
    result = aten.bernoulli.p(*arguments)
    assert _allocated(lambda: aten.bernoulli.p(*arguments)) == 0
    assert _predicted(aten.bernoulli.p, arguments, result) == 0


def test_dropout() -> None:
    x = torch.randn(100, 100)
    forward = (x, 0.1, True)
    y, mask = aten.native_dropout(*forward)
    seen = _allocated(lambda: aten.native_dropout(*forward))
    assert _predicted(aten.native_dropout.default, forward, (y, mask)) == seen
    backward = (torch.randn(100, 100), mask, 1.1)
    result = aten.native_dropout_backward(*backward)
    seen = _allocated(lambda: aten.native_dropout_backward(*backward))
    assert _predicted(aten.native_dropout_backward.default, backward, result) == seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_matmuls_take_tiles_only_where_onednn_runs_them(dtype: torch.dtype) -> None:
    arguments = (torch.ones(64, 48, dtype=dtype), torch.ones(48, 80, dtype=dtype))
    result = aten.mm(*arguments)
    measured = _allocated(lambda: aten.mm(*arguments))
    assert (_predicted(aten.mm.default, arguments, result) > 0) == (measured > 0)

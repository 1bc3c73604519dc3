"""Workspaces of kernels, against the allocator's events of single operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_unitscale.capture.fake_device import SimulatedDevice, run_operator
from tests.memory.oracles import allocated_beside_results, predicted_workspace

aten = torch.ops.aten
# The formulas are those of kernels for vectors of 512 bits.
needs_avx512 = pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="oneDNN blocks otherwise"
)


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
def test_convolution_workspace_matches_allocator(
    channels: tuple[int, int], kernel: int, stride: int, size: int, batch: int, groups: int
) -> None:
    x = torch.randn(batch, channels[0], size, size)
    weight = torch.randn(channels[1], channels[0] // groups, kernel, kernel)
    padding = kernel // 2 if kernel % 2 else 0
    options = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    forward = (x, weight, None, *options)
    y = aten.convolution(*forward)
    seen = allocated_beside_results(lambda: aten.convolution(*forward))
    assert predicted_workspace(aten.convolution.default, forward, y) == seen

    backward = (torch.randn_like(y), x, weight, None, *options, [True, True, False])
    results: tuple[Tensor, ...] = aten.convolution_backward(*backward)
    seen = allocated_beside_results(lambda: aten.convolution_backward(*backward))
    predicted = predicted_workspace(aten.convolution_backward.default, backward, results)
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
    measured = allocated_beside_results(lambda: aten.convolution_backward(*arguments))
    expected = predicted_workspace(aten.convolution_backward, arguments, result)
    assert measured == pytest.approx(expected, abs=1024)


def test_bernoulli_needs_no_workspace() -> None:
    arguments = (torch.empty(1000), 0.5)
    result = aten.bernoulli.p(*arguments)
    assert allocated_beside_results(lambda: aten.bernoulli.p(*arguments)) == 0
    assert predicted_workspace(aten.bernoulli.p, arguments, result) == 0


def test_dropout_workspace_matches_allocator() -> None:
    x = torch.randn(100, 100)
    forward = (x, 0.1, True)
    y, mask = aten.native_dropout(*forward)
    seen = allocated_beside_results(lambda: aten.native_dropout(*forward))
    assert predicted_workspace(aten.native_dropout.default, forward, (y, mask)) == seen
    backward = (torch.randn(100, 100), mask, 1.1)
    result = aten.native_dropout_backward(*backward)
    seen = allocated_beside_results(lambda: aten.native_dropout_backward(*backward))
    assert predicted_workspace(aten.native_dropout_backward.default, backward, result) == seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_matmul_workspace_only_under_onednn(dtype: torch.dtype) -> None:
    arguments = (torch.ones(64, 48, dtype=dtype), torch.ones(48, 80, dtype=dtype))
    result = aten.mm(*arguments)
    measured = allocated_beside_results(lambda: aten.mm(*arguments))
    assert (predicted_workspace(aten.mm.default, arguments, result) > 0) == (measured > 0)


@pytest.mark.parametrize(
    "name", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss", "huber_loss"]
)
def test_losses_allocate_all_elements_before_reduction(name: str) -> None:
    given, target = torch.rand(50, 20), torch.rand(50, 20)
    operator = getattr(aten, name).default
    result = operator(given, target)
    with SimulatedDevice(torch.device("cpu")) as mode:
        fakes = (mode.from_tensor(given), mode.from_tensor(target))
        fake = run_operator(operator, fakes, {})
        weight = (None,) if name == "binary_cross_entropy" else ()
        whole = run_operator(operator, (*fakes, *weight, 0), {})
    assert fake.shape == () and whole.shape == given.shape
    assert fake.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    if name in ("mse_loss", "smooth_l1_loss"):
        measured = allocated_beside_results(lambda: operator(given, target))
        assert predicted_workspace(operator, (given, target), result) == 4000
        assert measured == pytest.approx(4000, abs=16)  # with some numbers

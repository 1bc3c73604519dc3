"""Workspaces of convolutions on this CPU, against the allocator's events."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_unitscale.memory.cpu_workspace import runs_in_onednn
from tests.memory.oracles import allocated_beside_results, predicted_workspace

aten = torch.ops.aten
needs_avx2 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX2", reason="other kernels run"
)
_SHAPES: dict[str, dict[str, Any]] = {
    "patches": {"channels": (3, 192), "size": (64, 64), "taps": 16, "stride": 16},
    "small patches": {"channels": (3, 96), "size": (32, 32), "taps": 4, "stride": 4},
    "stem": {"channels": (3, 64), "size": (32, 32), "taps": 7, "stride": 2, "padding": 3},
    "uneven stem": {"channels": (3, 64), "size": (31, 31), "taps": 5, "stride": 3, "padding": 2},
    "one channel": {"channels": (1, 32), "size": (28, 28), "taps": 3, "padding": 1},
    "odd channels": {"channels": (5, 7), "size": (14, 14), "taps": 3, "padding": 1},
    "one tap": {"channels": (64, 128), "size": (14, 14), "taps": 1},
    "one strided tap": {"channels": (64, 128), "size": (14, 14), "taps": 1, "stride": 2},
    "groups": {"channels": (64, 64), "size": (14, 14), "taps": 3, "padding": 1, "groups": 4},
    "odd groups": {"channels": (24, 24), "size": (14, 14), "taps": 3, "padding": 1, "groups": 4},
    "depthwise": {"channels": (32, 32), "size": (14, 14), "taps": 3, "padding": 1, "groups": 32},
    "wide depthwise": {
        "channels": (32, 32), "size": (14, 14), "taps": 7, "padding": 3, "groups": 32,
    },
    "dilated": {"channels": (32, 32), "size": (28, 28), "taps": 3, "padding": 2, "dilation": 2},
    "far": {"channels": (32, 32), "size": (28, 28), "taps": 3, "padding": 4, "dilation": 4},
    "sequence": {"channels": (16, 32), "size": (100,), "taps": 3, "padding": 1},
    "waves": {"channels": (1, 64), "size": (1000,), "taps": 10, "stride": 5},
    "positions": {"channels": (32, 32), "size": (49,), "taps": 32, "padding": 16, "groups": 4},
    "volume": {"channels": (16, 32), "size": (8, 8, 8), "taps": 3, "padding": 1},
    "transposed": {"channels": (64, 32), "size": (14, 14), "taps": 2, "stride": 2, "turned": True},
    "transposed, dense": {
        "channels": (64, 32), "size": (14, 14), "taps": 3, "padding": 1, "turned": True,
    },
    "transposed sequence": {
        "channels": (16, 16), "size": (1000,), "taps": 2, "stride": 3, "turned": True,
    },
    "uneven strided tap": {"channels": (24, 16), "size": (28, 28), "taps": 1, "stride": 3},
    "strided tap of few": {"channels": (3, 32), "size": (28, 28), "taps": 1, "stride": 2},
}  # fmt: skip


def _arguments(
    channels: tuple[int, int],
    size: tuple[int, ...],
    taps: int,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    turned: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:
    inputs, outputs = channels
    filters = (inputs, outputs // groups) if turned else (outputs, inputs // groups)
    weight = torch.randn(*filters, *[taps] * len(size), dtype=dtype)
    images = torch.randn(4, inputs, *size, dtype=dtype)
    lists = ([number] * len(size) for number in (stride, padding, dilation))
    bias = torch.randn(outputs, dtype=dtype)
    return (images, weight, bias, *lists, turned, [0] * len(size), groups)


# Kernels for these shapes are estimated by others.
_ESTIMATED = ("odd groups", "far", "positions")
_PAGES = 4 * 4096  # of masks and addresses


def _check(arguments: tuple[Any, ...], tolerance: float) -> None:
    """Compare forward and backward, to a share of the images and the result, and some pages."""
    images, weight, bias, *options = arguments
    forward = aten.convolution.default
    result = forward(*arguments)
    size = 4 * (images.numel() + result.numel())
    measured = allocated_beside_results(lambda: forward(*arguments))
    predicted = predicted_workspace(forward, arguments, result)
    assert predicted == pytest.approx(measured, abs=tolerance * size + _PAGES)
    backward = aten.convolution_backward.default
    for mask in ([True, True, True], [False, True, False]):
        given = (torch.randn_like(result), images, weight, [len(bias)], *options, mask)
        gradients: tuple[Tensor, ...] = backward(*given)
        measured = allocated_beside_results(lambda given=given: backward(*given))
        predicted = predicted_workspace(backward, given, gradients)
        assert predicted == pytest.approx(measured, abs=tolerance * size + _PAGES), mask


@needs_avx2
@pytest.mark.parametrize("name", _SHAPES)
def test_workspace_of_onednn_kernels(name: str) -> None:
    _check(_arguments(**_SHAPES[name]), 0.15 if name in _ESTIMATED else 0.002)


_LAST = {
    "wide depthwise of few": {
        "channels": (384, 384),
        "size": (4, 4),
        "taps": 7,
        "padding": 3,
        "groups": 384,
    },
    **{
        name: _SHAPES[name]
        for name in ("patches", "stem", "wide depthwise", "depthwise", "one tap", "groups")
    },
}


@needs_avx2
@pytest.mark.parametrize("name", _LAST)
@pytest.mark.parametrize("which", ["images", "filters", "both"])
def test_workspace_of_channels_last_convolutions(name: str, which: str) -> None:
    images, weight, *rest = _arguments(**_LAST[name])
    if which != "filters":
        images = images.to(memory_format=torch.channels_last)
    if which != "images":
        weight = weight.to(memory_format=torch.channels_last)
    _check((images, weight, *rest), 0.002)


@pytest.mark.skipif(runs_in_onednn(torch.bfloat16), reason="oneDNN runs them")
@pytest.mark.parametrize("name", ["patches", "one tap", "groups", "dilated", "sequence", "volume"])
def test_workspace_of_native_kernels(name: str) -> None:
    _check(_arguments(**_SHAPES[name], dtype=torch.bfloat16), 0.002)


def test_pointwise_convolution_needs_no_workspace() -> None:
    _check(_arguments((64, 128), (14, 14), 1), 0)


@pytest.mark.parametrize("name", ["patches", "sequence", "volume", "groups", "transposed"])
def test_scalar_convolution_options_match_full_ones(name: str) -> None:
    """``padding="valid"`` leaves one number for all dimensions, and anybody may pass it."""
    images, weight, bias, stride, padding, dilation, *rest = _arguments(**_SHAPES[name])
    turned, output_padding, groups = rest
    full = (stride, padding, dilation, turned, output_padding, groups)
    short = (stride[:1], padding[:1], dilation[:1], turned, output_padding[:1], groups)
    operators = aten.convolution.default, aten.convolution_backward.default
    found = []
    for options in (full, short):
        forward = (images, weight, bias, *options)
        result = operators[0](*forward)
        backward = (result, images, weight, [len(bias)], *options, [True, True, True])
        gradients = operators[1](*backward)
        found.append(
            (
                predicted_workspace(operators[0], forward, result),
                predicted_workspace(operators[1], backward, gradients),
            )
        )
    assert found[0] == found[1]

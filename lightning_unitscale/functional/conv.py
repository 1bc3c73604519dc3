"""Define scale rules and unit-scaled forms of convolutions and pools.

Borders count as the inside: padding makes both the output and the gradient of the input a little
smaller than the factors assume.

Each window of an average pool sums k inputs over k. The energy of its gradient is spread over them.
The largest of k normal numbers has a mean square found by quadrature, and takes the whole gradient.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of scaling factors, conv1d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from lightning_unitscale.functional.call import scaled_op
from lightning_unitscale.functional.moments import elementwise_moments, largest_of_normals
from lightning_unitscale.functional.rules import (
    Factors,
    Kind,
    product,
    shape_of,
    tuple_of,
    unit_factors,
)

__all__ = [
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
    "adaptive_max_pool2d", "adaptive_max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "lp_pool1d", "lp_pool2d", "lp_pool3d", "max_pool1d", "max_pool2d", "max_pool3d",
]  # fmt: skip


def _convolution(arguments: Mapping[str, Any]) -> Factors:
    input, weight = shape_of(arguments["input"]), shape_of(arguments["weight"])
    fan_out, channels, kernel = weight[0], weight[1], weight[2:]
    dims = len(kernel)
    stride = tuple_of(arguments.get("stride"), dims, 1)
    groups = arguments.get("groups", 1)
    mult = arguments.get("mult", 1.0)
    positions = product(convolved_size(input[-dims:], kernel, arguments))
    positions *= product(input[: -dims - 1])
    fan_in = channels * product(kernel)
    return unit_factors(
        mult**2 * fan_in,
        input=mult**2 * fan_out * product(kernel) / (product(stride) * groups),
        weight=mult**2 * positions,
        bias=positions,
    )


def _transposed(arguments: Mapping[str, Any]) -> Factors:
    input, weight = shape_of(arguments["input"]), shape_of(arguments["weight"])
    fan_in, channels, kernel = weight[0], weight[1], weight[2:]
    dims = len(kernel)
    stride = tuple_of(arguments.get("stride"), dims, 1)
    padding = tuple_of(arguments.get("padding"), dims, 0)
    output_padding = tuple_of(arguments.get("output_padding"), dims, 0)
    dilation = tuple_of(arguments.get("dilation"), dims, 1)
    groups = arguments.get("groups", 1)
    mult = arguments.get("mult", 1.0)
    batch = product(input[: -dims - 1])
    out = product(
        [
            (n - 1) * s - 2 * p + d * (k - 1) + extra + 1
            for n, s, p, d, k, extra in zip(
                input[-dims:], stride, padding, dilation, kernel, output_padding, strict=True
            )
        ]
    )
    return unit_factors(
        mult**2 * fan_in * product(kernel) / (product(stride) * groups),
        input=mult**2 * channels * product(kernel),
        weight=mult**2 * batch * product(input[-dims:]),
        bias=batch * out,
    )


def convolved_size(
    size: tuple[int, ...], kernel: tuple[int, ...], arguments: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the spatial size of the output of a convolution or of a pool."""
    dims = len(kernel)
    stride = tuple_of(arguments.get("stride"), dims, 1)
    padding = arguments.get("padding")
    if padding == "same":  # torch allows it for a stride of 1 only
        return size
    padding = (0,) * dims if padding == "valid" else tuple_of(padding, dims, 0)
    dilation = tuple_of(arguments.get("dilation"), dims, 1)
    sizes = []
    for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True):
        room = n + 2 * p - d * (k - 1) - 1
        steps = room // s
        # A last window that starts in the padding on the right is dropped.
        if arguments.get("ceil_mode") and room % s and (steps + 1) * s < n + p:
            steps += 1
        sizes.append(steps + 1)
    return tuple(sizes)


_convolved = partial(
    scaled_op,
    factors=_convolution,
    kind="linear",
    reference="Unit Scaling (arXiv 2303.11257), table of ops, conv1d; fan_in = in_channels / "
    "groups * prod(kernel), and out_channels * prod(kernel) / (stride * groups) terms in the "
    "gradient of the input",
    parameters="input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1",
    weights="weight bias",
    operands="input weight",
)
conv1d = _convolved(F.conv1d)
conv2d = _convolved(F.conv2d)
conv3d = _convolved(F.conv3d)

_convolved_back = partial(
    scaled_op,
    factors=_transposed,
    kind="linear",
    reference="the rule of conv1d with the output and the gradient of the input exchanged",
    parameters="input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, "
    "dilation=1",
    weights="weight bias",
    operands="input weight",
)
conv_transpose1d = _convolved_back(F.conv_transpose1d)
conv_transpose2d = _convolved_back(F.conv_transpose2d)
conv_transpose3d = _convolved_back(F.conv_transpose3d)


Windows = tuple[float, float]


def _sliding(arguments: Mapping[str, Any], dims: int) -> Windows:
    """Count the inputs per window, and the windows per input."""
    size = shape_of(arguments["input"])[-dims:]
    kernel = tuple_of(arguments["kernel_size"], dims, 1)
    # None, and torch's empty list for it, mean the kernel's size.
    stride = tuple_of(arguments.get("stride") or kernel, dims, 1)
    windows = product(convolved_size(size, kernel, {**arguments, "stride": stride}))
    return product(kernel), windows / max(product(size), 1)


def _adaptive(arguments: Mapping[str, Any], dims: int) -> Windows:
    size = shape_of(arguments["input"])[-dims:]
    wanted = arguments["output_size"]
    if wanted is None or isinstance(wanted, int):
        wanted = (wanted,) * dims
    outputs = product([n if m is None else m for n, m in zip(size, wanted, strict=True)])
    share = outputs / max(product(size), 1)
    return (1 / share if share else 1.0), share


def _average(inputs: float, windows: float, arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    divisor = arguments.get("divisor_override") or inputs
    square = mult**2 * inputs / divisor**2
    return unit_factors(square, input=square * windows)


def _maximum(inputs: float, windows: float, arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    largest = largest_of_normals(max(round(inputs), 1))
    return unit_factors(mult**2 * largest, input=mult**2 * windows)


def _power(inputs: float, windows: float, arguments: Mapping[str, Any]) -> Factors:
    mult, p = arguments.get("mult", 1.0), float(arguments["norm_type"])
    if p == 1:  # torch sums without absolute values
        output, gradient = inputs, inputs
    else:
        moment, _ = elementwise_moments(_absolute_power, 1.0, (("exponent", p / 2),))
        _, slope = elementwise_moments(_absolute_power, 1.0, (("exponent", p),))
        norm = (inputs * moment) ** (1 / p)
        output, gradient = norm**2, inputs * slope / p**2 * norm ** (2 - 2 * p)
    return unit_factors(mult**2 * output, input=mult**2 * windows * gradient)


def _absolute_power(input: torch.Tensor, exponent: float) -> torch.Tensor:
    return input.abs().pow(exponent)


class _Reduction(NamedTuple):
    """Reduction of the inputs in one window of a pool."""

    kind: Kind
    factors: Callable[[float, float, Mapping[str, Any]], Factors]
    reference: str


_AVERAGE = _Reduction("linear", _average, "a mean of k independent numbers has variance 1 / k")
_MAXIMUM = _Reduction(
    "activation", _maximum, "second moment of the largest of k normal numbers, by quadrature"
)
_POWER = _Reduction(
    "activation", _power, "k^(1/p) times the p-th absolute moment: the mean field of a norm"
)


def _pool(
    function: Callable[..., Any],
    windows: Callable[[Mapping[str, Any], int], Windows],
    reduction: _Reduction,
    parameters: str | None = None,
) -> Callable[..., Any]:
    dims = int(function.__name__[-2])  # of avg_pool2d 2

    def factors(arguments: Mapping[str, Any]) -> Factors:
        return reduction.factors(*windows(arguments, dims), arguments)

    return scaled_op(function, factors, reduction.kind, reduction.reference, parameters)


_AVG = "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True"
_MAX = (
    "input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False"
)
_ADAPTIVE_MAX = "input, output_size, return_indices=False"
avg_pool1d = _pool(F.avg_pool1d, _sliding, _AVERAGE, _AVG)
avg_pool2d = _pool(F.avg_pool2d, _sliding, _AVERAGE, f"{_AVG}, divisor_override=None")
avg_pool3d = _pool(F.avg_pool3d, _sliding, _AVERAGE, f"{_AVG}, divisor_override=None")
max_pool1d = _pool(F.max_pool1d, _sliding, _MAXIMUM, _MAX)
max_pool2d = _pool(F.max_pool2d, _sliding, _MAXIMUM, _MAX)
max_pool3d = _pool(F.max_pool3d, _sliding, _MAXIMUM, _MAX)
lp_pool1d = _pool(F.lp_pool1d, _sliding, _POWER)
lp_pool2d = _pool(F.lp_pool2d, _sliding, _POWER)
lp_pool3d = _pool(F.lp_pool3d, _sliding, _POWER)
adaptive_avg_pool1d = _pool(F.adaptive_avg_pool1d, _adaptive, _AVERAGE, "input, output_size")
adaptive_avg_pool2d = _pool(F.adaptive_avg_pool2d, _adaptive, _AVERAGE)
adaptive_avg_pool3d = _pool(F.adaptive_avg_pool3d, _adaptive, _AVERAGE)
adaptive_max_pool1d = _pool(F.adaptive_max_pool1d, _adaptive, _MAXIMUM, _ADAPTIVE_MAX)
adaptive_max_pool2d = _pool(F.adaptive_max_pool2d, _adaptive, _MAXIMUM, _ADAPTIVE_MAX)
adaptive_max_pool3d = _pool(F.adaptive_max_pool3d, _adaptive, _MAXIMUM, _ADAPTIVE_MAX)

"""Scale rules of convolutions and transposed convolutions in one, two and three dimensions.

The borders are taken as the inside: padding makes both the output and the gradient of the input a
little smaller than the factors assume.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of scaling factors, conv1d.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_unitscale.functional.rule import Factors, ScaleRule, register_rule, unit_factor
from lightning_unitscale.functional.sizes import product, shape_of, tuple_of


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
    return Factors(
        unit_factor(mult**2 * fan_in),
        {
            "input": unit_factor(mult**2 * fan_out * product(kernel) / (product(stride) * groups)),
            "weight": unit_factor(mult**2 * positions),
            "bias": unit_factor(positions),
        },
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
    return Factors(
        unit_factor(mult**2 * fan_in * product(kernel) / (product(stride) * groups)),
        {
            "input": unit_factor(mult**2 * channels * product(kernel)),
            "weight": unit_factor(mult**2 * batch * product(input[-dims:])),
            "bias": unit_factor(batch * out),
        },
    )


def convolved_size(
    size: tuple[int, ...], kernel: tuple[int, ...], arguments: Mapping[str, Any]
) -> tuple[int, ...]:
    """Spatial size of the output of a convolution or of a pool.

    Args:
        size: Spatial size of the input.
        kernel: Of the kernel, one number per dimension.
        arguments: ``stride``, ``padding`` (also ``"same"``, ``"valid"``), ``dilation`` and
            ``ceil_mode``, each where it is given.
    """
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


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (
    "input",
    "weight",
    "bias",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)
CONVOLUTIONS = tuple(
    register_rule(
        ScaleRule(
            f"conv{dims}d",
            _CONVOLUTION,
            _convolution,
            "linear",
            "Unit Scaling (arXiv 2303.11257), table of ops, conv1d; fan_in = "
            "in_channels / groups * prod(kernel)",
            weights=("weight", "bias"),
        ),
        names=(f"conv{dims}d",),
    )
    for dims in (1, 2, 3)
)
TRANSPOSED_CONVOLUTIONS = tuple(
    register_rule(
        ScaleRule(
            f"conv_transpose{dims}d",
            _TRANSPOSED,
            _transposed,
            "linear",
            "the rule of conv1d with the output and the gradient of the input exchanged",
            weights=("weight", "bias"),
        ),
        names=(f"conv_transpose{dims}d",),
    )
    for dims in (1, 2, 3)
)

"""Scale rules of pools, from the number of inputs per window and of windows per input.

Each window of an average pool sums k inputs over k; the energy of its gradient is spread over them.
The largest of k normal numbers has a mean square found by quadrature, and takes the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from lightning_unitscale.functional.convolution_rules import convolved_size
from lightning_unitscale.functional.quadrature import elementwise_moments, largest_of_normals
from lightning_unitscale.functional.rule import Factors, Kind, ScaleRule, register_rule, unit_factor
from lightning_unitscale.functional.sizes import product, shape_of, tuple_of

Windows = tuple[float, float]


def _sliding(arguments: Mapping[str, Any], dims: int) -> Windows:
    """Inputs per window, and windows per input."""
    size = shape_of(arguments["input"])[-dims:]
    kernel = tuple_of(arguments["kernel_size"], dims, 1)
    # None, and the empty list that torch passes on for it, mean the kernel's size.
    stride = tuple_of(arguments.get("stride") or kernel, dims, 1)
    windows = product(convolved_size(size, kernel, {**arguments, "stride": stride}))
    return product(kernel), windows / max(product(size), 1)


def _adaptive(arguments: Mapping[str, Any], dims: int) -> Windows:
    size = shape_of(arguments["input"])[-dims:]
    wanted = arguments["output_size"]
    if wanted is None or isinstance(wanted, int):
        wanted = (wanted,) * dims
    made = product([n if one is None else one for n, one in zip(size, wanted, strict=True)])
    share = made / max(product(size), 1)
    return (1 / share if share else 1.0), share


def _average(inputs: float, windows: float, arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    divisor = arguments.get("divisor_override") or inputs
    return Factors(
        unit_factor(mult**2 * inputs / divisor**2),
        {"input": unit_factor(mult**2 * windows * inputs / divisor**2)},
    )


def _maximum(inputs: float, windows: float, arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    largest = largest_of_normals(max(round(inputs), 1))
    return Factors(unit_factor(mult**2 * largest), {"input": unit_factor(mult**2 * windows)})


def _power(inputs: float, windows: float, arguments: Mapping[str, Any]) -> Factors:
    mult, p = arguments.get("mult", 1.0), float(arguments["norm_type"])
    if p == 1:  # torch sums without absolute values
        output, gradient = inputs, inputs
    else:
        moment, _ = elementwise_moments(_absolute_power, 1.0, (("exponent", p / 2),))
        _, slope = elementwise_moments(_absolute_power, 1.0, (("exponent", p),))
        norm = (inputs * moment) ** (1 / p)
        output, gradient = norm**2, inputs * slope / p**2 * norm ** (2 - 2 * p)
    return Factors(
        unit_factor(mult**2 * output), {"input": unit_factor(mult**2 * windows * gradient)}
    )


def _absolute_power(input: torch.Tensor, exponent: float) -> torch.Tensor:
    return input.abs().pow(exponent)


class _Reduction(NamedTuple):
    """What a pool makes of the inputs in one window."""

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


def _register(
    name: str,
    dims: int,
    parameters: str,
    windows: Callable[[Mapping[str, Any], int], Windows],
    reduction: _Reduction,
) -> None:
    def factors(arguments: Mapping[str, Any]) -> Factors:
        return reduction.factors(*windows(arguments, dims), arguments)

    names = tuple(parameters.split())
    rule = ScaleRule(name, names, factors, reduction.kind, reduction.reference)
    register_rule(rule, names=(name,))


_WINDOW = "input kernel_size stride padding"
for _dims in (1, 2, 3):
    _register(
        f"avg_pool{_dims}d",
        _dims,
        f"{_WINDOW} ceil_mode count_include_pad divisor_override",
        _sliding,
        _AVERAGE,
    )
    _register(
        f"max_pool{_dims}d",
        _dims,
        f"{_WINDOW} dilation ceil_mode return_indices",
        _sliding,
        _MAXIMUM,
    )
    _register(
        f"lp_pool{_dims}d",
        _dims,
        "input norm_type kernel_size stride ceil_mode",
        _sliding,
        _POWER,
    )
    _register(f"adaptive_avg_pool{_dims}d", _dims, "input output_size", _adaptive, _AVERAGE)
    _register(
        f"adaptive_max_pool{_dims}d",
        _dims,
        "input output_size return_indices",
        _adaptive,
        _MAXIMUM,
    )

"""Activations: their scale rules and their unit-scaled forms.

Factors are derived by quadrature: the RMS becomes 1, which is what a number format sees. The
published ones (Unit Scaling, arXiv 2303.11257, table of ops) are fits to a standard deviation of 1,
which leaves out the mean. With them the RMS would be:

|  | mult 0.25 | mult 1 | mult 4 |
|---|---|---|---|
| gelu, output | 1.021 | 1.152 | 1.211 |
| gelu, gradient | 0.997 | 1.023 | 1.016 |
| silu, output | 0.991 | 1.054 | 1.196 |
| silu, gradient | 1.008 | 1.036 | 1.025 |
| silu_glu, output | 1.001 | 1.003 | 1.006 |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.call import scaled_call, scaled_op
from lightning_unitscale.functional.moments import elementwise_moments
from lightning_unitscale.functional.rules import (
    Factors,
    ScaleRule,
    numel_of,
    register_rule,
    torch_rule,
    unit_factor,
)

__all__ = [
    "celu", "elu", "erf", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "leaky_relu", "logsigmoid", "mish", "prelu", "relu", "relu6", "rrelu", "selu", "sigmoid",
    "silu", "silu_glu", "softplus", "softshrink", "softsign", "tanh", "tanhshrink", "threshold",
]  # fmt: skip

_REFERENCE = "output (E f(x)^2)^-1/2, gradient (E f'(x)^2)^-1/2 for normal x, by quadrature"

# Name, function, and the parameters after `input` that change what it computes. Not exp, cos or
# square: they are steps of something larger (a softmax, a rotary embedding, a norm), which a factor
# in its midst would change.
_ELEMENTWISE: tuple[tuple[str, Callable[..., Tensor], tuple[str, ...]], ...] = (
    ("relu", F.relu, ()),
    ("relu6", F.relu6, ()),
    ("leaky_relu", F.leaky_relu, ("negative_slope",)),
    ("elu", F.elu, ("alpha",)),
    ("selu", F.selu, ()),
    ("celu", F.celu, ("alpha",)),
    ("gelu", F.gelu, ("approximate",)),
    ("silu", F.silu, ()),
    ("mish", F.mish, ()),
    ("hardswish", F.hardswish, ()),
    ("hardsigmoid", F.hardsigmoid, ()),
    ("hardtanh", F.hardtanh, ("min_val", "max_val")),
    ("softplus", F.softplus, ("beta", "threshold")),
    ("softsign", F.softsign, ()),
    ("tanh", torch.tanh, ()),
    ("sigmoid", torch.sigmoid, ()),
    ("logsigmoid", F.logsigmoid, ()),
    ("softshrink", F.softshrink, ("lambd",)),
    ("hardshrink", F.hardshrink, ("lambd",)),
    ("tanhshrink", F.tanhshrink, ()),
    ("threshold", F.threshold, ("threshold", "value")),
    ("erf", torch.erf, ()),
)
# Other names of the same functions.
_ALIASES = {"sigmoid": ("expit",)}


def _elementwise(function: Callable[..., Tensor], options: tuple[str, ...]) -> Any:
    def factors(arguments: Mapping[str, Any]) -> Factors:
        values = tuple([(name, arguments[name]) for name in options if name in arguments])
        mult = arguments.get("mult", 1.0)
        output, gradient = elementwise_moments(function, mult, values)
        return Factors(unit_factor(output), {"input": unit_factor(mult**2 * gradient)})

    return factors


def _leaky(slope_mean_square: float, mult: float) -> Factors:
    """Factors of max(x, 0) + a min(x, 0) for a slope a of this mean square."""
    half = mult**2 * (1 + slope_mean_square) / 2
    return Factors(unit_factor(half), {"input": unit_factor(half)})


def _rrelu(arguments: Mapping[str, Any]) -> Factors:
    lower, upper = arguments.get("lower", 1 / 8), arguments.get("upper", 1 / 3)
    middle = (lower + upper) / 2
    spread = (upper - lower) ** 2 / 12 if arguments.get("training") else 0.0
    return _leaky(middle**2 + spread, arguments.get("mult", 1.0))


def _prelu(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    factors = _leaky(_PRELU_START**2, mult)
    uses = numel_of(arguments["input"]) / max(numel_of(arguments["weight"]), 1)
    gradients = {**factors.gradients, "weight": unit_factor(mult**2 * uses / 2)}
    return Factors(factors.output, gradients)


def _glu(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    gate, slope = elementwise_moments(torch.sigmoid, mult)
    # Half of the gradient is that of the values, half that of the gates.
    gradient = (gate + mult**2 * slope) / 2
    return Factors(unit_factor(mult**2 * gate), {"input": unit_factor(mult**2 * gradient)})


# What nn.PReLU starts from; a rule does not see the values of the weight.
_PRELU_START = 0.25

for _name, _function, _options in _ELEMENTWISE:
    register_rule(
        ScaleRule(
            _name,
            ("input", *_options, "inplace"),
            _elementwise(_function, _options),
            "activation",
            _REFERENCE,
        ),
        _function,
        names=(_name, *_ALIASES.get(_name, ())),
    )
torch_rule(
    "rrelu",
    "input lower upper training inplace",
    _rrelu,
    "activation",
    "(1 + E slope^2) / 2 on both sides; the slope is uniform, or its mean outside of training",
)
torch_rule(
    "prelu",
    "input weight",
    _prelu,
    "activation",
    "as leaky_relu with the slope 0.25 that nn.PReLU starts from",
    weights="weight",
)
torch_rule("glu", "input dim", _glu, "activation", "E x^2 sigmoid(y)^2, by quadrature")

relu = scaled_op(F.relu)
relu6 = scaled_op(F.relu6)
leaky_relu = scaled_op(F.leaky_relu)
elu = scaled_op(F.elu)
gelu = scaled_op(F.gelu, "input, approximate='none'")
selu = scaled_op(F.selu)
silu = scaled_op(F.silu)
celu = scaled_op(F.celu)
mish = scaled_op(F.mish)
hardswish = scaled_op(F.hardswish)
hardsigmoid = scaled_op(F.hardsigmoid)
hardtanh = scaled_op(F.hardtanh)
softplus = scaled_op(F.softplus, "input, beta=1.0, threshold=20.0")
softsign = scaled_op(F.softsign)
tanh = scaled_op(torch.tanh, "input")
sigmoid = scaled_op(torch.sigmoid, "input")
logsigmoid = scaled_op(F.logsigmoid, "input")
erf = scaled_op(torch.erf, "input")
softshrink = scaled_op(F.softshrink, "input, lambd=0.5")
hardshrink = scaled_op(F.hardshrink, "input, lambd=0.5")
tanhshrink = scaled_op(F.tanhshrink)
threshold = scaled_op(F.threshold)
rrelu = scaled_op(F.rrelu)
prelu = scaled_op(F.prelu, "input, weight")
glu = scaled_op(F.glu)


def silu_glu(
    input: Tensor,
    gate: Tensor,
    *,
    mult: float = 1.0,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Unit-scaled gated linear unit, ``input * silu(mult * gate)``.

    Args:
        input: Any shape, at RMS 1.
        gate: The same shape, at RMS 1.
        mult: Sharpness of the gate.
        constraint: Between the factors of the output, of the gradient of ``input``, and of that of
            ``gate``.

    Returns:
        The shape of ``input``, at RMS 1.

    Raises:
        TypeError: If ``gate`` is not a floating-point tensor.
        ValueError: If ``constraint`` or ``mult`` is not usable.

    References:
        Blake et al., "u-muP" (arXiv 2407.17465), appendix on gated activations. Factors by
        quadrature: (E silu(mult x)^2)^-1/2 for the output and the gradient of ``input``.
    """
    result: Tensor = scaled_call(_SILU_GLU, _gated, (gate, input), constraint=constraint, mult=mult)
    return result


def _gated(gate: Tensor, input: Tensor) -> Tensor:
    return input * F.silu(gate)


def _silu_glu_factors(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    output, slope = elementwise_moments(F.silu, mult)
    factor = unit_factor(output)
    return Factors(factor, {"gate": unit_factor(mult**2 * slope), "input": factor})


_SILU_GLU = ScaleRule(
    "silu_glu",
    ("gate", "input"),
    _silu_glu_factors,
    "activation",
    "E x^2 silu(mult y)^2 for independent normal x and y, by quadrature",
)

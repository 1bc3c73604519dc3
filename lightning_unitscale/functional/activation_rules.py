"""Scale rules of activations: all derived by quadrature, none fitted.

The published rules of gelu and silu are fits to the standard deviation, which leaves out the mean;
here the RMS is what becomes 1.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops, for the fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.quadrature import elementwise_moments
from lightning_unitscale.functional.rule import (
    Factors,
    ScaleRule,
    register_rule,
    unit_factor,
)
from lightning_unitscale.functional.sizes import numel_of

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
        given = tuple([(name, arguments[name]) for name in options if name in arguments])
        mult = arguments.get("mult", 1.0)
        output, gradient = elementwise_moments(function, mult, given)
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
RRELU = register_rule(
    ScaleRule(
        "rrelu",
        ("input", "lower", "upper", "training", "inplace"),
        _rrelu,
        "activation",
        "(1 + E slope^2) / 2 on both sides; the slope is uniform, or its mean outside of training",
    ),
    names=("rrelu",),
)
PRELU = register_rule(
    ScaleRule(
        "prelu",
        ("input", "weight"),
        _prelu,
        "activation",
        "as leaky_relu with the slope 0.25 that nn.PReLU starts from",
        weights=("weight",),
    ),
    names=("prelu",),
)
GLU = register_rule(
    ScaleRule("glu", ("input", "dim"), _glu, "activation", "E x^2 sigmoid(y)^2, by quadrature"),
    names=("glu",),
)

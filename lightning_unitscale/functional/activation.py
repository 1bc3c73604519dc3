"""Define scale rules and unit-scaled forms of activations and normalizations.

Factors of activations are derived by quadrature, so the RMS becomes 1, which matters for a number
format. The published ones (Unit Scaling, arXiv 2303.11257, table of ops) are fits to a standard
deviation of 1, which omits the mean. With them the RMS would be:

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
    elementwise_factors,
    numel_of,
    product,
    register_rule,
    shape_of,
    unit_factors,
)

__all__ = [
    "batch_norm", "celu", "elu", "erf", "gelu", "glu", "group_norm", "hardshrink", "hardsigmoid",
    "hardswish", "hardtanh", "instance_norm", "layer_norm", "leaky_relu", "local_response_norm",
    "logsigmoid", "mish", "prelu", "relu", "relu6", "rms_norm", "rrelu", "selu", "sigmoid", "silu",
    "silu_glu", "softplus", "softshrink", "softsign", "tanh", "tanhshrink", "threshold",
]  # fmt: skip


# Arguments that do not change the result of an elementwise function.
_NO_OPTIONS = {"input", "mult", "inplace", "out"}


def _elementwise(
    function: Callable[..., Tensor], parameters: str | None = None, **names: str
) -> Callable[..., Tensor]:
    def factors(arguments: Mapping[str, Any]) -> Factors:
        options = {key: arguments[key] for key in arguments if key not in _NO_OPTIONS}
        return elementwise_factors(function, arguments.get("mult", 1.0), **options)

    reference = "output (E f(x)^2)^-1/2, gradient (E f'(x)^2)^-1/2 for normal x, by quadrature"
    return scaled_op(function, factors, "activation", reference, parameters, **names)


# Without exp, cos and square: they are steps of a larger function (a softmax, a rotary embedding, a
# norm), which a factor inside would change.
relu = _elementwise(F.relu)
relu6 = _elementwise(F.relu6)
leaky_relu = _elementwise(F.leaky_relu)
elu = _elementwise(F.elu)
gelu = _elementwise(F.gelu, "input, approximate='none'")
selu = _elementwise(F.selu)
silu = _elementwise(F.silu)
celu = _elementwise(F.celu)
mish = _elementwise(F.mish)
hardswish = _elementwise(F.hardswish)
hardsigmoid = _elementwise(F.hardsigmoid)
hardtanh = _elementwise(F.hardtanh)
softplus = _elementwise(F.softplus, "input, beta=1.0, threshold=20.0")
softsign = _elementwise(F.softsign)
tanh = _elementwise(torch.tanh, "input")
sigmoid = _elementwise(torch.sigmoid, "input", aliases="expit")
logsigmoid = _elementwise(F.logsigmoid, "input", name="logsigmoid")
erf = _elementwise(torch.erf, "input")
softshrink = _elementwise(F.softshrink, "input, lambd=0.5")
hardshrink = _elementwise(F.hardshrink, "input, lambd=0.5")
tanhshrink = _elementwise(F.tanhshrink)
threshold = _elementwise(F.threshold, name="threshold")


def _leaky(slope_mean_square: float, mult: float) -> float:
    """Return the mean square of max(x, 0) + a min(x, 0), and of its gradient, for a slope a."""
    return mult**2 * (1 + slope_mean_square) / 2


def _rrelu(arguments: Mapping[str, Any]) -> Factors:
    lower, upper = arguments.get("lower", 1 / 8), arguments.get("upper", 1 / 3)
    middle = (lower + upper) / 2
    spread = (upper - lower) ** 2 / 12 if arguments.get("training") else 0.0
    square = _leaky(middle**2 + spread, arguments.get("mult", 1.0))
    return unit_factors(square, input=square)


_PRELU_START = 0.25  # nn.PReLU's initial value, since a rule does not see the values of the weight


def _prelu(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    uses = numel_of(arguments["input"]) / max(numel_of(arguments["weight"]), 1)
    square = _leaky(_PRELU_START**2, mult)
    return unit_factors(square, input=square, weight=mult**2 * uses / 2)


def _glu(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    gate, slope = elementwise_moments(torch.sigmoid, mult)
    # Half of the gradient is that of the values, half that of the gates.
    gradient = (gate + mult**2 * slope) / 2
    return unit_factors(mult**2 * gate, input=mult**2 * gradient)


rrelu = scaled_op(
    F.rrelu,
    _rrelu,
    "activation",
    "(1 + E slope^2) / 2 on both sides; the slope is uniform, or its mean outside of training",
)
prelu = scaled_op(
    F.prelu,
    _prelu,
    "activation",
    "as leaky_relu with the slope 0.25 that nn.PReLU starts from",
    "input, weight",
    weights="weight",
)
glu = scaled_op(F.glu, _glu, "activation", "E x^2 sigmoid(y)^2, by quadrature")


def silu_glu(
    input: Tensor, gate: Tensor, *, mult: float = 1.0, constraint: str | None = "to_output_scale"
) -> Tensor:
    """Return the unit-scaled gated linear unit, ``input * silu(mult * gate)``.

    References:
        Blake et al., "u-muP" (arXiv 2407.17465), appendix on gated activations. Factors by
        quadrature: (E silu(mult x)^2)^-1/2 for the output and the gradient of ``input``.
    """
    return scaled_call(_SILU_GLU, _gated, (gate, input), constraint=constraint, mult=mult)


def _gated(gate: Tensor, input: Tensor) -> Tensor:
    return input * F.silu(gate)


def _silu_glu_factors(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    output, slope = elementwise_moments(F.silu, mult)
    return unit_factors(output, gate=mult**2 * slope, input=output)


_SILU_GLU = ScaleRule(
    "silu_glu",
    ("gate", "input"),
    _silu_glu_factors,
    "activation",
    "E x^2 silu(mult y)^2 for independent normal x and y, by quadrature",
)


def _normalization(
    arguments: Mapping[str, Any], num_weights: float, weights: tuple[str, ...] = ("weight", "bias")
) -> Factors:
    uses = numel_of(arguments["input"]) / max(num_weights, 1)
    # The output does not depend on the scale of the input, so there is no `mult`.
    return unit_factors(1.0, input=1.0, **dict.fromkeys(weights, uses))


def _layer_norm(arguments: Mapping[str, Any]) -> Factors:
    return _normalization(arguments, product(arguments["normalized_shape"]))


def _rms_norm(arguments: Mapping[str, Any]) -> Factors:
    return _normalization(arguments, product(arguments["normalized_shape"]), ("weight",))


def _over_channels(arguments: Mapping[str, Any]) -> Factors:
    return _normalization(arguments, shape_of(arguments["input"])[1])


def _local_response_norm(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    alpha, beta = arguments.get("alpha", 1e-4), arguments.get("beta", 0.75)
    divisor = (arguments.get("k", 1.0) + alpha * mult**2) ** beta
    square = (mult / divisor) ** 2
    return unit_factors(square, input=square)


_REFERENCE = (
    "Unit Scaling (arXiv 2303.11257), table of ops, layer_norm: gradients of weight and bias get "
    "(numel(weight) / numel(input))^0.5"
)
_BATCH_NORM = f"{_REFERENCE}; one weight per channel, running statistics like the batch's"


layer_norm = scaled_op(
    F.layer_norm, _layer_norm, "normalization", _REFERENCE, weights="weight bias"
)
rms_norm = scaled_op(F.rms_norm, _rms_norm, "normalization", _REFERENCE, weights="weight")
group_norm = scaled_op(
    F.group_norm,
    _over_channels,
    "normalization",
    f"{_REFERENCE}; one weight per channel",
    weights="weight bias",
)
batch_norm, instance_norm = (
    scaled_op(
        function, _over_channels, "normalization", _BATCH_NORM, weights="weight bias", aliases=None
    )
    for function in (F.batch_norm, F.instance_norm)
)
# The functions of torch and of torch.nn.functional have their parameters in different orders.
_WEIGHTS_FIRST = ("input", "weight", "bias", "running_mean", "running_var")
for _function, _flag in ((torch.batch_norm, "training"), (torch.instance_norm, "use_input_stats")):
    register_rule(
        ScaleRule(
            _function.__name__,
            (*_WEIGHTS_FIRST, _flag, "momentum", "eps", "cudnn_enabled"),
            _over_channels,
            "normalization",
            _BATCH_NORM,
            ("weight", "bias"),
        ),
        _function,
    )
local_response_norm = scaled_op(
    F.local_response_norm,
    _local_response_norm,
    "other",
    "divides by (k + alpha * mean square)^beta",
)

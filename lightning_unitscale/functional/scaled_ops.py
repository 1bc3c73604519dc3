"""Unit-scaled forms of all further operations that have a rule, made from the rule alone.

Each takes the arguments of torch's function, and by name ``constraint`` (but for norms and losses),
``mult`` (activations and losses) and ``scale_power`` (layers with a weight), as the operations that
are written out do.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lightning_unitscale.functional.rule import ScaleRule
from lightning_unitscale.functional.scaled_call import (
    DEFAULT_POWER,
    rule_for,
    scaled_call,
    scaled_loss,
)

_OPTIONS: dict[str, tuple[Any, str]] = {
    "constraint": ("to_output_scale", "Between the factors of the output and of the gradients."),
    "mult": (1.0, "The first argument is multiplied by it."),
    "scale_power": (
        DEFAULT_POWER,
        "Powers of the number of terms in the sums that make the output, the gradient of the "
        "input, and those of the weights.",
    ),
}


def _options_of(rule: ScaleRule) -> tuple[str, ...]:
    options = []
    if rule.kind not in ("loss", "normalization"):
        options.append("constraint")
    if rule.kind in ("loss", "activation"):
        options.append("mult")
    if rule.kind == "linear" and {"weight", "bias"} <= set(rule.weights):
        options.append("scale_power")
    return tuple(options)


def scaled_op(function: Callable[..., Any], parameters: str | None = None) -> Callable[..., Any]:
    """Make the unit-scaled form of a function of torch that has a rule.

    Args:
        function: The function.
        parameters: Its parameters, such as ``"input, beta=1, threshold=20"``, where Python cannot
            tell.

    Returns:
        A function of the same name and parameters with those of unit scaling after them.
    """
    rule = rule_for(function)
    options = _options_of(rule)
    signature = _signature(function, parameters, options)
    required = tuple(
        name
        for name, one in signature.parameters.items()
        if one.default is one.empty and one.kind is not one.VAR_POSITIONAL
    )
    # In place, the factor could not be told from the tensor that others see.
    place = rule.parameters.index("inplace") if "inplace" in rule.parameters else None
    call = scaled_loss if rule.kind == "loss" else scaled_call

    def op(*args: Any, **kwargs: Any) -> Any:
        own = {name: kwargs.pop(name) for name in options if name in kwargs}
        kwargs.pop("inplace", None)
        args = args[:place]
        missing = [name for name in required[len(args) :] if name not in kwargs]
        if missing:
            raise TypeError(f"{rule.name}: {missing[0]!r} is missing; its arguments: {signature}.")
        return call(rule, function, args, kwargs, **own)

    op.__name__ = op.__qualname__ = rule.name
    op.__doc__ = _docstring(rule, options, place is not None)
    op.__signature__ = signature  # type: ignore[attr-defined]
    return op


def _signature(
    function: Callable[..., Any], parameters: str | None, options: tuple[str, ...]
) -> inspect.Signature:
    if parameters is None:
        found = [
            one.replace(annotation=one.empty)
            for name, one in inspect.signature(function).parameters.items()
            if name != "out"
        ]
    else:
        found = [_parameter(text.strip()) for text in parameters.split(",")]
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_OPTIONS[name][0])
        for name in options
    ]
    return inspect.Signature([*found, *named])


def _parameter(text: str) -> inspect.Parameter:
    name, equals, default = text.partition("=")
    if name.startswith("*"):
        return inspect.Parameter(name[1:], inspect.Parameter.VAR_POSITIONAL)
    value = ast.literal_eval(default) if equals else inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value)


def _docstring(rule: ScaleRule, options: tuple[str, ...], is_in_place: bool) -> str:
    if rule.kind == "loss":
        what = "Its value is the plain loss; the gradients of its arguments are at RMS 1."
    else:
        what = "Its output and the gradients of its arguments are at RMS 1 for inputs at RMS 1."
    lines = [f"Unit-scaled form of torch's ``{rule.name}``.", "", what]
    if is_in_place:
        lines.append("``inplace`` is accepted and has no effect: the result is a new tensor.")
    if options:
        lines += ["", "Args, besides those of torch:"]
        lines += [f"    {name}: {_OPTIONS[name][1]}" for name in options]
    lines += [
        "",
        "Raises:",
        "    TypeError: If the first tensor is not a floating-point one.",
    ]
    if options:
        lines.append(f"    ValueError: If one of {', '.join(options)} is not usable.")
    return "\n".join([*lines, "", "References:", f"    {rule.reference}.", ""])


# Activations.
relu = scaled_op(F.relu)
relu6 = scaled_op(F.relu6)
leaky_relu = scaled_op(F.leaky_relu)
elu = scaled_op(F.elu)
selu = scaled_op(F.selu)
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
softmin = scaled_op(F.softmin)
log_softmax = scaled_op(F.log_softmax)
alpha_dropout = scaled_op(F.alpha_dropout)
feature_alpha_dropout = scaled_op(F.feature_alpha_dropout)

# Layers with a weight.
_CONVOLUTION = "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1"
_TRANSPOSED = (
    "input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1"
)
bilinear = scaled_op(F.bilinear, "input1, input2, weight, bias=None")
embedding_bag = scaled_op(F.embedding_bag)
conv2d = scaled_op(F.conv2d, _CONVOLUTION)
conv3d = scaled_op(F.conv3d, _CONVOLUTION)
conv_transpose1d = scaled_op(F.conv_transpose1d, _TRANSPOSED)
conv_transpose2d = scaled_op(F.conv_transpose2d, _TRANSPOSED)
conv_transpose3d = scaled_op(F.conv_transpose3d, _TRANSPOSED)

# Products.
mm = scaled_op(torch.mm, "input, mat2")
bmm = scaled_op(torch.bmm, "input, mat2")
mv = scaled_op(torch.mv, "input, vec")
dot = scaled_op(torch.dot, "input, tensor")
inner = scaled_op(torch.inner, "input, other")
outer = scaled_op(torch.outer, "input, vec2")
tensordot = scaled_op(torch.tensordot)
addmm = scaled_op(torch.addmm, "input, mat1, mat2")
addmv = scaled_op(torch.addmv, "input, mat, vec")
baddbmm = scaled_op(torch.baddbmm, "input, batch1, batch2")
addbmm = scaled_op(torch.addbmm, "input, batch1, batch2")
einsum = scaled_op(torch.einsum, "equation, *operands")
multi_dot = scaled_op(torch.linalg.multi_dot, "tensors")

# Norms.
group_norm = scaled_op(F.group_norm)
batch_norm = scaled_op(F.batch_norm)
instance_norm = scaled_op(F.instance_norm)
local_response_norm = scaled_op(F.local_response_norm)

# Pools.
_AVERAGE = "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True"
_MAXIMUM = (
    "input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False"
)
avg_pool1d = scaled_op(F.avg_pool1d, _AVERAGE)
avg_pool2d = scaled_op(F.avg_pool2d, f"{_AVERAGE}, divisor_override=None")
avg_pool3d = scaled_op(F.avg_pool3d, f"{_AVERAGE}, divisor_override=None")
max_pool1d = scaled_op(F.max_pool1d, _MAXIMUM)
max_pool2d = scaled_op(F.max_pool2d, _MAXIMUM)
max_pool3d = scaled_op(F.max_pool3d, _MAXIMUM)
lp_pool1d = scaled_op(F.lp_pool1d)
lp_pool2d = scaled_op(F.lp_pool2d)
lp_pool3d = scaled_op(F.lp_pool3d)
adaptive_avg_pool1d = scaled_op(F.adaptive_avg_pool1d, "input, output_size")
adaptive_avg_pool2d = scaled_op(F.adaptive_avg_pool2d)
adaptive_avg_pool3d = scaled_op(F.adaptive_avg_pool3d)
adaptive_max_pool1d = scaled_op(F.adaptive_max_pool1d, "input, output_size, return_indices=False")
adaptive_max_pool2d = scaled_op(F.adaptive_max_pool2d, "input, output_size, return_indices=False")
adaptive_max_pool3d = scaled_op(F.adaptive_max_pool3d, "input, output_size, return_indices=False")

# Arithmetic.
sub = scaled_op(torch.sub, "input, other")
mul = scaled_op(torch.mul, "input, other")
sum = scaled_op(torch.sum, "input, dim=None, keepdim=False, dtype=None")
mean = scaled_op(torch.mean, "input, dim=None, keepdim=False, dtype=None")
cat = scaled_op(torch.cat, "tensors, dim=0")
stack = scaled_op(torch.stack, "tensors, dim=0")
dropout1d = scaled_op(F.dropout1d)
dropout2d = scaled_op(F.dropout2d)
dropout3d = scaled_op(F.dropout3d)

# Losses.
nll_loss = scaled_op(F.nll_loss)
binary_cross_entropy = scaled_op(F.binary_cross_entropy)
binary_cross_entropy_with_logits = scaled_op(F.binary_cross_entropy_with_logits)
kl_div = scaled_op(F.kl_div)
l1_loss = scaled_op(F.l1_loss)
smooth_l1_loss = scaled_op(F.smooth_l1_loss)
huber_loss = scaled_op(F.huber_loss)
gaussian_nll_loss = scaled_op(F.gaussian_nll_loss)

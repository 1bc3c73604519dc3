"""Call an operation with the factors of its rule, as every unit-scaled operation does.

``scaled_op`` makes an operation from its rule alone. Others have their own function, with a
docstring, around ``scaled_call`` or ``scaled_loss``.

Factors of gradients are applied where tensors enter, that of the output where it leaves. A loss has
its factor on the gradient that enters it, before any division by the number of elements. In 16 bits
the unscaled gradient of a mean over many tokens would already be 0.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.functional.rules import (
    Factors,
    Kind,
    ScaleRule,
    apply_constraint,
    register_rule,
)
from lightning_unitscale.functional.scale import Factor, scale, scale_bwd, scale_fwd

ScalePower = tuple[float, float, float]
DEFAULT_POWER: ScalePower = (0.5, 0.5, 0.5)
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def scaled_call(
    rule: ScaleRule,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    constraint: str | None = "to_output_scale",
    mult: float = 1.0,
    scale_power: ScalePower = DEFAULT_POWER,
) -> Any:
    """Call ``function`` such that its output and the gradients of its arguments are at RMS 1."""
    mult = positive(f"{rule.name}: mult", mult)
    if len(scale_power) != 3 or not all([-math.inf < power < math.inf for power in scale_power]):
        raise ValueError(
            f"{rule.name}: scale_power={scale_power!r}: expected three numbers, the powers for the "
            "output, the gradient of the input, and the gradients of weight and bias."
        )
    arguments, factors, tensors = _prepared(rule, function, args, kwargs or {}, mult)
    output, gradients = _constrained(rule, factors, constraint, scale_power)
    scaled = {name: _enter(tensor, gradients[name]) for name, tensor in tensors.items()}
    if mult != 1.0:
        first = _first_input(rule, tensors)
        scaled[first] = scale(tensors[first], mult, mult * gradients[first])
    result = _called(rule, function, len(args), arguments, scaled)
    if isinstance(result, tuple):
        return (_leave(result[0], output), *result[1:])
    return _leave(result, output)


def scaled_loss(
    rule: ScaleRule,
    function: Callable[..., Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mult: float = 1.0,
    correction: Factor = 1.0,
) -> Tensor:
    """Call a loss: its value is unscaled, the gradients of its arguments are at RMS 1."""
    # 16-bit arguments are computed in FP32, where the gradient has enough range on its way from the
    # scalar to the elements. The result has the type of the unscaled loss.
    mult = positive(f"{rule.name}: mult", mult)
    arguments, factors, tensors = _prepared(rule, function, args, kwargs or {}, mult)
    first = _first_input(rule, tensors)
    main = factors.gradients[first]
    dtype = tensors[first].dtype
    scaled = {}
    for name, tensor in tensors.items():
        wide = tensor.float() if tensor.dtype in _SIXTEEN_BITS else tensor
        if name == first:
            scaled[name] = wide * mult if mult != 1.0 else wide
        else:
            scaled[name] = _enter(wide, factors.gradients[name] / main)
    for name, value in arguments.items():  # weights and targets of the same type
        if name not in scaled and isinstance(value, Tensor) and value.dtype in _SIXTEEN_BITS:
            scaled[name] = value.float()
    loss = scale_bwd(_called(rule, function, len(args), arguments, scaled), main * correction)
    if dtype in _SIXTEEN_BITS and not torch.is_autocast_enabled(tensors[first].device.type):
        return loss.to(dtype)
    return loss


def _prepared(
    rule: ScaleRule,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mult: float,
) -> tuple[dict[str, Any], Factors, dict[str, Tensor]]:
    """Return the arguments, the factors, and the tensors that get a factor, all by name."""
    arguments = rule.bind(tuple(args), kwargs)
    try:
        factors = rule.factors({**arguments, "mult": mult})
    except (IndexError, KeyError, TypeError, ValueError):
        # If shapes do not fit, users get torch's own error.
        function(*args, **kwargs)
        raise
    tensors: dict[str, Tensor] = {}
    gradients: dict[str, float] = {}
    for parameter, value in arguments.items():
        items = list(enumerate(value)) if isinstance(value, (list, tuple)) else [(None, value)]
        for index, item in items:
            name = parameter if index is None else f"{parameter}.{index}"
            factor = factors.gradients.get(name)
            if factor is None or not isinstance(item, Tensor):
                continue
            if not item.is_floating_point():
                if tensors or parameter in rule.weights:
                    continue
                raise TypeError(
                    f"{rule.name}: {parameter} is a tensor of type {item.dtype}. Expected a real "
                    "floating-point one. Convert it first, or use the function of torch."
                )
            tensors[name], gradients[name] = item, factor
    return arguments, Factors(factors.output, gradients), tensors


def _called(
    rule: ScaleRule,
    function: Callable[..., Any],
    num_positional: int,
    arguments: Mapping[str, Any],
    scaled: Mapping[str, Tensor],
) -> Any:
    """Call a function, with the scaled tensors in their places."""
    kwargs = {name: _replaced(name, value, scaled) for name, value in arguments.items()}
    args = [kwargs.pop(name) for name in rule.parameters[:num_positional]]
    if rule.is_variadic and num_positional >= len(rule.parameters):
        args[-1:] = args[-1]
    return function(*args, **kwargs)


def _replaced(name: str, value: Any, scaled: Mapping[str, Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([scaled.get(f"{name}.{i}", item) for i, item in enumerate(value)])
    return scaled.get(name, value)


def _enter(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else scale_bwd(tensor, factor)


def _leave(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else scale_fwd(tensor, factor)


def _is_weight(rule: ScaleRule, name: str) -> bool:
    return name.partition(".")[0] in rule.weights


def _first_input(rule: ScaleRule, tensors: Mapping[str, Tensor]) -> str:
    for name in tensors:
        if not _is_weight(rule, name):
            return name
    raise TypeError(
        f"{rule.name}: mult multiplies a floating-point input, and there is none. Leave mult out."
    )


def _constrained(
    rule: ScaleRule, factors: Factors, constraint: str | None, scale_power: ScalePower
) -> tuple[float, dict[str, float]]:
    gradients = {
        name: _power(factor, scale_power[2 if _is_weight(rule, name) else 1])
        for name, factor in factors.gradients.items()
    }
    inputs = [name for name in gradients if not _is_weight(rule, name)]
    output, *of_inputs = apply_constraint(
        constraint, _power(factors.output, scale_power[0]), *[gradients[name] for name in inputs]
    )
    return output, {**gradients, **dict(zip(inputs, of_inputs, strict=True))}


def _power(factor: float, power: float) -> float:
    """Raise a factor, which is the -1/2 power of a number of terms, to a power."""
    return factor if power == 0.5 else factor ** (2 * power)


def positive(name: str, factor: float) -> float:
    """Return the factor, or raise an error that names it if it is not positive."""
    if factor == 1.0:
        return 1.0  # a number, where a compiler has made a symbol of it
    if not 0 < factor < math.inf:
        raise ValueError(
            f"{name}={factor}: the scaled tensor would lose its unit scale. Expected a positive "
            "number."
        )
    return factor


# Default, description, and which rules have it.
_OPTIONS: dict[str, tuple[Any, str, Callable[[ScaleRule], bool]]] = {
    "constraint": (
        "to_output_scale",
        "How to make the factors of output and gradients agree.",
        lambda rule: rule.kind not in ("loss", "normalization"),
    ),
    "mult": (
        1.0,
        "Factor on the first argument.",
        lambda rule: rule.kind in ("loss", "activation"),
    ),
    "scale_power": (
        DEFAULT_POWER,
        "Powers of the number of terms in the sums that make the output, the gradient of the "
        "input, and those of the weights.",
        lambda rule: rule.kind == "linear" and {"weight", "bias"} <= set(rule.weights),
    ),
}


def scaled_op(
    function: Callable[..., Any],
    factors: Callable[[Mapping[str, Any]], Factors],
    kind: Kind,
    reference: str,
    parameters: str | None = None,
    *,
    name: str | None = None,
    weights: str = "",
    operands: str = "",
    aliases: str | None = "",
) -> Callable[..., Any]:
    """Register the rule of a torch function, and make the function's unit-scaled form.

    The form takes the arguments of torch's function. By name it takes ``constraint`` (except norms
    and losses), ``mult`` (activations and losses) and ``scale_power`` (layers with a weight).

    Args:
        function: The function.
        factors: As in :class:`~lightning_unitscale.functional.rules.ScaleRule`.
        kind: The same.
        reference: The same.
        parameters: Parameters of the function, such as ``"input, beta=1, threshold=20"``, if Python
            cannot inspect them.
        name: Name of the operation, if it differs from the function's.
        weights: As in :class:`~lightning_unitscale.functional.rules.ScaleRule`, separated by
            blanks.
        operands: The same.
        aliases: Further torch names of the operation, separated by blanks. ``None`` if torch's
            other operations of that name take other arguments.

    Returns:
        A function of the same name and parameters, followed by those of unit scaling.
    """
    of_torch = _parameters(function, parameters)
    rule = ScaleRule(
        name or function.__name__,
        tuple(parameter.name for parameter in of_torch),
        factors,
        kind,
        reference,
        tuple(weights.split()),
        of_torch[-1].kind is inspect.Parameter.VAR_POSITIONAL,
        tuple(operands.split()),
    )
    names = () if aliases is None else (rule.name, *aliases.split())
    register_rule(rule, function, names=names)
    options = [option for option, (_, _, has_it) in _OPTIONS.items() if has_it(rule)]
    required = [
        parameter.name
        for parameter in of_torch
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
    ]
    signature = inspect.Signature(
        of_torch
        + [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=_OPTIONS[option][0])
            for option in options
        ]
    )
    # In place, other readers of the tensor would not see the factor.
    in_place = rule.parameters.index("inplace") if "inplace" in rule.parameters else None
    call = scaled_loss if rule.kind == "loss" else scaled_call

    def op(*args: Any, **kwargs: Any) -> Any:
        own = {option: kwargs.pop(option) for option in options if option in kwargs}
        kwargs.pop("inplace", None)
        args = args[:in_place]
        missing = [name for name in required[len(args) :] if name not in kwargs]
        if missing:
            raise TypeError(f"{rule.name}: {missing[0]!r} is missing; its arguments: {signature}.")
        return call(rule, function, args, kwargs, **own)

    op.__name__ = op.__qualname__ = rule.name
    op.__doc__ = _docstring(rule, options)
    op.__signature__ = signature  # type: ignore[attr-defined]
    return op


def _parameters(function: Callable[..., Any], text: str | None) -> list[inspect.Parameter]:
    if text is not None:
        return [_parameter(part.strip()) for part in text.split(",")]
    return [
        parameter.replace(annotation=parameter.empty)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "out"
    ]


def _parameter(text: str) -> inspect.Parameter:
    name, equals, default = text.partition("=")
    if name.startswith("*"):
        return inspect.Parameter(name[1:], inspect.Parameter.VAR_POSITIONAL)
    value = ast.literal_eval(default) if equals else inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value)


def _docstring(rule: ScaleRule, options: Sequence[str]) -> str:
    if rule.kind == "loss":
        what = "Its value is the unscaled loss. The gradients of its arguments are at RMS 1."
    else:
        what = "Its output and the gradients of its arguments are at RMS 1 for inputs at RMS 1."
    lines = [f"Unit-scaled form of torch's ``{rule.name}``.", "", what]
    if "inplace" in rule.parameters:
        lines.append("``inplace`` is accepted and has no effect: the result is a new tensor.")
    if options:
        lines += ["", "Args, besides those of torch:"]
        lines += [f"    {name}: {_OPTIONS[name][1]}" for name in options]
    lines += ["", "Raises:", "    TypeError: If the first tensor is not a floating-point one."]
    if options:
        lines.append(f"    ValueError: If one of {', '.join(options)} is not usable.")
    return "\n".join([*lines, "", "References:", f"    {rule.reference}.", ""])

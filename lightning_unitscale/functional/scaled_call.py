"""Calling an operation with the factors that its rule gives: all unit-scaled operations are this.

Factors of gradients are placed where tensors enter, that of the output where it leaves. A loss has
its factor on the gradient that enters it, before anything divides by the number of elements: in 16
bits the plain gradient of a mean over many tokens would already be 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.functional.constraints import apply_constraint
from lightning_unitscale.functional.rule import Factors, ScaleRule, rule_of_function
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
    """Call ``function`` such that its output and the gradients of its arguments are at RMS 1.

    Args:
        rule: What ``function`` does to scales.
        function: The plain operation.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        constraint: See :func:`~lightning_unitscale.functional.constraints.apply_constraint`;
            gradients of weights are never constrained.
        mult: The first argument is multiplied by it.
        scale_power: Powers of the number of terms in the sums that make the output, the gradients
            of inputs, and the gradients of weights.

    Returns:
        What ``function`` returns, scaled; of several results only the first is scaled.

    Raises:
        TypeError: If the first tensor that gets a gradient is not a floating-point one.
        ValueError: If ``constraint``, ``mult`` or ``scale_power`` is not usable.
    """
    mult = positive(f"{rule.name}: mult", mult)
    _check_power(rule, scale_power)
    kwargs = dict(kwargs or {})
    arguments = rule.bind(tuple(args), kwargs)
    factors = _factors(rule, function, arguments, mult, args, kwargs)
    tensors = _differentiable(rule, arguments, factors)
    output, gradients = _constrained(rule, factors, tensors, constraint, scale_power)
    scaled = {place: _enter(tensors[place], gradients[place]) for place in tensors}
    if mult != 1.0:
        first = _first_place(rule, tensors)
        scaled[first] = scale(tensors[first], mult, mult * gradients[first])
    args, kwargs = _rebuilt(rule, args, kwargs, scaled)
    result = function(*args, **kwargs)
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
    """Call a loss: its value is the plain one, the gradients of its arguments are at RMS 1.

    16-bit arguments are computed with in FP32, where the gradient has room on its way from the
    scalar to the elements; the result has the type that the plain loss has.

    Args:
        rule: Of kind ``"loss"``.
        function: The plain loss.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        mult: The first argument is multiplied by it.
        correction: Further factor of all gradients, for what depends on values.

    Returns:
        The loss.

    Raises:
        TypeError: If the first argument is not a floating-point tensor.
        ValueError: If ``mult`` is not a positive number.
    """
    mult = positive(f"{rule.name}: mult", mult)
    kwargs = dict(kwargs or {})
    arguments = rule.bind(tuple(args), kwargs)
    factors = _factors(rule, function, arguments, mult, args, kwargs)
    tensors = _differentiable(rule, arguments, factors)
    first = _first_place(rule, tensors)
    main = factors.gradients[first]
    dtype = tensors[first].dtype
    scaled = {}
    for place, tensor in tensors.items():
        wide = tensor.float() if tensor.dtype in _SIXTEEN_BITS else tensor
        if place == first:
            scaled[place] = wide * mult if mult != 1.0 else wide
        else:
            scaled[place] = _enter(wide, factors.gradients[place] / main)
    for place, value in arguments.items():  # weights and targets of the same type
        if place not in scaled and isinstance(value, Tensor) and value.dtype in _SIXTEEN_BITS:
            scaled[place] = value.float()
    args, kwargs = _rebuilt(rule, args, kwargs, scaled)
    loss = scale_bwd(function(*args, **kwargs), main * correction)
    if dtype in _SIXTEEN_BITS and not torch.is_autocast_enabled(tensors[first].device.type):
        return loss.to(dtype)
    return loss


def rule_for(function: Callable[..., Any]) -> ScaleRule:
    """The rule of a function.

    Raises:
        ValueError: If it has none.
    """
    rule = rule_of_function(function)
    if rule is None:
        raise ValueError(
            f"function={function!r}: it has no rule; expected a function that register_rule knows. "
            "For an elementwise one, elementwise_factors finds its factors."
        )
    return rule


def _factors(
    rule: ScaleRule,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    mult: float,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Factors:
    try:
        return rule.factors({**arguments, "mult": mult})
    except (IndexError, KeyError, TypeError, ValueError):
        # Shapes that do not fit: torch says so in the words that its users know.
        function(*args, **kwargs)
        raise


def _enter(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else scale_bwd(tensor, factor)


def _leave(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else scale_fwd(tensor, factor)


def _differentiable(
    rule: ScaleRule, arguments: Mapping[str, Any], factors: Factors
) -> dict[str, Tensor]:
    """Floating-point tensors among the arguments that get a factor, by place."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items():
        items = list(enumerate(value)) if isinstance(value, (list, tuple)) else [(None, value)]
        for index, item in items:
            factor = factors.gradient(name, index)
            if factor is None or not isinstance(item, Tensor):
                continue
            if not item.is_floating_point():
                if found or name in rule.weights:
                    continue
                raise TypeError(
                    f"{rule.name}: {name} is a tensor of type {item.dtype}; expected a real "
                    "floating-point one. Convert it first, or use the function of torch."
                )
            found[name if index is None else f"{name}.{index}"] = item
    return found


def _first_place(rule: ScaleRule, tensors: Mapping[str, Tensor]) -> str:
    for place in tensors:
        if place.partition(".")[0] not in rule.weights:
            return place
    raise TypeError(
        f"{rule.name}: no floating-point tensor to multiply by mult is among its inputs."
    )


def _constrained(
    rule: ScaleRule,
    factors: Factors,
    tensors: Mapping[str, Tensor],
    constraint: str | None,
    scale_power: ScalePower,
) -> tuple[float, dict[str, float]]:
    weights = [place for place in tensors if place.partition(".")[0] in rule.weights]
    inputs = [place for place in tensors if place not in weights]
    given = {place: _gradient(factors, place) for place in tensors}
    # A factor is the -1/2 power of a number of terms.
    output = _power(factors.output, scale_power[0])
    of_inputs = [_power(given[place], scale_power[1]) for place in inputs]
    output, *of_inputs = apply_constraint(constraint, output, *of_inputs)
    gradients = dict(zip(inputs, of_inputs, strict=True))
    for place in weights:
        gradients[place] = _power(given[place], scale_power[2])
    return output, gradients


def _gradient(factors: Factors, place: str) -> float:
    exact = factors.gradients.get(place)
    return factors.gradients[place.partition(".")[0]] if exact is None else exact


def _power(factor: float, power: float) -> float:
    result: float = factor if power == 0.5 else factor ** (2 * power)
    return result


def _rebuilt(
    rule: ScaleRule, args: Sequence[Any], kwargs: Mapping[str, Any], scaled: Mapping[str, Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """The call with the scaled tensors in their places."""
    new_args = []
    last = len(rule.parameters) - 1
    is_list = len(args) == last + 1 and isinstance(args[last], (list, tuple))
    for position, value in enumerate(args):
        name = rule.parameters[min(position, last)]
        if rule.is_variadic and position >= last and not is_list:
            new_args.append(scaled.get(f"{name}.{position - last}", value))
        else:
            new_args.append(_replaced(name, value, scaled))
    return new_args, {name: _replaced(name, value, scaled) for name, value in kwargs.items()}


def _replaced(name: str, value: Any, scaled: Mapping[str, Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([scaled.get(f"{name}.{i}", one) for i, one in enumerate(value)])
    return scaled.get(name, value)


def positive(name: str, factor: float) -> float:
    """The factor, or an error that names it where it is no positive number."""
    if factor == 1.0:
        return 1.0  # a number, where a compiler has made a symbol of it
    if not 0 < factor < math.inf:
        raise ValueError(
            f"{name}={factor}: what is multiplied by it has no unit scale; expected a positive "
            "number."
        )
    return factor


def _check_power(rule: ScaleRule, scale_power: ScalePower) -> None:
    if len(scale_power) != 3 or not all([-math.inf < one < math.inf for one in scale_power]):
        raise ValueError(
            f"{rule.name}: scale_power={scale_power!r}: expected three numbers, the powers for the "
            "output, the gradient of the input, and the gradients of weight and bias."
        )

"""The registry of scale rules: what an operation does to scales, and how to undo it.

One rule serves both the operations of this package that are called by hand and the transform that
finds the operation in a captured graph. A rule reads shapes and numbers, never values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F

Kind = Literal["linear", "activation", "normalization", "loss", "sum", "other"]


@dataclass(frozen=True)
class Factors:
    """What brings the results of one call to RMS 1, each by itself.

    Attributes:
        output: Factor on the output, for inputs at RMS 1.
        gradients: For each tensor argument the factor on its gradient, as the operation itself
            computes it from a gradient at RMS 1 of its own (unscaled) output. Arguments that are
            absent get no gradient. A list of tensors has one factor for all, or where they differ
            (the operands of an ``einsum``) one for each, under ``operands.0``, ``operands.1``, ...
    """

    output: float
    gradients: Mapping[str, float] = field(default_factory=dict)

    def gradient(self, name: str, index: int | None = None) -> float | None:
        """Factor on the gradient of an argument, or ``None`` where it gets none.

        Args:
            name: The parameter.
            index: Place in the list where the parameter is a list of tensors.
        """
        if index is not None and f"{name}.{index}" in self.gradients:
            return self.gradients[f"{name}.{index}"]
        return self.gradients.get(name)


@dataclass(frozen=True)
class ScaleRule:
    """How one operation changes the scale of its arguments.

    Attributes:
        name: Name of the operation, as in ``torch.nn.functional`` where it is there.
        parameters: Names of its parameters in positional order.
        factors: From the arguments by name (tensors for their shapes only) to the factors.
            ``mult`` among them is the RMS of the first argument where it is not 1: the operation
            is then seen as one of that argument divided by ``mult``, whose gradient (``mult``
            times the argument's own) is what the first argument's factor is for.
        kind: ``"linear"`` maps are homogeneous in each tensor argument; a ``"loss"`` keeps its
            forward value and has the factor of its gradient only.
        reference: Paper section or equation, or how it was derived.
        weights: Parameters whose gradient is summed over the batch. The second operand of a
            product may be a weight too: only the caller knows.
        is_variadic: Whether the last parameter takes all further positional arguments, as a list.
    """

    name: str
    parameters: tuple[str, ...]
    factors: Callable[[Mapping[str, Any]], Factors]
    kind: Kind
    reference: str
    weights: tuple[str, ...] = ()
    is_variadic: bool = False

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call by name.

        Raises:
            TypeError: If the call does not fit the parameters.
        """
        if self.is_variadic and len(args) >= len(self.parameters):
            fixed = len(self.parameters) - 1
            rest = args[fixed:]
            is_list = len(rest) == 1 and isinstance(rest[0], (list, tuple))
            args = (*args[:fixed], list(rest[0]) if is_list else list(rest))
        if len(args) > len(self.parameters):
            raise TypeError(
                f"{self.name}: {len(args)} positional arguments; expected at most "
                f"{len(self.parameters)}: {', '.join(self.parameters)}."
            )
        bound = dict(zip(self.parameters, args, strict=False))
        twice = [name for name in kwargs if name in bound]
        if twice:
            raise TypeError(f"{self.name}: {twice[0]!r} is given by position and by name.")
        return {**bound, **kwargs}


def unit_factor(mean_square: float) -> float:
    """What brings a tensor of this mean square to RMS 1; 1 for a tensor of zeros."""
    factor: float = mean_square**-0.5 if mean_square > 0 else 1.0
    return factor


_BY_FUNCTION: dict[Any, ScaleRule] = {}
_BY_METHOD: dict[str, ScaleRule] = {}
_NAMESPACES = (F, torch, torch.special, torch.linalg, operator)


def register_rule(
    rule: ScaleRule, *functions: Callable[..., Any], names: tuple[str, ...] = ()
) -> ScaleRule:
    """Let the transform know an operation.

    Args:
        rule: What it does to scales.
        *functions: Functions that the rule describes; a user's own among them must be named in the
            transform's ``replace`` too, or the capture looks into it.
        names: Names by which torch knows it: as a function of ``torch``, of
            ``torch.nn.functional``, an operator, and a method of tensors, in place or not.

    Returns:
        The rule.
    """
    for function in functions:
        _BY_FUNCTION[function] = rule
    for name in names:
        for form in (name, f"{name}_"):
            for namespace in _NAMESPACES:
                found = getattr(namespace, form, None)
                if callable(found):
                    _BY_FUNCTION[found] = rule
            if hasattr(torch.Tensor, form):
                _BY_METHOD[form] = rule
    return rule


def rule_of_function(function: object) -> ScaleRule | None:
    """The rule of a function, or ``None``."""
    try:
        return _BY_FUNCTION.get(function)
    except TypeError:  # an unhashable callable is none of ours
        return None


def rule_of_method(name: str) -> ScaleRule | None:
    """The rule of a method of tensors, or ``None``."""
    return _BY_METHOD.get(name)


def registered_rules() -> tuple[ScaleRule, ...]:
    """Every rule once, in the order of registration."""
    return tuple({id(one): one for one in _BY_FUNCTION.values()}.values())

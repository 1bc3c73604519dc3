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
            absent get no gradient. A list of tensors has one factor for all.
    """

    output: float
    gradients: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ScaleRule:
    """How one operation changes the scale of its arguments.

    Attributes:
        name: Name of the operation, as in ``torch.nn.functional`` where it is there.
        parameters: Names of its parameters in positional order.
        factors: From the arguments by name (tensors for their shapes only) to the factors.
            ``mult`` among them is the RMS of the first argument where it is not 1: gradients are
            those of the first argument divided by it.
        kind: ``"linear"`` maps are homogeneous in each tensor argument; a ``"loss"`` keeps its
            forward value and has the factor of its gradient only.
        reference: Paper section or equation, or how it was derived.
        weights: Parameters whose gradient is summed over the batch.
    """

    name: str
    parameters: tuple[str, ...]
    factors: Callable[[Mapping[str, Any]], Factors]
    kind: Kind
    reference: str
    weights: tuple[str, ...] = ()

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call by name.

        Raises:
            TypeError: If the call does not fit the parameters.
        """
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
                function = getattr(namespace, form, None)
                if callable(function):
                    _BY_FUNCTION[function] = rule
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

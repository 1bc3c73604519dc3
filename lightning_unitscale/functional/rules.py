"""Define scale rules: an operation's effect on the scale of tensors, and its factors.

One rule serves both the unit-scaled operation that is called by hand and the transform that finds
the unscaled operation in a captured graph. A rule reads shapes and numbers, never values.

With one factor for the output and for the gradients, the scaled operation's gradient is the
derivative of its result. With several it is that times a constant (see ``apply_constraint``).

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), section 4, constraints on cut edges.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.compiling import is_compiling
from lightning_unitscale.functional.moments import elementwise_moments

Kind = Literal["linear", "activation", "normalization", "loss", "sum", "other"]


@dataclass(frozen=True)
class Factors:
    """Factors that bring the results of one call to RMS 1, each by itself.

    Attributes:
        output: Factor on the output, for inputs at RMS 1.
        gradients: For each tensor argument the factor on its gradient, as the operation itself
            computes it from a gradient at RMS 1 of its own (unscaled) output. Absent arguments get
            no gradient. Tensors in a list are ``operands.0``, ``operands.1``, ...
    """

    output: float
    gradients: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ScaleRule:
    """Effect of one operation on the scale of its arguments.

    Attributes:
        name: Name of the operation, as in ``torch.nn.functional`` if it exists there.
        parameters: Names of its parameters in positional order.
        factors: Function from the arguments by name (tensors for their shapes only) to the factors.
            It raises ``ValueError`` for arguments that the rule does not cover. ``mult`` is the RMS
            of the first argument ``x`` if that is not 1. The rule then describes the operation as a
            function of ``x / mult``. The factor for ``x`` is for the gradient of that quotient.
        kind: How rules and the unit-scaled form treat it. ``"linear"``: homogeneous in each tensor
            argument, so that the RMS of an input scales the output. ``"sum"``: the same for two
            tensors together. ``"activation"``: not homogeneous, elementwise or nearly so. It takes
            ``mult``, u-muP's under rules. ``"normalization"``: its output is at RMS 1 for any
            input. ``"loss"``: keeps its forward value and has a factor on its gradient only.
            ``"other"``: none of these, such as a variance. Its input's RMS goes into ``factors`` as
            ``mult``.
        reference: Paper section or equation, or how it was derived.
        weights: Parameters whose gradient is summed over the batch. The second operand of a matmul
            may be a weight too, which only the caller knows.
        is_variadic: Whether the last parameter takes all further positional arguments, as a list.
        operands: Parameters that a matmul multiplies. It is linear in each, and each tensor in a
            list counts. Empty if it is not a matmul.
    """

    name: str
    parameters: tuple[str, ...]
    factors: Callable[[Mapping[str, Any]], Factors]
    kind: Kind
    reference: str
    weights: tuple[str, ...] = ()
    is_variadic: bool = False
    operands: tuple[str, ...] = ()

    @property
    def addends(self) -> tuple[str, ...]:
        """Return the parameters that are added to a matmul unscaled."""
        return tuple(name for name in self.weights if name not in self.operands)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, if it fits the parameters."""
        if self.is_variadic and len(args) >= len(self.parameters):
            fixed = len(self.parameters) - 1
            rest = args[fixed:]
            is_list = len(rest) == 1 and isinstance(rest[0], (list, tuple))
            args = (*args[:fixed], list(rest[0]) if is_list else list(rest))
        if len(args) > len(self.parameters):
            raise TypeError(
                f"{self.name}: {len(args)} positional arguments. Expected at most "
                f"{len(self.parameters)}: {', '.join(self.parameters)}."
            )
        bound = dict(zip(self.parameters, args, strict=False))
        twice = [name for name in kwargs if name in bound]
        if twice:
            raise TypeError(f"{self.name}: {twice[0]!r} is given by position and by name.")
        return {**bound, **kwargs}


def unit_factor(mean_square: float) -> float:
    """Return the factor that brings this mean square to RMS 1, or 1 for a tensor of zeros."""
    return mean_square**-0.5 if mean_square > 0 else 1.0


def unit_factors(output: float, **gradients: float) -> Factors:
    """Return the factors that bring these mean squares of output and gradients to RMS 1."""
    return Factors(
        unit_factor(output), {name: unit_factor(square) for name, square in gradients.items()}
    )


_BY_FUNCTION: dict[Any, ScaleRule] = {}
_BY_METHOD: dict[str, ScaleRule] = {}
_NAMESPACES = (F, torch, torch.special, torch.linalg, operator)


def register_rule(
    rule: ScaleRule, *functions: Callable[..., Any], names: tuple[str, ...] = ()
) -> ScaleRule:
    """Register the rule of an operation, by which the transform finds it in a graph.

    Args:
        rule: The rule.
        *functions: Functions that the rule describes. Name a user's own function in the transform's
            ``replace`` too, or the capture traces into it.
        names: Names of the operation in torch: as a function of ``torch`` or
            ``torch.nn.functional``, an operator, and a method of tensors, in place or not.

    Returns:
        The rule.
    """
    for function in functions:
        _BY_FUNCTION[function] = rule
    for name in names:
        for form in (name, f"{name}_"):
            for namespace in _NAMESPACES:
                function_of_torch = getattr(namespace, form, None)
                if callable(function_of_torch):
                    _BY_FUNCTION[function_of_torch] = rule
            if hasattr(torch.Tensor, form):
                _BY_METHOD[form] = rule
    return rule


def rule_of_function(function: object) -> ScaleRule | None:
    """Return the rule of a function, or ``None``."""
    try:
        return _BY_FUNCTION.get(function)
    except TypeError:  # an unhashable callable has none
        return None


def rule_of_method(name: str) -> ScaleRule | None:
    """Return the rule of a method of tensors, or ``None``."""
    return _BY_METHOD.get(name)


def matmul_names() -> set[str]:
    """Return the names of the functions and methods of torch that multiply matrices."""
    functions = {function.__name__: rule for function, rule in _BY_FUNCTION.items()}
    return {name for name, rule in {**functions, **_BY_METHOD}.items() if rule.operands}


def registered_rules() -> tuple[ScaleRule, ...]:
    """Return every rule once, in the order of registration."""
    return tuple({id(rule): rule for rule in _BY_FUNCTION.values()}.values())


def elementwise_factors(
    function: Callable[..., Tensor], mult: float = 1.0, **options: Any
) -> Factors:
    """Compute the factors of any elementwise function of a normal tensor, in FP64."""
    # With x ~ N(0, 1) the output factor is (E f(mult x)^2)^(-1/2). The gradient is taken with
    # respect to x, as in every rule, so its factor is (mult^2 E f'(mult x)^2)^(-1/2), where f' is
    # autograd's derivative. It is absent if the derivative is 0 everywhere.
    output, gradient = elementwise_moments(function, mult, tuple(options.items()))
    gradients = {"input": (mult**2 * gradient) ** -0.5} if gradient * mult else {}
    return Factors(output**-0.5 if output else 1.0, gradients)


def hint_of(value: Any) -> Any:
    """Return a symbolic number's value in the captured call, or any other value unchanged."""
    # This adds no guard. It is ``None`` if the number depends on the values of a tensor.
    is_symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return value.node.hint if is_symbolic else value


def concrete_size(size: int | torch.SymInt) -> int:
    """Return the number behind a symbolic size, without adding a guard on it."""
    if isinstance(size, int):
        return size
    hint = hint_of(size)
    # The length of a ragged dimension differs from row to row.
    if hint is None or isinstance(hint, torch.SymInt):
        raise ValueError(
            f"size={size}: it depends on the values of a tensor. Expected a size that is known "
            "before the step runs."
        )
    return int(hint)


def specialized(size: int) -> int:
    """Return the number of a size for a computation that a compiler does not trace."""
    # A compiled graph is then specialized to this size, and another size recompiles.
    return len(range(size)) if is_compiling() else size


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the sizes of a tensor. A number has none."""
    if not isinstance(value, Tensor):
        return ()
    return tuple([concrete_size(size) for size in value.shape])


def broadcast_shapes(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that two shapes broadcast to."""
    length = max(len(first), len(second))
    first = (1,) * (length - len(first)) + first
    second = (1,) * (length - len(second)) + second
    return tuple([b if a == 1 else a for a, b in zip(first, second, strict=True)])


def product(sizes: Iterable[float]) -> float:
    """Multiply numbers, 1 for none: ``math.prod`` that a compiler can trace."""
    result: float = 1
    for size in sizes:
        result = result * size
    return result


def numel_of(value: Any) -> float:
    """Return the number of elements of a tensor. A number is one."""
    if isinstance(value, Tensor) and value.layout is torch.jagged:
        value = value.values()
    return product(shape_of(value))


def tuple_of(value: int | Iterable[int] | None, length: int, default: int) -> tuple[int, ...]:
    """Return one number per spatial dimension from torch's number or sequence."""
    if value is None:
        return (default,) * length
    if isinstance(value, (int, torch.SymInt)):
        return (concrete_size(value),) * length
    numbers = tuple([concrete_size(size) for size in value])
    if not numbers:
        return (default,) * length
    return numbers * length if len(numbers) == 1 else numbers


# A constraint's value for the output and all gradients: the geometric, harmonic or arithmetic mean
# of their factors, or the factor of the output, of the only gradient, or of one of two.
_MEANS: dict[str, Callable[[tuple[float, ...]], float]] = {
    "gmean": lambda factors: math.exp(sum([math.log(factor) for factor in factors]) / len(factors)),
    "hmean": lambda factors: len(factors) / sum([1 / factor for factor in factors]),
    "amean": lambda factors: sum(factors) / len(factors),
}
# Position among (output, *gradients), and the number of gradients for which it is valid.
_POSITIONS: dict[str, tuple[int, int | None]] = {
    "to_output_scale": (0, None),
    "to_grad_input_scale": (1, 1),
    "to_left_grad_scale": (1, 2),
    "to_right_grad_scale": (2, 2),
}


def apply_constraint(constraint: str | None, *factors: float) -> tuple[float, ...]:
    """Make the factors of the output and of the gradients agree, or keep them if ``None``."""
    if constraint is None:
        return factors
    if constraint in _MEANS:
        return (_MEANS[constraint](factors),) * len(factors)
    if constraint not in _POSITIONS:
        raise ValueError(
            f"constraint={constraint!r}: unknown. Expected None or one of "
            f"{', '.join([*_POSITIONS, *_MEANS])}."
        )
    position, num_gradients = _POSITIONS[constraint]
    if num_gradients is not None and len(factors) != num_gradients + 1:
        raise ValueError(
            f"constraint={constraint!r}: this operation has {len(factors) - 1} constrained "
            f"gradients. Expected {num_gradients}. Use 'to_output_scale', 'gmean', or None."
        )
    return (factors[position],) * len(factors)

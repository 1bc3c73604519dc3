"""Sums, products and reductions: their scale rules, their unit-scaled forms, and the residual add.

A residual branch of weight tau beside a skip of weight 1 is split off before it and added after it.
The weight acts on the branch's output in the forward pass, and on the gradient of its input in the
backward pass: inside of the branch both are at RMS 1, however small tau is.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops, and weighted residual adds.
    Blake et al., "u-muP" (arXiv 2407.17465), appendix on residual scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.call import scaled_call, scaled_op
from lightning_unitscale.functional.rules import (
    Factors,
    broadcast,
    numel_of,
    product,
    register_rule,
    shape_of,
    torch_rule,
    unit_factor,
)
from lightning_unitscale.functional.scale import scale_bwd, scale_fwd

__all__ = [
    "add", "alpha_dropout", "cat", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "feature_alpha_dropout", "mean", "mul", "residual_add", "residual_apply", "residual_split",
    "stack", "sub", "sum",
]  # fmt: skip

_REFERENCE = "Unit Scaling (arXiv 2303.11257), table of ops"
# The constant of torch's alpha_dropout: the value that SELU tends to from below.
_SELU_FLOOR = -1.7580993408473766


def _uses(numel: float, value: Any) -> float:
    return numel / max(numel_of(value), 1)


def _add(arguments: Mapping[str, Any]) -> Factors:
    input, other = arguments["input"], arguments["other"]
    alpha, mult = float(arguments.get("alpha", 1)), arguments.get("mult", 1.0)
    numel = product(broadcast(shape_of(input), shape_of(other)))
    # One number for all does not change the spread of the rest.
    if numel_of(other) == 1:
        square = mult**2
    elif numel_of(input) == 1:
        square = alpha**2
    else:
        square = mult**2 + alpha**2
    return Factors(
        unit_factor(square),
        {
            "input": unit_factor(mult**2 * _uses(numel, input)),
            "other": unit_factor(alpha**2 * _uses(numel, other)),
        },
    )


def _mul(arguments: Mapping[str, Any]) -> Factors:
    input, other = arguments["input"], arguments["other"]
    mult = arguments.get("mult", 1.0)
    numel = product(broadcast(shape_of(input), shape_of(other)))
    return Factors(
        unit_factor(mult**2),
        {
            "input": unit_factor(mult**2 * _uses(numel, input)),
            "other": unit_factor(mult**2 * _uses(numel, other)),
        },
    )


def _reduced(arguments: Mapping[str, Any]) -> float:
    """Number of elements that go into each one of the output."""
    shape = shape_of(arguments["input"])
    dim = arguments.get("dim")
    if dim is None or dim == ():
        return product(shape)
    dims = (dim,) if isinstance(dim, int) else dim
    return product([shape[dim] for dim in dims]) if shape else 1


def _sum(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    return Factors(unit_factor(mult**2 * _reduced(arguments)), {"input": unit_factor(mult**2)})


def _mean(arguments: Mapping[str, Any]) -> Factors:
    mult, count = arguments.get("mult", 1.0), max(_reduced(arguments), 1)
    return Factors(unit_factor(mult**2 / count), {"input": unit_factor((mult / count) ** 2)})


def _join(arguments: Mapping[str, Any]) -> Factors:
    factor = unit_factor(arguments.get("mult", 1.0) ** 2)
    return Factors(factor, {"tensors": factor})


def _kept(arguments: Mapping[str, Any], default: bool) -> float:
    training = arguments.get("training", arguments.get("train", default))
    return 1 - arguments.get("p", 0.5) if training else 1.0


def _dropout(arguments: Mapping[str, Any]) -> Factors:
    kept, mult = _kept(arguments, default=True), arguments.get("mult", 1.0)
    factor = unit_factor(mult**2 / kept) if kept > 0 else 1.0
    return Factors(factor, {"input": factor})


def _alpha_dropout(arguments: Mapping[str, Any]) -> Factors:
    kept, mult = _kept(arguments, default=False), arguments.get("mult", 1.0)
    dropped = 1 - kept
    # a (x or the floor) + b, with a and b such that mean 0 and variance 1 stay so.
    square = 1 / (kept * (1 + dropped * _SELU_FLOOR**2)) if kept > 0 else 0.0
    output = 1 + square * kept * (mult**2 - 1)
    return Factors(unit_factor(output), {"input": unit_factor(mult**2 * square * kept)})


_DROPOUT_PARAMETERS = "input p training inplace"
_DROPOUT = _REFERENCE + ", dropout: what is kept is divided by (1 - p)^0.5 in place of 1 - p"
_MOVES = "moves numbers, and changes none"

_ADD = torch_rule(
    "add",
    "input other",
    _add,
    "sum",
    _REFERENCE + ", add; alpha weighs the second",
    aliases="iadd __add__ __radd__ __iadd__",
)
torch_rule(
    "sub",
    "input other",
    _add,
    "sum",
    "as add: a sign changes no scale",
    aliases="isub subtract __sub__ __isub__",
)
torch_rule(
    "mul",
    "input other",
    _mul,
    "linear",
    "a product of two independent tensors at RMS 1 is at RMS 1; sums over what is broadcast",
    aliases="imul multiply __mul__ __rmul__ __imul__",
)
torch_rule(
    "sum",
    "input dim keepdim dtype",
    _sum,
    "linear",
    "a sum of n independent numbers has variance n",
)
torch_rule(
    "mean", "input dim keepdim dtype", _mean, "linear", "a mean of n numbers has variance 1 / n"
)
# torch.concat by itself, since operator.concat joins lists.
_CAT = torch_rule("cat", "tensors dim", _join, "linear", _MOVES, aliases="concatenate")
register_rule(_CAT, torch.concat)
torch_rule("stack", "tensors dim", _join, "linear", _MOVES, aliases="hstack vstack dstack")
for _name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"):
    torch_rule(_name, _DROPOUT_PARAMETERS, _dropout, "linear", _DROPOUT)
for _name in ("alpha_dropout", "feature_alpha_dropout"):
    torch_rule(
        _name,
        _DROPOUT_PARAMETERS,
        _alpha_dropout,
        "activation",
        "keeps mean 0 and variance 1 by its own design; the gradient passes where kept",
    )

sub = scaled_op(torch.sub, "input, other")
mul = scaled_op(torch.mul, "input, other")
sum = scaled_op(torch.sum, "input, dim=None, keepdim=False, dtype=None")
mean = scaled_op(torch.mean, "input, dim=None, keepdim=False, dtype=None")
cat = scaled_op(torch.cat, "tensors, dim=0")
stack = scaled_op(torch.stack, "tensors, dim=0")
dropout = scaled_op(F.dropout)
dropout1d = scaled_op(F.dropout1d)
dropout2d = scaled_op(F.dropout2d)
dropout3d = scaled_op(F.dropout3d)
alpha_dropout = scaled_op(F.alpha_dropout)
feature_alpha_dropout = scaled_op(F.feature_alpha_dropout)


def add(
    input: Tensor | float,
    other: Tensor | float,
    *,
    alpha: float = 1,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Unit-scaled ``input + alpha * other``.

    Args:
        input: Any shape, at RMS 1, or a number.
        other: A shape that broadcasts with it, or a number.
        alpha: Weight of ``other``.
        constraint: Between the factors of the output and of the two gradients.

    Returns:
        The sum times ``(1 + alpha**2)**-0.5``; the plain sum where one side is a single number.

    Raises:
        TypeError: If ``input`` is an integer tensor.
        ValueError: If ``constraint`` is unknown.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops.
    """
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return torch.add(input, other, alpha=alpha)
    kwargs = {"alpha": alpha}
    result: Tensor = scaled_call(_ADD, torch.add, (input, other), kwargs, constraint=constraint)
    return result


def residual_split(input: Tensor, tau: float = 1.0) -> tuple[Tensor, Tensor]:
    """Split a tensor into the input of a residual branch and the skip connection.

    Args:
        input: Any shape.
        tau: Weight of the branch relative to the skip connection, 0 or more; the same as in
            :func:`residual_add`.

    Returns:
        ``(residual, skip)``, both ``input``; their gradients are weighted.

    Raises:
        ValueError: If ``tau`` is negative or not finite.
    """
    branch_weight, skip_weight = residual_weights(tau)
    return scale_bwd(input, branch_weight), scale_bwd(input, skip_weight)


def residual_add(residual: Tensor, skip: Tensor, tau: float = 1.0) -> Tensor:
    """Add the output of a residual branch to the skip connection.

    Args:
        residual: Output of the branch, at RMS 1.
        skip: The skip connection, at RMS 1, of the same shape.
        tau: Weight of the branch relative to the skip connection, 0 or more.

    Returns:
        ``(tau * residual + skip) / (1 + tau**2)**0.5``, at RMS 1.

    Raises:
        ValueError: If ``tau`` is negative or not finite.
    """
    branch_weight, skip_weight = residual_weights(tau)
    return scale_fwd(residual, branch_weight) + scale_fwd(skip, skip_weight)


def residual_apply(fn: Callable[[Tensor], Tensor], input: Tensor, tau: float = 1.0) -> Tensor:
    """Apply a residual branch: :func:`residual_split`, ``fn``, :func:`residual_add`.

    Args:
        fn: The branch, from a tensor to one of the same shape.
        input: Any shape.
        tau: Weight of the branch relative to the skip connection, 0 or more.

    Returns:
        ``(tau * fn(input) + input) / (1 + tau**2)**0.5``.

    Raises:
        ValueError: If ``tau`` is negative or not finite.
    """
    residual, skip = residual_split(input, tau)
    return residual_add(fn(residual), skip, tau)


def residual_weights(tau: float) -> tuple[float, float]:
    """Weights of the branch and of the skip connection; their squares add up to 1."""
    if not 0 <= tau < math.inf:
        raise ValueError(
            f"tau={tau}: it is no weight of a residual branch; expected a finite number, 0 or more."
        )
    total = math.sqrt(1 + tau**2)
    return tau / total, 1 / total

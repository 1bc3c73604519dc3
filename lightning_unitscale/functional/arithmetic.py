"""Define scale rules and unit-scaled forms of sums, products, reductions and residual adds.

A residual branch of weight tau with a skip of weight 1 is split off before it and added after it.
The weight applies to the branch's output in the forward pass, and to the gradient of its input in
the backward pass. So inside the branch both are at RMS 1, however small tau is.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops, and weighted residual adds.
    Blake et al., "u-muP" (arXiv 2407.17465), appendix on residual scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.call import scaled_call, scaled_op
from lightning_unitscale.functional.rules import (
    Factors,
    ScaleRule,
    broadcast_shapes,
    numel_of,
    product,
    register_rule,
    shape_of,
    unit_factors,
)
from lightning_unitscale.functional.scale import scale_bwd, scale_fwd

__all__ = [
    "add", "alpha_dropout", "cat", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "feature_alpha_dropout", "mean", "mul", "residual_add", "residual_apply", "residual_split",
    "stack", "sub", "sum",
]  # fmt: skip

_REFERENCE = "Unit Scaling (arXiv 2303.11257), table of ops"
# The constant of torch's alpha_dropout: the limit of SELU from below.
_SELU_FLOOR = -1.7580993408473766


def _uses(arguments: Mapping[str, Any]) -> tuple[float, float]:
    """Count the elements of the output that each element of both operands goes into."""
    input, other = arguments["input"], arguments["other"]
    numel = product(broadcast_shapes(shape_of(input), shape_of(other)))
    return numel / max(numel_of(input), 1), numel / max(numel_of(other), 1)


def _add(arguments: Mapping[str, Any]) -> Factors:
    alpha, mult = float(arguments.get("alpha", 1)), arguments.get("mult", 1.0)
    of_input, of_other = _uses(arguments)
    # One number for all does not change the spread of the rest.
    if numel_of(arguments["other"]) == 1:
        square = mult**2
    elif numel_of(arguments["input"]) == 1:
        square = alpha**2
    else:
        square = mult**2 + alpha**2
    return unit_factors(square, input=mult**2 * of_input, other=alpha**2 * of_other)


def _mul(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    of_input, of_other = _uses(arguments)
    return unit_factors(mult**2, input=mult**2 * of_input, other=mult**2 * of_other)


def _reduced(arguments: Mapping[str, Any]) -> float:
    """Count the elements that go into each element of the output."""
    shape = shape_of(arguments["input"])
    dim = arguments.get("dim")
    if dim is None or dim == ():
        return product(shape)
    dims = (dim,) if isinstance(dim, int) else dim
    return product([shape[dim] for dim in dims]) if shape else 1


def _sum(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    return unit_factors(mult**2 * _reduced(arguments), input=mult**2)


def _mean(arguments: Mapping[str, Any]) -> Factors:
    mult, count = arguments.get("mult", 1.0), max(_reduced(arguments), 1)
    return unit_factors(mult**2 / count, input=(mult / count) ** 2)


def _join(arguments: Mapping[str, Any]) -> Factors:
    square = arguments.get("mult", 1.0) ** 2
    names = [f"tensors.{index}" for index in range(len(arguments["tensors"]))]
    return unit_factors(square, **dict.fromkeys(names, square))


def _kept(arguments: Mapping[str, Any], default: bool) -> float:
    training = arguments.get("training", arguments.get("train", default))
    return 1 - arguments.get("p", 0.5) if training else 1.0


def _dropout(arguments: Mapping[str, Any]) -> Factors:
    kept, mult = _kept(arguments, default=True), arguments.get("mult", 1.0)
    square = mult**2 / kept if kept > 0 else 1.0
    return unit_factors(square, input=square)


def _alpha_dropout(arguments: Mapping[str, Any]) -> Factors:
    kept, mult = _kept(arguments, default=False), arguments.get("mult", 1.0)
    dropped = 1 - kept
    # a (x or the floor) + b, with a and b that keep mean 0 and variance 1.
    square = 1 / (kept * (1 + dropped * _SELU_FLOOR**2)) if kept > 0 else 0.0
    output = 1 + square * kept * (mult**2 - 1)
    return unit_factors(output, input=mult**2 * square * kept)


_ADD = register_rule(
    ScaleRule(
        "add", ("input", "other"), _add, "sum", f"{_REFERENCE}, add; alpha weighs the second"
    ),
    names=("add", "iadd", "__add__", "__radd__", "__iadd__"),
)
sub = scaled_op(
    torch.sub,
    _add,
    "sum",
    "as add: a sign changes no scale",
    "input, other",
    aliases="isub subtract __sub__ __isub__",
)
mul = scaled_op(
    torch.mul,
    _mul,
    "linear",
    "a product of two independent tensors at RMS 1 is at RMS 1; sums over what is broadcast",
    "input, other",
    aliases="imul multiply __mul__ __rmul__ __imul__",
)
_REDUCED = "input, dim=None, keepdim=False, dtype=None"
sum = scaled_op(
    torch.sum, _sum, "linear", "a sum of n independent numbers has variance n", _REDUCED
)
mean = scaled_op(torch.mean, _mean, "linear", "a mean of n numbers has variance 1 / n", _REDUCED)
_MOVES = "moves numbers, and changes none"
_joined = partial(
    scaled_op, factors=_join, kind="linear", reference=_MOVES, parameters="tensors, dim=0"
)
cat = _joined(torch.cat, aliases="concatenate")
# Separate, since operator.concat joins lists.
register_rule(ScaleRule("cat", ("tensors", "dim"), _join, "linear", _MOVES), torch.concat)
stack = _joined(torch.stack, aliases="hstack vstack dstack")

_DROPOUT = f"{_REFERENCE}, dropout: what is kept is divided by (1 - p)^0.5 in place of 1 - p"
register_rule(
    ScaleRule(
        "feature_dropout", ("input", "p", "training", "inplace"), _dropout, "linear", _DROPOUT
    ),
    names=("feature_dropout",),
)
_dropped = partial(scaled_op, factors=_dropout, kind="linear", reference=_DROPOUT)
dropout = _dropped(F.dropout)
dropout1d = _dropped(F.dropout1d)
dropout2d = _dropped(F.dropout2d)
dropout3d = _dropped(F.dropout3d)
_dropped_alpha = partial(
    scaled_op,
    factors=_alpha_dropout,
    kind="activation",
    reference="keeps mean 0 and variance 1 by its own design; the gradient passes where kept",
)
alpha_dropout = _dropped_alpha(F.alpha_dropout)
feature_alpha_dropout = _dropped_alpha(F.feature_alpha_dropout)


def add(
    input: Tensor | float,
    other: Tensor | float,
    *,
    alpha: float = 1,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Return the unit-scaled ``input + alpha * other``.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops.
    """
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return torch.add(input, other, alpha=alpha)
    kwargs = {"alpha": alpha}
    return scaled_call(_ADD, torch.add, (input, other), kwargs, constraint=constraint)


def residual_split(input: Tensor, tau: float = 1.0) -> tuple[Tensor, Tensor]:
    """Split a tensor into the input of a residual branch and the skip connection.

    Args:
        input: A tensor of any shape.
        tau: Weight of the branch relative to the skip connection, 0 or more.

    Returns:
        Two views of ``input``. Their gradients get the weights of the branch,
        ``tau / sqrt(1 + tau**2)``, and of the skip connection, ``1 / sqrt(1 + tau**2)``.

    Raises:
        ValueError: If ``tau`` is negative or not finite.
    """
    branch_weight, skip_weight = residual_weights(tau)
    return scale_bwd(input, branch_weight), scale_bwd(input, skip_weight)


def residual_add(residual: Tensor, skip: Tensor, tau: float = 1.0) -> Tensor:
    """Add the output of a residual branch to the skip connection, with the weights of the split.

    Args:
        residual: Output of the branch.
        skip: The skip connection, from :func:`residual_split`.
        tau: As in :func:`residual_split`.

    Raises:
        ValueError: If ``tau`` is negative or not finite.
    """
    branch_weight, skip_weight = residual_weights(tau)
    return scale_fwd(residual, branch_weight) + scale_fwd(skip, skip_weight)


def residual_apply(fn: Callable[[Tensor], Tensor], input: Tensor, tau: float = 1.0) -> Tensor:
    """Apply a residual branch: :func:`residual_split`, ``fn``, :func:`residual_add`."""
    residual, skip = residual_split(input, tau)
    return residual_add(fn(residual), skip, tau)


def residual_weights(tau: float) -> tuple[float, float]:
    """Return the weights of the branch and of the skip connection. Their squares add up to 1."""
    if not 0 <= tau < math.inf:
        raise ValueError(
            f"tau={tau}: not a weight of a residual branch. Expected a finite number, 0 or more."
        )
    total = math.sqrt(1 + tau**2)
    return tau / total, 1 / total

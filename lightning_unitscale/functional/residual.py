"""Sums at unit scale: add, and residual branches whose weight is delayed in the backward pass.

A branch of weight tau beside a skip of weight 1 is split off before it and added after it. The
weight acts on the branch's output going forward, and only on its input's gradient going backward:
inside of the branch both are at RMS 1, however small tau is.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), section on weighted residual adds.
    Blake et al., "u-muP" (arXiv 2407.17465), appendix on residual scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_unitscale.functional.scale import scale_bwd, scale_fwd
from lightning_unitscale.functional.scaled_call import rule_for, scaled_call

_ADD = rule_for(torch.add)


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

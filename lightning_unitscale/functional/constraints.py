"""Constraints: which factors of an operation are made equal, so that its gradient stays true.

With one factor for the output and for the gradients, the scaled operation's gradient is the
derivative of what it computes; with several it is that times a constant.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), section 4, constraints on cut edges.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def _gmean(factors: tuple[float, ...]) -> float:
    return math.exp(sum([math.log(one) for one in factors]) / len(factors))


def _hmean(factors: tuple[float, ...]) -> float:
    return len(factors) / sum([1 / one for one in factors])


def _amean(factors: tuple[float, ...]) -> float:
    return sum(factors) / len(factors)


_MEANS: dict[str, Callable[[tuple[float, ...]], float]] = {
    "gmean": _gmean,
    "hmean": _hmean,
    "amean": _amean,
}
# Place among (output, *gradients), and the number of gradients that gives it a meaning.
_PLACES: dict[str, tuple[int, int | None]] = {
    "to_output_scale": (0, None),
    "to_grad_input_scale": (1, 1),
    "to_left_grad_scale": (1, 2),
    "to_right_grad_scale": (2, 2),
}


def apply_constraint(constraint: str | None, *factors: float) -> tuple[float, ...]:
    """The factors of one operation under a constraint.

    Args:
        constraint: ``None`` leaves each as it is. ``"to_output_scale"`` takes the first for all,
            ``"gmean"``, ``"hmean"`` and ``"amean"`` their geometric, harmonic or arithmetic mean,
            ``"to_grad_input_scale"`` that of the only gradient, ``"to_left_grad_scale"`` and
            ``"to_right_grad_scale"`` that of the first or second of two gradients.
        *factors: That of the output, then those of the gradients.

    Returns:
        As many factors.

    Raises:
        ValueError: If the constraint is unknown, or has no meaning for that many gradients.
    """
    if constraint is None:
        return factors
    if constraint in _MEANS:
        return (_MEANS[constraint](factors),) * len(factors)
    if constraint not in _PLACES:
        raise ValueError(
            f"constraint={constraint!r}: unknown; expected None or one of "
            f"{', '.join([*_PLACES, *_MEANS])}."
        )
    place, num_gradients = _PLACES[constraint]
    if num_gradients is not None and len(factors) != num_gradients + 1:
        raise ValueError(
            f"constraint={constraint!r}: this operation has {len(factors) - 1} constrained "
            f"gradients; expected {num_gradients}. Use 'to_output_scale', a mean, or None."
        )
    return (factors[place],) * len(factors)

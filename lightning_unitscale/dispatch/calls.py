"""Products that autograd has recorded, by which a backward product finds what it belongs to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_unitscale.dispatch.products import ProductRule
from lightning_unitscale.dispatch.sites import Site

if TYPE_CHECKING:
    from lightning_unitscale.dispatch.session import ProductSession


@dataclass(slots=True)
class Call:
    """A product that autograd has recorded: what its backward products need to know."""

    session: ProductSession
    site: Site
    # By the address of each operand's data, which of the operands it is.
    pointers: dict[int, int]
    shapes: tuple[tuple[int, ...], ...]
    log2_units: tuple[int, ...]
    is_gradient: tuple[bool, ...]
    step: int
    # What was measured of the operands, and of the arriving gradient.
    stats: tuple[Tensor, ...] = ()
    gradient_stats: Tensor | None = None
    num_visits: int = 0


# By the number of the autograd node.
CALLS: dict[int, Call] = {}
# Forward products whose backward pass may still come; each is a few numbers.
_MAX_CALLS = 2**16


def remember(number: int, call: Call) -> None:
    """Keep a call for the backward products of an autograd node."""
    if len(CALLS) >= _MAX_CALLS:
        for old in list(CALLS)[: _MAX_CALLS // 2]:
            del CALLS[old]
    CALLS[number] = call


def may_belong_to(rule: ProductRule, call: Call) -> bool:
    """Whether a product may be one of the backward products of a call.

    The backward pass of a user's own function may run whatever it likes.
    """
    num_saved = len(rule.operands) - (rule.gradient is not None)
    return num_saved <= len(call.shapes)


def sources_of(rule: ProductRule, call: Call, operands: Sequence[Tensor]) -> tuple[int | None, ...]:
    """For each operand of a backward product which forward operand it is; ``None``: the gradient.

    Shapes tell, and between equal ones the address of the data, unless what was saved for the
    backward pass was moved; then the order in which autograd works: the gradient of the first
    operand comes first, as gradient times operand.
    """
    if rule.gradient is not None:
        order = itertools.count()
        return tuple(
            None if index == rule.gradient else next(order) for index in range(len(operands))
        )
    known = tuple(call.pointers.get(tensor.data_ptr()) for tensor in operands)
    is_plausible = sum(index is None for index in known) == 1
    candidates = _sources_by_shape(call, operands)
    if len(candidates) == 1:
        return candidates[0]
    if is_plausible and (known in candidates or not candidates):
        return known
    if not candidates:
        return (None, *range(1, len(operands)))
    wanted = 1 if call.num_visits == 1 else 0
    return next((pair for pair in candidates if wanted in pair), candidates[0])


def _sources_by_shape(call: Call, operands: Sequence[Tensor]) -> list[tuple[int | None, ...]]:
    """What two matrices may be: the gradient and an operand, in either order, turned or not."""
    if len(operands) != 2 or len(call.shapes) != 2:
        return []
    first, second = (shape[-2:] for shape in call.shapes)
    a, b = (tuple(tensor.shape[-2:]) for tensor in operands)
    result = (*first[:-1], *second[1:])
    possible: dict[tuple[int | None, ...], bool] = {
        (None, 1): a == result and b == second[::-1],
        (1, None): a == second and b == result[::-1],
        (0, None): a == first[::-1] and b == result,
        (None, 0): a == result[::-1] and b == first,
    }
    return [sources for sources, fits in possible.items() if fits]

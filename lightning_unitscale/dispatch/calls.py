"""Products that autograd has recorded, by which a backward product finds what it belongs to."""

from __future__ import annotations

import itertools
import weakref
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

    # Weak: whoever still waits for a backward pass keeps the session, not this table.
    session: weakref.ref[ProductSession]
    site: Site
    # By the address of each operand's data, which of the operands it is.
    pointers: dict[int, int]
    shapes: tuple[tuple[int, ...], ...]
    log2_units: tuple[int, ...]
    is_gradient: tuple[bool, ...]
    step: int
    # Operands whose gradients autograd computes, and those that are columns after columns.
    needs: tuple[int, ...] = ()
    turned: tuple[bool, ...] = (False, False)
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


def forget(session: weakref.ref[ProductSession]) -> None:
    """Forget the calls of a session: backward passes that are still to come run plain."""
    for number in [number for number, call in list(CALLS.items()) if call.session is session]:
        CALLS.pop(number, None)


def may_belong_to(rule: ProductRule, call: Call) -> bool:
    """Whether a product may be one of the backward products of a call.

    The backward pass of a user's own function may run whatever it likes.
    """
    num_saved = len(rule.operands) - (rule.gradient is not None)
    return num_saved <= len(call.shapes)


def sources_of(rule: ProductRule, call: Call, operands: Sequence[Tensor]) -> tuple[int | None, ...]:
    """For each operand of a backward product which forward operand it is; ``None``: the gradient.

    Shapes tell, and between equal ones the address of the data, unless what was saved for the
    backward pass was moved or computed again; then the order in which autograd works.
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
    needs = call.needs or (0, 1)
    pair = _order_of(needs[(call.num_visits - 1) % len(needs)], call.turned)
    read = pair[0] if pair[1] is None else pair[1]
    preferred = [candidate for candidate in candidates if read in candidate]
    return pair if pair in candidates else (preferred or candidates)[0]


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


def _order_of(index: int, turned: tuple[bool, ...]) -> tuple[int | None, ...]:
    """What autograd multiplies for the gradient of an operand of ``mm``, in its order.

    ``g b^T`` for the first and ``a^T g`` for the second, unless the operand is columns after
    columns: then it makes the transposed gradient, so that it is columns after columns as well.
    """
    if index == 0:
        return (1, None) if turned[0] else (None, 1)
    return (None, 0) if turned[1] else (0, None)

"""Products that autograd has recorded, and which of their operands a backward product reads."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from lightning_unitscale.dispatch.execute import Product
from lightning_unitscale.dispatch.measurement import Site
from lightning_unitscale.dispatch.nodes import NodeKey, keys_of, latest_key, thread_number
from lightning_unitscale.dispatch.sites import function_arguments
from lightning_unitscale.dispatch.tensors import Extent, Extents
from lightning_unitscale.dispatch.torch_internals import last_sequence_number, saves_elsewhere
from lightning_unitscale.graph.operators import ProductRule, Sources, is_turned


@functools.cache
def slot_of(sources: Sources) -> str:
    """Which backward product it is that reads these."""
    return f"backward_{'_'.join('g' if k is None else str(k) for k in sources)}"


@dataclass(slots=True)
class Call:
    """A product that autograd has recorded: what its backward products need to know."""

    # As it ran.
    product: Product
    # Of each operand: its shape, its strides, where its data is, and whether autograd computes its
    # gradient. The address is 0 if what is saved for the backward pass lies elsewhere.
    operands: Sequence[tuple[tuple[int, ...], tuple[int, ...], int, bool]] = ()
    # What was measured of the operands, and of the arriving gradient.
    extents: Extents = ()
    gradient_extent: Extent | None = None
    num_visits: int = 0
    # The thread that it ran on.
    thread: int = field(default_factory=thread_number)


# By the key of an autograd node, or by a number for a product in a compiled graph: the product that
# it was made for, and whose that is: weakly, since whoever still waits for a backward pass keeps
# the session, not this table.
CALLS: dict[NodeKey | int, tuple[weakref.ref[Any], Call]] = {}
# Forward products whose backward pass may still come; each is a few numbers.
_MAX_CALLS = 2**16
_CALL = "lightning_unitscale.call"


def remember(
    session: weakref.ref[Any],
    product: Product,
    operands: Sequence[Tensor],
    extents: Extents,
) -> None:
    """Keep what backward products need of a product that is about to run."""
    key = node_key(operands)
    # Within the forward of an autograd function the first product counts.
    if key is None or (not torch.is_grad_enabled() and key in CALLS):
        return
    read = [(t.shape, t.stride(), t.data_ptr(), t.requires_grad) for t in operands]
    if saves_elsewhere():
        for index, tensor in enumerate(operands):
            if not (tensor if tensor._base is None else tensor._base).is_leaf:
                shape, strides, _, needs_gradient = read[index]
                read[index] = shape, strides, 0, needs_gradient
    record(key, session, Call(product, read, extents))


# Stands for a product that runs plain with all that comes of it, and is no session's.
_NOBODYS: Any = (lambda: None, Call(cast(Any, None)))


def leave(operands: Sequence[Tensor]) -> None:
    """Let the backward products of a product that is about to run be nobody's, like itself."""
    if (key := node_key(operands)) is not None:
        record(key, *_NOBODYS)


def leave_graph(node: Any) -> None:
    """Let all products of the backward pass from a node on be nobody's."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node is not None and _CALL not in node.metadata:
            node.metadata[_CALL] = _NOBODYS
            pending += [source for source, _ in node.next_functions]


def node_key(operands: Sequence[Tensor]) -> NodeKey | None:
    """Key of the autograd node of what runs; ``None`` where it has none."""
    return latest_key(operands if torch.is_grad_enabled() else function_arguments())


def call_of(node: Any) -> tuple[weakref.ref[Any], Call] | None:
    """The product that an autograd node was made for, and whose that is."""
    # From its first use on the node has it, and it goes when the node does.
    metadata = node.metadata
    recorded: tuple[weakref.ref[Any], Call] | None = metadata.get(_CALL)
    if recorded is not None:
        session = recorded[0]()
        return recorded if session is None or session.is_open else None
    for key in keys_of(node):
        if (recorded := CALLS.get(key)) is not None:
            metadata[_CALL] = recorded
            CALLS.pop(key, None)
            return recorded
    # Another thread may have run the node meanwhile.
    recorded = metadata.get(_CALL)
    return recorded


def record(key: NodeKey | int, session: weakref.ref[Any], call: Call) -> None:
    """Keep a call."""
    if len(CALLS) >= _MAX_CALLS:
        for old in list(CALLS)[: _MAX_CALLS // 2]:
            del CALLS[old]
    CALLS[key] = (session, call)


def forget(session: weakref.ref[Any]) -> None:
    """Forget the calls of a session: backward passes that are still to come run plain."""
    for key in [key for key, (whose, _) in list(CALLS.items()) if whose is session]:
        CALLS.pop(key, None)


def may_belong_to(rule: ProductRule, call: Call) -> bool:
    """Whether a product may be one of the backward products of a call.

    The backward pass of a user's own function may run whatever it likes.
    """
    if not rule.sources:
        return len(rule.operands) <= len(call.operands)
    return all(k is None or k < len(call.operands) for k in rule.sources)


def sources_of(rule: ProductRule, call: Call, operands: Sequence[Tensor]) -> Sources:
    """Which forward operand each operand of a backward product is; ``None``: the gradient.

    Shapes tell, and between equal ones the address of the data, unless what was saved for the
    backward pass was moved or computed again; then the order in which autograd works.
    """
    if rule.sources:
        return rule.sources
    read = call.operands
    candidates: Sequence[Sources] = ()
    if len(operands) == 2 == len(read) and not call.product.rule.sources:
        first, second = operands
        candidates = _sources_by_shape(read[0][0], read[1][0], first.shape, second.shape)
        if len(candidates) == 1:
            return candidates[0]
    pointers = {pointer: index for index, (_, _, pointer, _) in enumerate(read) if pointer}
    known = tuple(pointers.get(tensor.data_ptr()) for tensor in operands)
    is_plausible = sum(index is None for index in known) == 1
    if is_plausible and (known in candidates or not candidates):
        return known
    if not candidates:
        return (None, *range(1, len(operands)))
    needs = [index for index in call.product.rule.backward_order if read[index][3]] or [0, 1]
    index = needs[(call.num_visits - 1) % len(needs)]
    pair = _order_of(index, is_turned(*read[index][:2]))
    saved = pair[0] if pair[1] is None else pair[1]
    preferred = [candidate for candidate in candidates if saved in candidate]
    return pair if pair in candidates else (preferred or candidates)[0]


@functools.lru_cache(maxsize=2**12)
def _sources_by_shape(
    first: tuple[int, ...], second: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]
) -> tuple[Sources, ...]:
    """What two matrices may be: the gradient and an operand, in either order, turned or not."""
    first, second, a, b = (tuple(shape[-2:]) for shape in (first, second, a, b))
    result = (*first[:-1], *second[1:])
    possible: dict[Sources, bool] = {
        (None, 1): a == result and b == second[::-1],
        (1, None): a == second and b == result[::-1],
        (0, None): a == first[::-1] and b == result,
        (None, 0): a == result[::-1] and b == first,
    }
    return tuple(sources for sources, fits in possible.items() if fits)


def _order_of(index: int, is_turned: bool) -> Sources:
    """What autograd multiplies for the gradient of an operand of ``mm``, in its order.

    ``g b^T`` for the first and ``a^T g`` for the second, unless the operand is columns after
    columns: then it makes the transposed gradient, so that it is columns after columns as well.
    """
    if index == 0:
        return (1, None) if is_turned else (None, 1)
    return (None, 0) if is_turned else (0, None)


@dataclass(frozen=True)
class RanProduct:
    """A forward matmul, for whoever shows tensors in the units that they are stored in."""

    operands: tuple[Tensor, ...]  # what it reads
    # Exponent of the unit of each operand; ``None`` while none is measured.
    log2_sigmas: tuple[int | None, ...]
    log2_gamma: int | None  # the same of the gradient that arrives at it
    nodes: range  # numbers of the autograd nodes that it was made for
    names: tuple[str, ...]  # names of the operands in the gauge


class _Watched(threading.local):
    see: Callable[[RanProduct], None] | None = None


_WATCHED = _Watched()


@contextlib.contextmanager
def watching(see: Callable[[RanProduct], None]) -> Iterator[None]:
    """Within this context ``see`` is called with each forward matmul of this thread."""
    previous, _WATCHED.see = _WATCHED.see, see
    try:
        yield
    finally:
        _WATCHED.see = previous


def show(site: Site, operands: Sequence[Tensor], first_node: int | None = None) -> None:
    """Show a forward matmul with what it reads, if the step is watched."""
    if _WATCHED.see is not None:
        last = last_sequence_number()
        _WATCHED.see(
            RanProduct(
                tuple(operands),
                site.log2_units or (None,) * len(operands),
                site.log2_gamma,
                range(last if first_node is None else first_node, last + 1),
                site.operand_names,
            )
        )

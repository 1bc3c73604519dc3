"""Record forward matmuls, and map autograd nodes to them and to their session.

A user's autograd function may run a matmul only in its backward pass. Its node was created during
a session's call, on the thread of that call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_unitscale.capture.operators import MatmulRule, Sources, is_turned
from lightning_unitscale.matmuls.autograd_nodes import (
    NodeKey,
    autograd_operations,
    calling_thread,
    keys_of,
    latest_key,
    leaf_of,
    note_thread,
    thread_number,
)
from lightning_unitscale.matmuls.block_rounding import axes_of
from lightning_unitscale.matmuls.execute import Matmul, Placement, Visits, placement_of
from lightning_unitscale.matmuls.measurement import Extent, Extents, Site
from lightning_unitscale.matmuls.sites import function_arguments
from lightning_unitscale.matmuls.torch_internals import (
    last_sequence_number,
    saving_hooks,
    sequence_number,
)


@functools.cache
def slot_of(sources: Sources) -> str:
    """Return the name of the backward matmul with these sources."""
    return f"backward_{'_'.join('g' if k is None else str(k) for k in sources)}"


@dataclass(slots=True)
class Call:
    """A recorded forward matmul, with the data that its backward matmuls need."""

    matmul: Matmul
    placement: Placement = ((), (), (), torch.float32, -1)
    # Of its operands' data. An address is 0 if autograd saves the operand at another one.
    addresses: Sequence[int] = ()
    needs_gradient: Sequence[bool] = ()
    visits: Visits = field(default_factory=dict)
    # Measurements of the operands and of the output gradient.
    extents: Extents = ()
    gradient_extent: Extent | None = None
    num_visits: int = 0
    thread: int = field(default_factory=thread_number)  # on which it ran


# Each matmul and its session, by the key of the autograd node (in compiled graphs by a number).
# The reference is weak, so that this table does not keep a session alive.
CALLS: dict[NodeKey | int, tuple[weakref.ref[Any], Call]] = {}
# Limits the forward matmuls that wait for a backward pass. Each is a few numbers.
_MAX_CALLS = 2**16
_CALL = "lightning_unitscale.call"


def remember(
    session: weakref.ref[Any], matmul: Matmul, operands: Sequence[Tensor], extents: Extents
) -> None:
    """Record a matmul that is about to run, for its backward matmuls."""
    key = node_key(operands)
    # In the forward of an autograd function, only its first matmul is recorded.
    if key is None or (not torch.is_grad_enabled() and key in CALLS):
        return
    placement, addresses = placement_of(operands)
    if saving_hooks(True) is not None:
        bases = [tensor if tensor._base is None else tensor._base for tensor in operands]
        pairs = zip(addresses, bases, strict=True)
        addresses = tuple(address if base.is_leaf else 0 for address, base in pairs)
    needs_gradient = [tensor.requires_grad for tensor in operands]
    visits = matmul.visits_of(placement)
    record(key, session, Call(matmul, placement, addresses, needs_gradient, visits, extents))


# Marks a matmul that belongs to no session. It runs unscaled, and so does its backward pass.
_NOBODYS: Any = (lambda: None, Call(cast(Any, None)))


def leave(operands: Sequence[Tensor]) -> None:
    """Leave the backward matmuls of a matmul that is about to run unscaled."""
    if (key := node_key(operands)) is not None:
        record(key, *_NOBODYS)


def leave_graph(node: Any) -> None:
    """Leave all matmuls of the backward pass from a node on unscaled."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node is not None and _CALL not in node.metadata:
            node.metadata[_CALL] = _NOBODYS
            pending += [source for source, _ in node.next_functions]


def node_key(operands: Sequence[Tensor]) -> NodeKey | None:
    """Return the key of the running operator's autograd node, or ``None`` if it has none."""
    return latest_key(operands if torch.is_grad_enabled() else function_arguments())


def call_of(node: Any) -> tuple[weakref.ref[Any], Call] | None:
    """Return the session and the matmul that an autograd node was created for."""
    # After its first use the record is stored on the node and freed with it.
    metadata = node.metadata
    recorded: tuple[weakref.ref[Any], Call] | None = metadata.get(_CALL)
    if recorded is not None:
        session = recorded[0]()
        return recorded if session is None or session.is_open else None
    for key in keys_of(node) if CALLS else ():
        if (recorded := CALLS.get(key)) is not None:
            metadata[_CALL] = recorded
            CALLS.pop(key, None)
            return recorded
    # Another thread may have run the node meanwhile.
    return metadata.get(_CALL)


def record(key: NodeKey | int, session: weakref.ref[Any], call: Call) -> None:
    """Store a call."""
    if len(CALLS) >= _MAX_CALLS:
        for old in list(CALLS)[: _MAX_CALLS // 2]:
            del CALLS[old]
    CALLS[key] = (session, call)


def forget_calls(session: weakref.ref[Any]) -> None:
    """Drop the calls of a session, so that its pending backward passes run unscaled."""
    for key in [key for key, (whose, _) in list(CALLS.items()) if whose is session]:
        CALLS.pop(key, None)


def may_belong_to(rule: MatmulRule, call: Call) -> bool:
    """Check whether a matmul may be one of the backward matmuls of a call."""
    # A user's autograd function may run any matmul in its backward pass.
    if rule.sources:
        return all(k is None or k < len(call.addresses) for k in rule.sources)
    return len(rule.operands) <= len(call.addresses)


def sources_of(rule: MatmulRule, call: Call, operands: Sequence[Tensor]) -> Sources:
    """Map each operand of a backward matmul to a forward operand, or ``None`` for the gradient."""
    # Compare shapes, then data addresses. If saved tensors were moved or recomputed, fall back to
    # the order in which autograd computes gradients.
    if rule.sources:
        return rule.sources
    (shapes, strides, *_), addresses = call.placement, call.addresses
    if len(operands) != 2 or len(shapes) != 2 or call.matmul.rule.sources:
        pointers = {address: index for index, address in enumerate(addresses) if address}
        found = tuple(pointers.get(tensor.data_ptr()) for tensor in operands)
        return found if found.count(None) == 1 else (None, *range(1, len(operands)))
    (shape, other), (one, two) = shapes, addresses
    first, second = operands
    a, b = first.data_ptr(), second.data_ptr()
    known = (
        1 if a == two else 0 if a == one else None,
        1 if b == two else 0 if b == one else None,
    )
    chosen, candidates = _chosen(shape, other, first.shape, second.shape, known)
    if chosen is not None:
        return chosen
    order = call.matmul.rule.backward_order
    needs = [index for index in order if call.needs_gradient[index]] or [0, 1]
    index = needs[(call.num_visits - 1) % len(needs)]
    # ``g b^T`` for the first and ``a^T g`` for the second. For a column-major operand autograd
    # computes the transposed gradient, which makes the gradient column-major as well.
    saved, pair = (1, (None, 1)) if index == 0 else (0, (0, None))
    if is_turned(shapes[index], strides[index]):
        pair = pair[::-1]
    preferred = [candidate for candidate in candidates if saved in candidate]
    return pair if pair in candidates else (preferred or candidates)[0]


@functools.lru_cache(maxsize=2**12)
def _chosen(
    first: tuple[int, ...],
    second: tuple[int, ...],
    a: tuple[int, ...],
    b: tuple[int, ...],
    known: Sources,
) -> tuple[Sources | None, tuple[Sources, ...]]:
    """Return the sources of two matrices by their shapes and addresses, and the candidates."""
    candidates = _sources_by_shape(first, second, a, b)
    if len(candidates) == 1:
        return candidates[0], candidates
    if known.count(None) == 1 and (known in candidates or not candidates):
        return known, candidates
    return None if candidates else (None, 1), candidates


def _sources_by_shape(
    first: tuple[int, ...], second: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]
) -> tuple[Sources, ...]:
    """Return the sources that two matrices may have, given their shapes."""
    first, second, a, b = (tuple(shape[-2:]) for shape in (first, second, a, b))
    result = (*first[:-1], *second[1:])
    possible: dict[Sources, bool] = {
        (None, 1): a == result and b == second[::-1],
        (1, None): a == second and b == result[::-1],
        (0, None): a == first[::-1] and b == result,
        (None, 0): a == result[::-1] and b == first,
    }
    return tuple(sources for sources, fits in possible.items() if fits)


# Limits on the calls of a thread and the threads that wait for a backward pass.
_MAX_FINISHED = 2**12
_MAX_THREADS = 2**8
_MAX_NODES = 2**10  # how far a node's sources are followed


@dataclass
class _CreatedNodes:
    """The autograd nodes that calls created on one thread."""

    # The node numbers of each call and its session, in the order in which the calls ended.
    finished: list[tuple[range, weakref.ref[Any]]] = field(default_factory=list)
    # The first node number of each running call, the innermost last.
    running: list[tuple[int, weakref.ref[Any]]] = field(default_factory=list)

    def by(self, number: int) -> Any:
        """Return the session in whose call a node got its number, or ``None``."""
        for first, session in reversed(self.running):
            if number >= first:
                return _if_open(session)
        maker: Any = None
        for numbers, session in reversed(self.finished):
            if number in numbers:
                maker = _if_open(session)  # a nested call may follow
            elif number >= numbers.stop:
                break
        return maker


def _if_open(ref: weakref.ref[Any]) -> Any:
    session = ref()
    return session if session is not None and session.is_open else None


_MADE: dict[int, _CreatedNodes] = {}  # by the number of the thread


@contextlib.contextmanager
def making(session: weakref.ref[Any]) -> Iterator[None]:
    """Attribute the nodes that this thread creates in this context to a session's call."""
    made = _MADE.get(thread_number())
    if made is None:
        if len(_MADE) >= _MAX_THREADS:
            del _MADE[min(list(_MADE), key=lambda thread: len(_MADE[thread].finished))]
        made = _MADE[thread_number()] = _CreatedNodes()
    first = last_sequence_number() + 1
    made.running.append((first, session))
    note_thread()
    try:
        yield
    finally:
        made.running.pop()
        if len(made.finished) >= _MAX_FINISHED:
            del made.finished[: _MAX_FINISHED // 2]
        numbers = range(first, last_sequence_number() + 1)
        if numbers:
            made.finished.append((numbers, session))


def forget_made(session: weakref.ref[Any]) -> None:
    """Forget the nodes that the calls of a session created."""
    for made in list(_MADE.values()):
        made.finished = [call for call in made.finished if call[1] is not session]


def maker_of(node: Any) -> Any:
    """Return the session whose call created an autograd node, or ``None``."""
    # Threads reuse the same numbers, so the nearest known matmul or parameter among a node's
    # sources must match as well. Without either, the thread that calls the backward pass must be
    # the one that created the node.
    number = sequence_number(node)
    makers = {thread: made.by(number) for thread, made in list(_MADE.items())}
    makers = {thread: session for thread, session in makers.items() if session is not None}
    if not makers:
        return None
    for source in itertools.islice(autograd_operations([node]), _MAX_NODES):
        if (recorded := call_of(source)) is not None:
            session = makers.get(recorded[1].thread)
            if session is not None and session is recorded[0]():
                return session
            break
        leaf = leaf_of(source)
        for session in makers.values() if leaf is not None else ():
            module = session.sites.module
            if module is not None and any(leaf is each for each in module.parameters()):
                return session
        if isinstance(leaf, nn.Parameter):
            break
    return makers.get(calling_thread())


@dataclass(frozen=True)
class RanMatmul:
    """A forward matmul with the units of its operands, for the monitor."""

    operands: tuple[Tensor, ...]
    # Exponent of the unit of each operand; ``None`` until it is measured.
    log2_sigmas: tuple[int | None, ...]
    log2_gamma: int | None  # of its output gradient
    nodes: range  # numbers of its autograd nodes
    names: tuple[str, ...]  # names of the operands in the gauge
    axes: tuple[int, ...]  # the dimension of each operand that it sums over, counted from the end
    # Spacing of the numbers near 1 to which it rounds operands and gradients; 0 without rounding.
    spacing: tuple[float, float] = (0.0, 0.0)


class _Watched(threading.local):
    see: Callable[[RanMatmul], None] | None = None


WATCHED = _Watched()


@contextlib.contextmanager
def watching(see: Callable[[RanMatmul], None]) -> Iterator[None]:
    """Call ``see`` with each forward matmul of this thread within this context."""
    previous, WATCHED.see = WATCHED.see, see
    try:
        yield
    finally:
        WATCHED.see = previous


def show(
    site: Site,
    rule: MatmulRule,
    args: Sequence[Any],
    first_node: int | None = None,
    spacing: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Pass a forward matmul to the watching callback, if there is one."""
    if WATCHED.see is not None:
        last = last_sequence_number()
        operands = tuple(rule.operands_in(args))
        WATCHED.see(
            RanMatmul(
                operands,
                site.log2_units or (None,) * len(operands),
                site.log2_gamma,
                range(last if first_node is None else first_node, last + 1),
                site.operand_names,
                tuple(axes[0] for axes in axes_of(rule, args)),
                spacing,
            )
        )

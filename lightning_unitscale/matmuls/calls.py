"""Matmuls that autograd has recorded: what backward matmuls read of them, and whose nodes are.

A function of the user's own may multiply in its backward pass only. Its node is one of those that
were made, on the thread of the call, while the call of a session ran.
"""

from __future__ import annotations

import contextlib
import functools
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
    calling_thread,
    keys_of,
    latest_key,
    leaf_of,
    note_thread,
    thread_number,
    upstream,
)
from lightning_unitscale.matmuls.execute import Matmul
from lightning_unitscale.matmuls.measurement import Extent, Extents, Site
from lightning_unitscale.matmuls.sites import function_arguments
from lightning_unitscale.matmuls.torch_internals import (
    last_sequence_number,
    saves_elsewhere,
    sequence_number,
)


@functools.cache
def slot_of(sources: Sources) -> str:
    """Which backward matmul it is that reads these."""
    return f"backward_{'_'.join('g' if k is None else str(k) for k in sources)}"


@dataclass(slots=True)
class Call:
    """A matmul that autograd has recorded: what its backward matmuls need to know."""

    # As it ran.
    matmul: Matmul
    # Of each operand: its shape, its strides, where its data is, and whether autograd computes its
    # gradient. The address is 0 if what is saved for the backward pass lies elsewhere.
    operands: Sequence[tuple[tuple[int, ...], tuple[int, ...], int, bool]] = ()
    # What was measured of the operands, and of the arriving gradient.
    extents: Extents = ()
    gradient_extent: Extent | None = None
    num_visits: int = 0
    # The thread that it ran on.
    thread: int = field(default_factory=thread_number)


# By the key of an autograd node, or by a number for a matmul in a compiled graph: the matmul that
# it was made for, and whose that is: weakly, since whoever still waits for a backward pass keeps
# the session, not this table.
CALLS: dict[NodeKey | int, tuple[weakref.ref[Any], Call]] = {}
# Forward matmuls whose backward pass may still come; each is a few numbers.
_MAX_CALLS = 2**16
_CALL = "lightning_unitscale.call"


def remember(
    session: weakref.ref[Any],
    matmul: Matmul,
    operands: Sequence[Tensor],
    extents: Extents,
) -> None:
    """Keep what backward matmuls need of a matmul that is about to run."""
    key = node_key(operands)
    # Within the forward of an autograd function the first matmul counts.
    if key is None or (not torch.is_grad_enabled() and key in CALLS):
        return
    read = [(t.shape, t.stride(), t.data_ptr(), t.requires_grad) for t in operands]
    if saves_elsewhere():
        for index, tensor in enumerate(operands):
            if not (tensor if tensor._base is None else tensor._base).is_leaf:
                shape, strides, _, needs_gradient = read[index]
                read[index] = shape, strides, 0, needs_gradient
    record(key, session, Call(matmul, read, extents))


# Stands for a matmul that runs plain with all that comes of it, and is no session's.
_NOBODYS: Any = (lambda: None, Call(cast(Any, None)))


def leave(operands: Sequence[Tensor]) -> None:
    """Let the backward matmuls of a matmul that is about to run be nobody's, like itself."""
    if (key := node_key(operands)) is not None:
        record(key, *_NOBODYS)


def leave_graph(node: Any) -> None:
    """Let all matmuls of the backward pass from a node on be nobody's."""
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
    """The matmul that an autograd node was made for, and whose that is."""
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


def may_belong_to(rule: MatmulRule, call: Call) -> bool:
    """Whether a matmul may be one of the backward matmuls of a call."""
    # The backward pass of a user's own function may run whatever it likes.
    if not rule.sources:
        return len(rule.operands) <= len(call.operands)
    return all(k is None or k < len(call.operands) for k in rule.sources)


def sources_of(rule: MatmulRule, call: Call, operands: Sequence[Tensor]) -> Sources:
    """Which forward operand each operand of a backward matmul is; ``None``: the gradient."""
    # Shapes tell, and between equal ones the address of the data, unless what was saved for the
    # backward pass was moved or computed again; then the order in which autograd works.
    if rule.sources:
        return rule.sources
    read = call.operands
    candidates: Sequence[Sources] = ()
    if len(operands) == 2 == len(read) and not call.matmul.rule.sources:
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
    needs = [index for index in call.matmul.rule.backward_order if read[index][3]] or [0, 1]
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
    """What autograd multiplies for the gradient of an operand of ``mm``, in its order."""
    # ``g b^T`` for the first and ``a^T g`` for the second, unless the operand is columns after
    # columns: then it makes the transposed gradient, so that it is columns after columns as well.
    if index == 0:
        return (1, None) if is_turned else (None, 1)
    return (None, 0) if is_turned else (0, None)


# Calls of one thread, and threads, whose backward passes may still come.
_MAX_FINISHED = 2**12
_MAX_THREADS = 2**8
# How far a node's sources are followed.
_MAX_NODES = 2**10


@dataclass
class _Made:
    """What calls have made on one thread."""

    # Numbers of the nodes of each call, in the order in which the calls have ended, with
    # whose call it was.
    finished: list[tuple[range, weakref.ref[Any]]] = field(default_factory=list)
    # The first number of each call that goes on, the innermost last.
    running: list[tuple[int, weakref.ref[Any]]] = field(default_factory=list)

    def by(self, number: int) -> Any:
        """The session in whose call a number was given out; ``None`` if in nobody's."""
        for first, session in reversed(self.running):
            if number >= first:
                return _if_open(session)
        maker: Any = None
        for numbers, session in reversed(self.finished):
            if number in numbers:
                maker = _if_open(session)  # a call within this one comes next
            elif number >= numbers.stop:
                break
        return maker


def _if_open(ref: weakref.ref[Any]) -> Any:
    session = ref()
    return session if session is not None and session.is_open else None


# By the number of the thread.
_MADE: dict[int, _Made] = {}


@contextlib.contextmanager
def making(session: weakref.ref[Any]) -> Iterator[None]:
    """Within this context the nodes that this thread makes are those of a session's call."""
    made = _MADE.get(thread_number())
    if made is None:
        if len(_MADE) >= _MAX_THREADS:
            del _MADE[min(list(_MADE), key=lambda thread: len(_MADE[thread].finished))]
        made = _MADE[thread_number()] = _Made()
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
    """Forget which nodes the calls of a session have made."""
    for made in list(_MADE.values()):
        made.finished = [call for call in made.finished if call[1] is not session]


def maker_of(node: Any) -> Any:
    """Whose call has made an autograd node; ``None`` if no call has."""
    # Threads give out the same numbers, so what a node reads has to agree: the nearest matmul
    # that is known, or the nearest parameter. Of a node that reads neither, the thread that calls
    # the backward pass has to be the one that has made it.
    number = sequence_number(node)
    makers = {thread: made.by(number) for thread, made in list(_MADE.items())}
    makers = {thread: session for thread, session in makers.items() if session is not None}
    if not makers:
        return None
    for source in upstream(node, _MAX_NODES):
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
    """A forward matmul, for whoever shows tensors in the units that they are stored in."""

    operands: tuple[Tensor, ...]  # what it reads
    # Exponent of the unit of each operand; ``None`` while none is measured.
    log2_sigmas: tuple[int | None, ...]
    log2_gamma: int | None  # the same of the gradient that arrives at it
    nodes: range  # numbers of the autograd nodes that it was made for
    names: tuple[str, ...]  # names of the operands in the gauge


class _Watched(threading.local):
    see: Callable[[RanMatmul], None] | None = None


_WATCHED = _Watched()


@contextlib.contextmanager
def watching(see: Callable[[RanMatmul], None]) -> Iterator[None]:
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
            RanMatmul(
                tuple(operands),
                site.log2_units or (None,) * len(operands),
                site.log2_gamma,
                range(last if first_node is None else first_node, last + 1),
                site.operand_names,
            )
        )

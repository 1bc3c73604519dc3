"""Whose call has made an autograd node that no known product was run for.

A function of the user's own may multiply in its backward pass only. Its node is one of those that
were made, on the thread of the call, while the call ran.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_unitscale.dispatch.calls import call_of
from lightning_unitscale.dispatch.nodes import (
    calling_thread,
    leaf_of,
    note_thread,
    thread_number,
    upstream,
)
from lightning_unitscale.dispatch.torch_internals import last_sequence_number, sequence_number

# Calls of one thread, and threads, whose backward passes may still come.
_MAX_CALLS = 2**12
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
        if len(made.finished) >= _MAX_CALLS:
            del made.finished[: _MAX_CALLS // 2]
        numbers = range(first, last_sequence_number() + 1)
        if numbers:
            made.finished.append((numbers, session))


def forget_made(session: weakref.ref[Any]) -> None:
    """Forget which nodes the calls of a session have made."""
    for made in list(_MADE.values()):
        made.finished = [call for call in made.finished if call[1] is not session]


def maker_of(node: Any) -> Any:
    """Whose call has made an autograd node; ``None`` if no call has.

    Threads give out the same numbers, so what a node reads has to agree: the nearest product that
    is known, or the nearest parameter. Of a node that reads neither, the thread that calls the
    backward pass has to be the one that has made it.
    """
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
            if any(leaf is parameter for parameter in session.parameters()):
                return session
        if isinstance(leaf, nn.Parameter):
            break
    return makers.get(calling_thread())

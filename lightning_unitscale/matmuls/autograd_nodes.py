"""Which autograd node it is, whichever thread has made it and whichever runs it.

``torch._C._autograd._get_sequence_nr`` counts the nodes of a graph, and each thread counts by
itself: the threads on which the engine runs a device's backward pass number what they make there,
in a checkpoint that is computed again or for a gradient of a gradient, from their own first one.
A number alone is therefore not a name. Together with what the node reads it is: a node of autograd
keeps a dictionary, ``metadata``, for as long as it lives.

``torch._C._stash_obj_in_tls`` and its like keep a value that torch hands on, with its own state of
a thread, to the threads that run a backward pass that this one calls. Nothing may be left there:
a thread that ends would wait for the interpreter. Torch 2.11 cannot forget a value, and gives up a
reference to it that it has never taken. ``torch._C._functions.AccumulateGrad`` is the
node of a leaf. Checked on torch 2.13 and 2.11.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_unitscale.matmuls.torch_internals import last_sequence_number, sequence_number

T = TypeVar("T")
# What a node has read first, and its number on the thread that has made it.
NodeKey = tuple[int, int]

_IDENTITY = "lightning_unitscale.identity"
_IDENTITIES = itertools.count()
_LEAVES: Any = WeakIdKeyDictionary()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.number = next(_IDENTITIES)


_THREAD = _Thread()
# The key under which torch hands on the context of Python that a backward pass is called in.
_CONTEXT = "context"
_OF_CONTEXT: ContextVar[int | None] = ContextVar("lightning_unitscale.thread", default=None)
_LEAF_NODE: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def thread_number() -> int:
    """A number of this thread, which no later one is given again."""
    return _THREAD.number


def note_thread() -> None:
    """Let a backward pass that this thread calls know of it, on whichever thread it runs."""
    _OF_CONTEXT.set(thread_number())


def calling_thread() -> int:
    """Number of the thread that has called the backward pass in which this is called."""
    if not torch._C._is_key_in_tls(_CONTEXT):
        return thread_number()
    number: int | None = torch._C._get_obj_in_tls(_CONTEXT).get(_OF_CONTEXT)
    return thread_number() if number is None else number


def identity_of(node: Any) -> int:
    """A number that no other autograd node has, however often it is asked for."""
    number: int = node.metadata.setdefault(_IDENTITY, next(_IDENTITIES))
    return number


def latest_key(read: Iterable[Tensor]) -> NodeKey | None:
    """Key of the node made last on this thread; ``None`` where nothing needs a gradient."""
    leaf = None
    for tensor in read:
        if tensor.requires_grad:
            if (source := tensor.grad_fn) is not None:
                return identity_of(source), last_sequence_number()
            leaf = tensor if leaf is None else leaf
    if leaf is None:
        return None
    return _LEAVES.setdefault(leaf, next(_IDENTITIES)), last_sequence_number()


def keys_of(node: Any) -> Iterator[NodeKey]:
    """The keys by which :func:`latest_key` may have known a node when it was made."""
    number = sequence_number(node)
    leaves = []
    for source, _ in node.next_functions:
        if source is None:
            continue
        if type(source) is _LEAF_NODE:
            leaves.append(source.variable)  # as in latest_key: what is no leaf comes first
        elif (known := source.metadata.get(_IDENTITY)) is not None:
            yield known, number
    for leaf in leaves:
        if (known := _LEAVES.get(leaf)) is not None:
            yield known, number


def leaf_of(node: Any) -> Tensor | None:
    """The leaf whose gradient a node adds to; ``None`` for other nodes."""
    is_leaf = type(node) is _LEAF_NODE
    return node.variable if is_leaf else None


def upstream(node: Any, most: int) -> Iterator[Any]:
    """The nodes that a node reads from, directly or through others, the nearest first."""
    found, waiting = {node}, deque([node])
    while waiting:
        reader = waiting.popleft()
        yield reader
        for source, _ in reader.next_functions:
            if source is not None and source not in found and len(found) < most:
                found.add(source)
                waiting.append(source)


_CAN_FORGET = hasattr(torch._C, "_remove_obj_from_tls")


def _counts_references() -> bool:
    """Return whether torch counts its reference to a value that it keeps for a thread."""
    key, value = "lightning_unitscale.probe", object()
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(key, value)
    counts = sys.getrefcount(value) > before
    if not counts:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    if _CAN_FORGET:
        torch._C._remove_obj_from_tls(key)
    else:  # the value goes, and its reference with it
        torch._C._stash_obj_in_tls(key, None)
    return counts


_COUNTS_REFERENCES = _counts_references()


def _stash(key: str, value: object) -> None:
    if not _COUNTS_REFERENCES:
        # torch gives up a reference that it has never taken, and the value would be freed early.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


class HandedOn(Generic[T]):
    """A value that a thread has, and those have that run a backward pass for it."""

    def __init__(self, name: str, default: T) -> None:
        self._key = f"lightning_unitscale.{name}"
        self._default = default

    def get(self) -> T:
        """The value."""
        if not torch._C._is_key_in_tls(self._key):
            return self._default
        value: T = torch._C._get_obj_in_tls(self._key)
        return value

    def set(self, value: T) -> None:
        """Set it; the default leaves nothing behind, where torch can forget a value."""
        if value is self._default and _CAN_FORGET:
            if torch._C._is_key_in_tls(self._key):
                torch._C._remove_obj_from_tls(self._key)
            return
        _stash(self._key, value)

    @contextlib.contextmanager
    def being(self, value: T) -> Iterator[None]:
        """Within this context it is ``value``."""
        before = self.get()
        self.set(value)
        try:
            yield
        finally:
            self.set(before)

"""Walk autograd's graph, and identify its nodes across the threads that create and run them.

``torch._C._autograd._get_sequence_nr`` numbers nodes per thread. The engine's threads create nodes
too, of recomputed checkpoints and double backwards, and number them from zero. So a number alone
does not identify a node, but the number and the node's first input do. A node's ``metadata``
dictionary lives as long as the node.

``torch._C._stash_obj_in_tls`` and related functions store a value in torch's thread state. Torch
passes it to the threads that run a backward pass for this thread. Leave no value there, because a
thread that ends would wait for the interpreter. Torch 2.11 cannot remove a value and releases a
reference that it never took. ``torch._C._functions.AccumulateGrad`` is the node of a leaf.
The engine's ``queue_callback`` ends the backward passes of DDP and FSDP as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.weak import WeakIdKeyDictionary

from lightning_unitscale.matmuls.torch_internals import last_sequence_number, sequence_number

T = TypeVar("T")
# The identity of a node's first input, and its number on the thread that created it.
NodeKey = tuple[int, int]

_IDENTITY = "lightning_unitscale.identity"
_IDENTITIES = itertools.count()
_LEAVES: Any = WeakIdKeyDictionary()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.number = next(_IDENTITIES)


_THREAD = _Thread()
# The key under which torch passes on the Python context of the thread that calls backward.
_CONTEXT = "context"
_OF_CONTEXT: ContextVar[int | None] = ContextVar("lightning_unitscale.thread", default=None)
_LEAF_NODE: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def thread_number() -> int:
    """Return a number of this thread that no later thread reuses."""
    return _THREAD.number


def note_thread() -> None:
    """Pass this thread's number to the backward passes that it calls."""
    _OF_CONTEXT.set(thread_number())


def calling_thread() -> int:
    """Return the number of the thread that called the running backward pass."""
    if not torch._C._is_key_in_tls(_CONTEXT):
        return thread_number()
    number: int | None = torch._C._get_obj_in_tls(_CONTEXT).get(_OF_CONTEXT)
    return thread_number() if number is None else number


def identity_of(node: Any) -> int:
    """Return the unique number of an autograd node."""
    return node.metadata.setdefault(_IDENTITY, next(_IDENTITIES))


def latest_key(read: Iterable[Tensor]) -> NodeKey | None:
    """Return the key of this thread's latest node, or ``None`` if no input needs a gradient."""
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
    """Yield the keys that :func:`latest_key` may have given a node when it was created."""
    number = sequence_number(node)
    leaves = []
    for source, _ in node.next_functions:
        if source is None:
            continue
        if type(source) is _LEAF_NODE:
            leaves.append(source)  # latest_key prefers tensors that are no leaves
        elif (known := source.metadata.get(_IDENTITY)) is not None:
            yield known, number
    for leaf in leaves:
        if (known := _LEAVES.get(leaf.variable)) is not None:
            yield known, number


def leaf_of(node: Any) -> Tensor | None:
    """Return the leaf whose gradient a node accumulates, or ``None`` for other nodes."""
    return node.variable if type(node) is _LEAF_NODE else None


_CAN_FORGET = hasattr(torch._C, "_remove_obj_from_tls")


def _counts_references() -> bool:
    """Check whether torch counts its reference to a value in a thread's state."""
    key, value = "lightning_unitscale.probe", object()
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(key, value)
    counts = sys.getrefcount(value) > before
    if not counts:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    if _CAN_FORGET:
        torch._C._remove_obj_from_tls(key)
    else:  # overwriting releases the value and its reference
        torch._C._stash_obj_in_tls(key, None)
    return counts


_COUNTS_REFERENCES = _counts_references()


# Every matmul reads such a value.
_is_key_in_tls: Callable[[str], bool] = torch._C._is_key_in_tls
_get_obj_in_tls: Callable[[str], Any] = torch._C._get_obj_in_tls


class HandedOn(Generic[T]):
    """A thread-local value that the threads of its backward passes share."""

    def __init__(self, name: str, default: T) -> None:
        self._key = f"lightning_unitscale.{name}"
        self._default = default

    def get(self) -> T:
        """Return the value."""
        return _get_obj_in_tls(self._key) if _is_key_in_tls(self._key) else self._default

    def set(self, value: T) -> None:
        """Set the value, or remove it if it is the default and torch can remove values."""
        if value is self._default and _CAN_FORGET:
            if torch._C._is_key_in_tls(self._key):
                torch._C._remove_obj_from_tls(self._key)
            return
        if not _COUNTS_REFERENCES:
            # torch releases a reference that it never took, so the value would be freed early.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        torch._C._stash_obj_in_tls(self._key, value)

    @contextlib.contextmanager
    def being(self, value: T) -> Iterator[None]:
        """Set the value within this context."""
        before = self.get()
        self.set(value)
        try:
            yield
        finally:
            self.set(before)


def autograd_operations(roots: Iterable[Any], stop: Container[Any] = ()) -> Iterator[Any]:
    """Yield the operations of autograd's graph below some roots, each once, the nearest first."""
    pending = deque(
        operation
        for operation in dict.fromkeys(roots)
        if operation is not None and operation not in stop
    )
    seen = set(pending)
    while pending:
        operation = pending.popleft()
        yield operation
        for source, _ in operation.next_functions:
            if source is not None and source not in seen and source not in stop:
                seen.add(source)
                pending.append(source)


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward pass has added up all gradients of its leaves."""
    Variable._execution_engine.queue_callback(callback)

"""Walk autograd's graph, and call functions at the end of a backward pass.

Private name of torch, checked on torch 2.11 and 2.13: the engine's ``queue_callback``, by which DDP
and FSDP end their backward passes as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from torch.autograd import Variable


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

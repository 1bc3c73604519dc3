"""The operations of autograd's graph."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any


def autograd_operations(roots: Iterable[Any], stop: Container[Any] = ()) -> Iterator[Any]:
    """Operations of autograd's graph, each once, from some down to others."""
    pending = [
        operation
        for operation in dict.fromkeys(roots)
        if operation is not None and operation not in stop
    ]
    seen = set(pending)
    while pending:
        operation = pending.pop()
        yield operation
        for source, _ in operation.next_functions:
            if source is not None and source not in seen and source not in stop:
                seen.add(source)
                pending.append(source)

"""Functions of the user that Dynamo must not look into, for as long as a step is captured.

A file of its own for the names it takes from Dynamo (checked on torch 2.13 and 2.11): the sets
behind ``torch.compiler.allow_in_graph``, which itself cannot be taken back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch._dynamo.trace_rules import _allowed_callable_ids, lookup_callable
from torch._dynamo.variables import TorchInGraphFunctionVariable


@contextlib.contextmanager
def kept_whole(functions: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Within this context Dynamo puts calls of these functions into the graph as they are."""
    added = []
    try:
        for one in functions:
            if lookup_callable(one) is not TorchInGraphFunctionVariable:
                _allowed_callable_ids.add(id(one))
                added.append(one)
        yield
    finally:
        for one in added:
            _allowed_callable_ids.remove(id(one))

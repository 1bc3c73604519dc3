"""Hold back a module's logging calls while its step runs under Dynamo, and make them after it.

Dynamo cannot trace Lightning's ``self.log``: tracing into it is an internal error, skipping it
breaks the graph in two. A recorder that appends to a list is traced without either; copies of the
tensors become outputs of the graph: a step may go on to write into what it has logged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn


class DeferredCalls:
    """Records calls of the named methods of a module, and replays them on the real ones.

    Args:
        module: The module whose methods are held back.
        names: The methods; those the module does not have are ignored.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.module = module
        self.names = tuple(name for name in names if callable(getattr(module, name, None)))
        self.calls: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []
        self._recorders = [_Recorder(index, self.calls) for index in range(len(self.names))]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within this context the methods only record; the real ones are back afterwards."""
        attributes = self.module.__dict__
        shadowed = {name: attributes[name] for name in self.names if name in attributes}
        self.calls.clear()
        for name, recorder in zip(self.names, self._recorders, strict=True):
            attributes[name] = recorder.record
        try:
            yield
        finally:
            for name in self.names:
                attributes.pop(name, None)
            attributes.update(shadowed)

    def replay(self) -> None:
        """Make the recorded calls for real, in their order."""
        calls = list(self.calls)
        self.calls.clear()
        for index, args, kwargs in calls:
            getattr(self.module, self.names[index])(*args, **kwargs)

    def discard(self) -> None:
        """Forget the recorded calls: the step was a rehearsal."""
        self.calls.clear()


class _Recorder:
    """One object per method: Dynamo traces a plain append, and guards on nothing that changes."""

    def __init__(
        self, index: int, calls: list[tuple[int, tuple[Any, ...], dict[str, Any]]]
    ) -> None:
        self.index = index
        self.calls = calls

    def record(self, *args: Any, **kwargs: Any) -> None:
        copied = tuple(_as_it_is(one) for one in args)
        self.calls.append((self.index, copied, {k: _as_it_is(one) for k, one in kwargs.items()}))


def _as_it_is(value: Any) -> Any:
    """What stays the same when the step goes on; a metric is logged with what it has seen by then.

    A plain function over plain dictionaries, which Dynamo traces without a break.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _as_it_is(one) for key, one in value.items()}
    return value

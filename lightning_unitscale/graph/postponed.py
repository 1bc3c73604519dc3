"""What a step does to the world around it, held back until it has run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from lightning_unitscale.graph.deferred import DeferredCalls
from lightning_unitscale.graph.growing_lists import GrowingLists


class Postponed:
    """Calls of logging methods, and what is appended to lists.

    Args:
        module: The module.
        step: The method that runs.
        names: The methods whose calls are held back.
    """

    def __init__(self, module: nn.Module, step: Callable[..., Any], names: Sequence[str]) -> None:
        self._calls = DeferredCalls(module, names)
        self._lists = GrowingLists(module, step)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to be done."""
        return not (self._calls.calls or self._lists.given)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within this context nothing of it is done."""
        with self._calls.recording(), self._lists.recording():
            yield

    def replay(self) -> None:
        """Do it."""
        self._lists.replay()
        self._calls.replay()

    def discard(self) -> None:
        """Forget it: the step was a rehearsal, or failed."""
        self._calls.discard()
        self._lists.discard()

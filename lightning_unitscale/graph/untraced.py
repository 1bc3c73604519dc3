"""Run what is no part of a model outside of Dynamo: backward passes, and updates of the weights.

Dynamo would trace an optimizer's step like any other code, and optimizers compute by another
algorithm when they are traced (``torch.optim`` then keeps its step count in a tensor), so that the
weights would differ in their last bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_unitscale.shadowing import shadowed

# An object, the name of its method and, where a rehearsal is to do something in its place, what.
Calls = Iterable[tuple[Any, str] | tuple[Any, str, Callable[..., None]]]


class UntracedCalls:
    """Replaces methods of objects, while a step runs, by ones that Dynamo does not look into.

    Args:
        find: Says before each step which methods of which objects: ``(object, name)``, or
            ``(object, name, rehearsed)`` with what is called in a rehearsal instead.
        trace: Makes a function traced again; used for a closure that is handed to a method, since
            the model runs in it.

    Attributes:
        is_rehearsing: Whether the methods are left out, but for the closures that they are given:
            a rehearsal must not update weights.
    """

    def __init__(
        self, find: Callable[[], Calls], trace: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._find = find
        self.trace = trace
        self.is_rehearsing = False
        # Kept, since Dynamo guards on the identity of what it calls.
        self._calls: dict[tuple[int, str], _Untraced] = {}

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Within this context the methods run untraced; the real ones are back afterwards."""
        with contextlib.ExitStack() as stack:
            for one, name, *rehearsed in self._find():
                call = self._calls.setdefault((id(one), name), _Untraced(one, self))
                if vars(one).get(name) is call.run:
                    continue  # a step within a step
                call.stand_in_for(getattr(one, name), *rehearsed)
                stack.enter_context(shadowed(one, **{name: call.run}))
            yield


@contextlib.contextmanager
def plain_forward(module: nn.Module) -> Iterator[None]:
    """Within this context ``forward`` is not on the instance, if it is the class's own anyway.

    Lightning leaves it there under DDP. Dynamo would find it, and all that it calls, at another
    place than in the rehearsal outside of DDP, and the tensors would have other names.
    """
    attributes = module.__dict__
    forward = attributes.get("forward")
    is_own = getattr(forward, "__self__", None) is module and (
        getattr(forward, "__func__", None) is getattr(type(module), "forward", None)
    )
    if is_own:
        del attributes["forward"]
    try:
        yield
    finally:
        if is_own:
            attributes.setdefault("forward", forward)


class _Untraced:
    """One method of one object, which is kept so that its identity stays its own."""

    def __init__(self, owner: Any, calls: UntracedCalls) -> None:
        self.owner = owner
        self.method: Callable[..., Any] = lambda: None
        self.rehearsed: Callable[..., None] | None = None
        self._calls = calls
        self.run = torch.compiler.disable(self._run)

    def stand_in_for(
        self, method: Callable[..., Any], rehearsed: Callable[..., None] | None = None
    ) -> None:
        """Call ``method`` from now on, and have its marks (of a scheduler, on what it counts)."""
        self.method = method
        self.rehearsed = rehearsed
        self.run.__dict__.update(getattr(method, "__dict__", {}))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._calls.is_rehearsing:
            if self.rehearsed is not None:
                self.rehearsed(*args, **kwargs)
            closures = [one for one in (*args, *kwargs.values()) if hasattr(one, "__code__")]
            results = [self._traced(one)() for one in closures]
            return results[-1] if results else None
        args = tuple(self._traced(one) for one in args)
        return self.method(*args, **{name: self._traced(one) for name, one in kwargs.items()})

    def _traced(self, value: Any) -> Any:
        if not hasattr(value, "__code__"):
            return value
        return functools.wraps(value)(self._calls.trace(value))

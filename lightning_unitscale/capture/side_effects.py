"""Postpone or run untraced the side effects of a step: logging, appends, updates.

Dynamo cannot trace Lightning's ``self.log``: tracing it is an internal error, and skipping it
breaks the graph. A recorder that appends to a list is traced without either. Copies of the tensors
become outputs of the graph, since a step may later write into what it has logged. Dynamo guards on
the length of a list that a step appends to (``self.outputs.append(loss)``), so the step would be
recaptured at every call. So such lists are recorded too.

Dynamo would trace an optimizer's step like any other code. Traced optimizers use another algorithm
(``torch.optim`` then keeps its step count in a tensor), so the last bits of the weights would
differ. So backward passes and updates of the weights run untraced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.capture.reached_code import lists_of, only_appended_to
from lightning_unitscale.patching import shadowed

# An object, the name of its method and, for a rehearsal, an optional replacement.
Calls = Iterable[tuple[Any, str] | tuple[Any, str, Callable[..., None]]]


class Postponed:
    """Calls of logging methods and appends to lists, made after the step has run."""

    def __init__(self, module: nn.Module, step: Callable[..., Any], names: Sequence[str]) -> None:
        self._module = module
        self._step = step
        self.calls: list[_Call] = []
        # Kept, since Dynamo guards on them.
        self._methods = {
            name: _Recorder(name, self.calls).record
            for name in names
            if callable(getattr(module, name, None))
        }
        self._lists: dict[str, _Recorder] = {}
        self._names_of_lists: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Return the attributes of the module that record while a step runs."""
        return frozenset((*self._methods, *self._lists))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls and appends in this context. Methods and lists are restored after it."""
        self.discard()
        names = frozenset(lists_of(self._module))
        if names != self._names_of_lists:
            self._names_of_lists = names
            self._lists = {
                name: self._lists.get(name) or _Recorder(name, self.calls)
                for name in sorted(only_appended_to(self._module, self._step, names))
            }
        with shadowed(self._module, **self._methods, **self._lists):
            yield

    def replay(self) -> None:
        """Make the recorded calls and appends in their order."""
        calls = list(self.calls)
        self.discard()
        for name, args, kwargs in calls:
            target = getattr(self._module, name)
            (target.append if isinstance(target, list) else target)(*args, **kwargs)

    def discard(self) -> None:
        """Forget the records: the step was a rehearsal, or failed."""
        self.calls.clear()


# Name of a method, or of a list that its argument is appended to.
_Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class _Recorder:
    """Replacement for a method, or for a list that is empty before every step.

    Dynamo traces an ordinary append, and guards on nothing that changes.
    """

    def __init__(self, name: str, calls: list[_Call]) -> None:
        self.name = name
        self.calls = calls

    def record(self, *args: Any, **kwargs: Any) -> None:
        copied = tuple(_as_it_is(value) for value in args)
        self.calls.append((self.name, copied, {k: _as_it_is(value) for k, value in kwargs.items()}))

    def append(self, value: Any) -> None:
        self.calls.append((self.name, (value,), {}))

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            self.calls.append((self.name, (value,), {}))


def _as_it_is(value: Any) -> Any:
    """Copy a value so that the rest of the step cannot change it, except a metric's state.

    A plain function over plain dictionaries, which Dynamo traces without a break.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _as_it_is(item) for key, item in value.items()}
    return value


class UntracedCalls:
    """Replacements for methods of objects, while a step runs, that Dynamo does not trace."""

    def __init__(
        self, find: Callable[[], Calls], trace: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._find = find
        self.trace = trace
        # Then the methods are skipped, except for their closures: a rehearsal must not update
        # weights.
        self.is_rehearsing = False
        # Kept, since Dynamo guards on the identity of what it calls.
        self._calls: dict[tuple[int, str], _Untraced] = {}

    @contextlib.contextmanager
    def replaced(self, *, is_rehearsing: bool = False) -> Iterator[None]:
        """Run the methods untraced in this context. The real ones are restored after it."""
        self.is_rehearsing = is_rehearsing
        with contextlib.ExitStack() as stack:
            for target, name, *rehearsed in self._find():
                call = self._calls.setdefault((id(target), name), _Untraced(target, self))
                if vars(target).get(name) is call.run:
                    continue  # a step within a step
                call.method, call.rehearsed = getattr(target, name), next(iter(rehearsed), None)
                # The attributes on the method, such as a scheduler's counter.
                call.run.__dict__.update(getattr(call.method, "__dict__", {}))
                stack.enter_context(shadowed(target, **{name: call.run}))
            yield


@contextlib.contextmanager
def plain_forward(module: nn.Module) -> Iterator[None]:
    """Remove ``forward`` from the instance in this context, if it is the class's own anyway.

    Lightning sets it there under DDP. Dynamo would find it, and all that it calls, at another place
    than in the rehearsal outside of DDP. Then the tensors would have other names.
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
    """One method of one object, stored so that its identity does not change."""

    def __init__(self, owner: Any, calls: UntracedCalls) -> None:
        self.owner = owner
        self.method: Callable[..., Any] = lambda: None
        self.rehearsed: Callable[..., None] | None = None
        self._calls = calls
        self.run = torch.compiler.disable(self._run)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._calls.is_rehearsing:
            if self.rehearsed is not None:
                self.rehearsed(*args, **kwargs)
            closures = [
                function for function in (*args, *kwargs.values()) if hasattr(function, "__code__")
            ]
            results = [self._traced(function)() for function in closures]
            return results[-1] if results else None
        args = tuple(self._traced(value) for value in args)
        return self.method(*args, **{name: self._traced(value) for name, value in kwargs.items()})

    def _traced(self, value: Any) -> Any:
        if not hasattr(value, "__code__"):
            return value
        return functools.wraps(value)(self._calls.trace(value))

"""Refuse callbacks of a Trainer that do not go together, or are classes and not instances."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import FrameType, FunctionType, MethodType
from typing import Any

from lightning_unitscale.callbacks.packages import misconfigured
from lightning_unitscale.loops.loop import class_given, why_not_together

# The first hook that a Trainer or Fabric calls raises; what is called of an exception must not hide
# that one.
_GUARDED = {"setup": True, "on_after_setup": True, "on_exception": False}


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse callbacks that do not go together."""
    text = why_not_together(callbacks)
    if text is not None:
        raise misconfigured(text)


def check_list_in(frame: FrameType | None, callback: Any) -> None:
    """Check the list of callbacks in whose midst a callback is asked for something."""
    for value in () if frame is None else frame.f_locals.values():
        if isinstance(value, list) and any(item is callback for item in value):
            check_callbacks(value)


def guard_hooks(kind: type) -> None:
    """Let the first hooks of a class say so where it was given in place of an instance."""
    for name, refuses in _GUARDED.items():
        hook = inspect.getattr_static(kind, name, None)
        if isinstance(hook, FunctionType):
            setattr(kind, name, _InstanceHook(hook, refuses=refuses))


class _InstanceHook:
    """A hook of a class: Python passes it the instance or the class that is asked for it."""

    def __init__(self, hook: FunctionType, *, refuses: bool) -> None:
        functools.update_wrapper(self, hook)  # type: ignore[arg-type]  # only its attributes are set
        self._hook = hook
        self._refuses = refuses

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is not None:
            return MethodType(self._hook, instance)
        return functools.wraps(self._hook)(functools.partial(self._on_class, owner))

    def _on_class(self, owner: type, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], owner):
            return self._hook(*args, **kwargs)
        if self._refuses:
            raise misconfigured(class_given(owner))
        return None

"""Refuse callbacks of a Trainer that conflict, or that are classes and not instances."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import FrameType, FunctionType
from typing import Any

from lightning_unitscale.callbacks.packages import misconfigured
from lightning_unitscale.loops.loop import class_given, why_not_together

# The first hook that a Trainer or Fabric calls raises the error. Hooks for an exception must not
# hide that exception.
_GUARDED = {"setup": True, "on_after_setup": True, "on_exception": False}


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse callbacks that conflict."""
    text = why_not_together(callbacks)
    if text is not None:
        raise misconfigured(text)


def check_list_in(frame: FrameType | None, callback: Any) -> None:
    """Check the lists of callbacks in a frame that contain this callback."""
    for value in () if frame is None else frame.f_locals.values():
        if isinstance(value, list) and any(item is callback for item in value):
            check_callbacks(value)


def guard_hooks(kind: type) -> None:
    """Make the first hooks of a class raise if the class was given instead of an instance."""
    for name, refuses in _GUARDED.items():
        hook = inspect.getattr_static(kind, name, None)
        if isinstance(hook, FunctionType):
            setattr(kind, name, _of_instances(kind, hook, refuses=refuses))


def _of_instances(kind: type, hook: FunctionType, *, refuses: bool) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], kind):
            return hook(*args, **kwargs)
        if refuses:
            raise misconfigured(class_given(kind))
        return None

    return run

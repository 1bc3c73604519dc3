"""Refuse callbacks of a Trainer that do not go together, or are classes and not instances."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import FrameType, FunctionType
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

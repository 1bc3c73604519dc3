"""What an optimizer multiplies is not the model's; a closure that it calls is again."""

from __future__ import annotations

import functools
import weakref
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.dispatch.session import LOCAL, ProductSession


def suspend_in_optimizers() -> tuple[RemovableHandle, RemovableHandle]:
    """Let products of optimizers' steps be nobody's, until the handles are removed."""
    return (
        register_optimizer_step_pre_hook(_suspend),
        register_optimizer_step_post_hook(_resume),
    )


# Whose the products were before an optimizer's step; one that raises does not resume.
_SUSPENDED: WeakKeyDictionary[Optimizer, weakref.ref[ProductSession] | None] = WeakKeyDictionary()


def _suspend(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    session, LOCAL.session = LOCAL.session, None
    LOCAL.backward = -1, None  # it may step in a hook of the backward pass
    _SUSPENDED[optimizer] = None if session is None else session.ref
    if session is None:
        return None
    # A closure runs the model, under manual optimization within the step that is suspended.
    kwargs = {name: _in_session(session, value) for name, value in kwargs.items()}
    return tuple(_in_session(session, value) for value in args), kwargs


def _in_session(session: ProductSession, value: Any) -> Any:
    if isinstance(value, Optimizer) or not callable(value):
        return value

    @functools.wraps(value)
    def closure(*args: Any, **kwargs: Any) -> Any:
        with session.running():
            return value(*args, **kwargs)

    return closure


def _resume(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # Kernels may have been overridden in the middle of a step.
    if optimizer in _SUSPENDED:
        session = _SUSPENDED.pop(optimizer)
        LOCAL.session = None if session is None else session()

"""How an attachment hears of a module's calls and of optimizers' steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_unitscale.patching import StandIn, shadowed

if TYPE_CHECKING:
    from lightning_unitscale.loops.attach import Attachment


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that replicas of a module call."""
    # One that is compiled in place has all of its call compiled, what it calls included.
    while isinstance(module, DistributedDataParallel) and module._compiled_call_impl is None:
        module = module.module
    return module


def stepping_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that step, of one or several, which other packages may have wrapped.

    Torch's own where there are any; else what has a ``step``.

    Raises:
        TypeError: If one of them has none.
    """
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    found = []
    for item in given:
        inner = item
        while not isinstance(inner, Optimizer) and hasattr(inner, "optimizer"):
            inner = inner.optimizer
        if isinstance(inner, Optimizer):
            found.append(getattr(inner, "optimizer", inner))
        elif callable(getattr(item, "step", None)):
            found.append(item)
        else:
            raise TypeError(
                f"optimizer={item!r}: it has no step(); expected an optimizer, or several in a "
                "list; leave it out for every optimizer of torch with parameters of the module."
            )
    return found


class _Step(StandIn):
    """Stands in for the ``step`` of an optimizer that is none of torch's, which has no hooks."""

    def __init__(self, attachment: Attachment, optimizer: Any) -> None:
        super().__init__(optimizer.step)
        self._attachment = weakref.ref(attachment)
        self._optimizer = optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attachment = self._attachment()
        if attachment is None:
            return self._method(*args, **kwargs)
        attachment.before_step(self._optimizer)
        result = self._method(*args, **kwargs)
        attachment.after_step(self._optimizer)
        return result


class _Forward(StandIn):
    """Stands in for what a loop calls of an attached module, such as its ``forward``."""

    def __init__(self, attachment: Attachment, method: Any) -> None:
        super().__init__(method)
        self.attachment = attachment

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._method(*args, **kwargs)
        return self.attachment.run(self._method, args, kwargs)


def called(module: nn.Module) -> str:
    """Name of the attribute that a call of a module runs: another one after ``compile()``."""
    return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"


def through(attachment: Attachment) -> AbstractContextManager[None]:
    """Within this context calls of the module go through the attachment."""
    module = attachment.module
    methods = {name: _Forward(attachment, getattr(module, name)) for name in attachment.steps}
    return shadowed(module, **methods)


def on_optimizers(attachment: Attachment, optimizers: Iterable[Any]) -> ExitStack:
    """Tell an attachment of optimizers' steps, until what is returned is closed.

    Args:
        attachment: The attachment.
        optimizers: Whose steps it is told of beside those of all optimizers of torch.
    """
    known = weakref.ref(attachment)

    def before(optimizer: Optimizer, *_: Any) -> None:
        if (attachment := known()) is not None:
            attachment.before_step(optimizer)

    def after(optimizer: Optimizer, *_: Any) -> None:
        if (attachment := known()) is not None:
            attachment.after_step(optimizer)

    handles = ExitStack()
    handles.callback(register_optimizer_step_pre_hook(before).remove)
    handles.callback(register_optimizer_step_post_hook(after).remove)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            handles.enter_context(shadowed(optimizer, step=_Step(attachment, optimizer)))
    # A module that is gone has nobody left to detach it.
    weakref.finalize(attachment, handles.close).atexit = False
    return handles


def attachment_of(module: nn.Module) -> Attachment | None:
    """What callbacks work in that are attached to a module."""
    forward = vars(module).get(called(module))
    return forward.attachment if isinstance(forward, _Forward) else None

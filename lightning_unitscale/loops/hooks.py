"""How an attachment hears of a module's calls and of optimizers' steps."""

from __future__ import annotations

import abc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from typing_extensions import override

from lightning_unitscale.arguments import shown
from lightning_unitscale.capture.steps import LIGHTNING_STEPS
from lightning_unitscale.dispatch.torch_internals import is_recording
from lightning_unitscale.loops.loop import Loop
from lightning_unitscale.patching import StandIn, shadowed


class CalledLoop(Loop):
    """A loop that hears of a module's calls and of optimizers' steps."""

    @abc.abstractmethod
    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a call of the module."""

    @abc.abstractmethod
    def before_step(self, optimizer: Any, *, has_closure: bool = False) -> None:
        """Note that an optimizer begins its step."""

    @abc.abstractmethod
    def after_step(self, optimizer: Any, *, has_closure: bool = False) -> None:
        """Note that an optimizer has stepped."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that replicas of a module call."""
    # One that is compiled in place has all of its call compiled, what it calls included.
    while isinstance(module, DistributedDataParallel) and module._compiled_call_impl is None:
        module = module.module
    return module


def stepping_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that step, of one or several, which other packages may have wrapped.

    Torch's own where there are any; else what has a ``step``.
    """
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    found = []
    for item in given:
        inner = item
        while (held := _held_optimizer(inner)) is not None:
            inner = held
        if isinstance(inner, Optimizer):
            found.append(inner)
        elif callable(getattr(item, "step", None)):
            found.append(item)
        else:
            raise TypeError(
                f"optimizer={shown(item)}: it has no step(); expected an optimizer, or several in "
                "a list; leave it out for every optimizer of torch with parameters of the module."
            )
    return found


def _held_optimizer(wrapper: Any) -> Any:
    """The optimizer within another: only that need be one that torch tells of."""
    if hasattr(wrapper, "optimizer"):
        return wrapper.optimizer
    values = getattr(wrapper, "__dict__", {}).values()
    return next((value for value in values if isinstance(value, Optimizer)), None)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an optimizer's step was given a closure."""
    return callable(args[0] if args else kwargs.get("closure"))


class _Step(StandIn):
    """Stands in for the ``step`` of an optimizer that is none of torch's, which has no hooks."""

    def __init__(self, attachment: CalledLoop, optimizer: Any) -> None:
        super().__init__(optimizer.step)
        self._attachment = weakref.ref(attachment)
        self._optimizer = optimizer

    @override
    def call(self, *args: Any, **kwargs: Any) -> Any:
        attachment = self._attachment()
        if attachment is None:
            return self._method(*args, **kwargs)
        has_closure = _has_closure(args, kwargs)
        attachment.before_step(self._optimizer, has_closure=has_closure)
        result = self._method(*args, **kwargs)
        attachment.after_step(self._optimizer, has_closure=has_closure)
        return result


class _Forward(StandIn):
    """Stands in for what a loop calls of an attached module, such as its ``forward``."""

    def __init__(self, attachment: CalledLoop, method: Any) -> None:
        super().__init__(method)
        self.attachment = attachment

    @override
    def call(self, *args: Any, **kwargs: Any) -> Any:
        if is_recording():
            return self._method(*args, **kwargs)
        called = self.called_by(sys._getframe(1).f_back)
        if not isinstance(called, _Forward):
            return called(*args, **kwargs)
        return self.attachment.run(called._method, args, kwargs)


def called(module: nn.Module) -> str:
    """Name of the attribute that a call of a module runs: another one after ``compile()``."""
    return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"


def called_methods(module: nn.Module, methods: str | Iterable[str]) -> tuple[str, ...]:
    """Names of what a loop calls: the module, steps of a LightningModule, and other methods."""
    is_list = isinstance(methods, Iterable) and not isinstance(methods, (str, bytes))
    names = tuple(methods) if is_list else (methods,)
    for name in names:
        if not isinstance(name, str) or not callable(getattr(module, name, None)):
            raise ValueError(
                f"methods={shown(methods)}: {type(module).__name__} has no method {shown(name)}; "
                "expected names of methods that the loop calls; correct the name."
            )
    steps = (name for name in LIGHTNING_STEPS if callable(getattr(module, name, None)))
    others = (name for name in dict.fromkeys((*steps, *names)) if name != "forward")
    return called(module), *others


def through(attachment: CalledLoop) -> AbstractContextManager[None]:
    """Within this context calls of the module go through the attachment."""
    module = attachment.module
    methods = {name: _Forward(attachment, getattr(module, name)) for name in attachment.steps}
    return shadowed(module, **methods)


def on_optimizers(attachment: CalledLoop, optimizers: Iterable[Any]) -> ExitStack:
    """Tell an attachment of optimizers' steps, until what is returned is closed."""
    known = weakref.ref(attachment)

    # Torch hands over all that the step was given, the optimizer first. Not to be compiled with a
    # step that the user compiles.
    @torch.compiler.disable
    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (attachment := known()) is not None:
            attachment.before_step(optimizer, has_closure=_has_closure(args[1:], kwargs))

    @torch.compiler.disable
    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (attachment := known()) is not None:
            attachment.after_step(optimizer, has_closure=_has_closure(args[1:], kwargs))

    handles = ExitStack()
    handles.callback(register_optimizer_step_pre_hook(before).remove)
    handles.callback(register_optimizer_step_post_hook(after).remove)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            handles.enter_context(shadowed(optimizer, step=_Step(attachment, optimizer)))
    # A module that is gone has nobody left to detach it.
    weakref.finalize(attachment, handles.close).atexit = False
    return handles


def attachment_of(module: nn.Module) -> CalledLoop | None:
    """What callbacks work in that are attached to a module."""
    forward = vars(module).get(called(module))
    if not isinstance(forward, _Forward) or forward.is_removed:
        return None
    return forward.attachment


def warn_of_no_call(module: nn.Module, num_steps: int) -> None:
    """Warn that an optimizer steps, and no call was seen with gradients that it learns from."""
    warnings.warn(
        f"module={type(module).__name__}: an optimizer has stepped {num_steps} times, and no call "
        "of the module that records gradients was seen, so that callbacks have seen no training "
        "step. Expected such calls of the module that was given; if it was compiled or wrapped "
        "afterwards, attach what is called; if the loop calls another method of it than forward, "
        "name that in attach(..., methods=); if it calls parts of it, attach these.",
        stacklevel=6,
    )


def warn_of_no_step(module: nn.Module) -> None:
    """Warn that a module was called in training, and no optimizer has stepped."""
    warnings.warn(
        f"module={type(module).__name__}: it was called in training, and no step of an optimizer "
        "was seen, so that callbacks have seen no training step. Expected steps of an optimizer of "
        "torch with parameters of the module, or of the one that is given; pass the one whose "
        "step() the loop calls as attach(module, optimizer, ...), or none if the loop makes its "
        "own.",
        stacklevel=4,
    )

"""Callbacks around a module in any training loop."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import MethodType, TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from typing_extensions import override

from lightning_unitscale.loops.arguments import torch_optimizers, unwrapped
from lightning_unitscale.loops.loggers import checked_loggers
from lightning_unitscale.loops.loop import Loop, LoopCallback, StepCaller, rank, world_size
from lightning_unitscale.lossless.calibrate import find_loss
from lightning_unitscale.patching import copied_method, reduced_method, shadowed

_EVALUATION = "evaluation"
_IDLE_STEPS = 3


def attach(
    module: nn.Module,
    optimizer: Any = None,
    callbacks: LoopCallback | Iterable[LoopCallback] = (),
    *,
    log_dir: str | Path | None = None,
    loggers: Any = (),
    scaler: Any = None,
) -> Attachment:
    """Let callbacks work on a module in a training loop of any kind.

    A training step is what the module's calls in training mode compute, with their backward passes,
    until an optimizer steps that has parameters of the module; calls in evaluation mode, or without
    gradients, are an evaluation. The loop itself has to tell nothing.

    Args:
        module: The module, as it is called: after ``DistributedDataParallel``, ``fully_shard`` or
            ``accelerator.prepare``.
        optimizer: Whose steps end a training step, one or several; by default every optimizer that
            has a parameter of the module.
        callbacks: One or several: ``UnitScaleCallback`` at the dispatcher (lossless, simulated
            formats, FP8), ``ScaleMonitor``.
        log_dir: Folder of TensorBoard's event files, for ``ScaleMonitor``.
        loggers: What ``ScaleMonitor`` writes to as well, one or several: a logger of Lightning or
            Fabric, a ``SummaryWriter``, a run of W&B, Trackio or MLflow.
        scaler: The ``GradScaler`` that multiplies the loss, if there is one.

    Returns:
        The attachment: a context, and a handle with ``detach()``, ``state_dict()`` and
        ``load_state_dict()``.

    Raises:
        TypeError: If an argument is none of these.
        ValueError: If a callback needs more than such a loop can give.

    Examples:
        >>> from lightning_unitscale import UnitScaleCallback, attach
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with attach(model, optimizer, callbacks=[UnitScaleCallback()]):
        ...     for batch in torch.randn(3, 4, 8):
        ...         model(batch).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    return Attachment(module, optimizer, callbacks, log_dir=log_dir, loggers=loggers, scaler=scaler)


class Attachment(Loop):
    """What :func:`attach` returns, whose arguments it takes.

    Attributes:
        should_stop: Whether a callback has asked for the training to end.
    """

    training_step = "forward"
    has_loss_outside = True
    is_fitting = True
    step_index = 0
    has_stepped = False
    should_stop = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        callbacks: LoopCallback | Iterable[LoopCallback],
        *,
        log_dir: str | Path | None = None,
        loggers: Any = (),
        scaler: Any = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"module={module!r}: no torch.nn.Module; expected the module that is trained; pass "
                "the model itself."
            )
        self.module = unwrapped(module)
        if attachment_of(self.module) is not None:
            raise ValueError(
                f"module={type(module).__name__}: callbacks are attached to it already; expected "
                "all of them in one call; pass them together, or detach() the others first."
            )
        self.steps = (_called(self.module),)
        self._optimizers = None if optimizer is None else torch_optimizers(optimizer)
        self._callbacks: list[LoopCallback] = []
        self._scaler = scaler
        self._log_dir = log_dir
        self._loggers = checked_loggers(loggers)
        self._writer: Any = None
        # Whether the module has been called in training since the last step.
        self._is_in_batch = False
        # Optimizer steps before the first call: a step or two may make the optimizer's state.
        self._num_idle_steps = 0
        # The optimizer whose step is under way and ends a training step.
        self._stepping: Optimizer | None = None
        self._call: StepCaller | None = None
        # What is undone at the end, the calls of the module first.
        self._attached, self._forward = ExitStack(), ExitStack()
        self._is_attached = True
        with ExitStack() as undo:
            undo.callback(self._close)
            self._attached.callback(_on_optimizers(self).close)
            self._forward.enter_context(_stepping_aside(self))
            given = (callbacks,) if isinstance(callbacks, LoopCallback) else callbacks
            for callback in given:
                self.add(callback)
            undo.pop_all()

    @property
    @override
    def device(self) -> torch.device:
        tensors = (*self.module.parameters(), *self.module.buffers())
        return tensors[0].device if tensors else torch.device("cpu")

    @property
    @override
    def scaler(self) -> Any:
        return self._scaler

    @property
    @override
    def num_parts(self) -> int:
        return world_size()

    @property
    @override
    def is_global_zero(self) -> bool:
        return rank() == 0

    @property
    @override
    def loggers(self) -> Sequence[Any]:
        if self._log_dir is None:
            return self._loggers
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._log_dir))
        return (*self._loggers, self._writer)

    @contextmanager
    @override
    def running_steps_by(self, call: StepCaller) -> Iterator[None]:
        self._call = call
        try:
            yield
        finally:
            self._call = None

    @override
    def stop(self) -> None:
        self.should_stop = True

    @property
    def callbacks(self) -> tuple[LoopCallback, ...]:
        """The callbacks, in their order."""
        return tuple(self._callbacks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.detach()
        else:
            self._close()

    def add(self, callback: LoopCallback) -> None:
        """Let one more callback work on the module, from the next training step on.

        Raises:
            TypeError: If it is made for a Trainer only, or is no callback.
            ValueError: If there is one of its class, or it needs more than such a loop can give.
        """
        if not isinstance(callback, LoopCallback):
            raise TypeError(
                f"callbacks={callback!r}: it works in a Lightning Trainer only; expected "
                "UnitScaleCallback() or ScaleMonitor(); leave it out."
            )
        name = type(callback).__name__
        if any(type(other) is type(callback) for other in self._callbacks):
            raise ValueError(
                f"callbacks: {name} is given twice; expected it once; remove the others."
            )
        # A callback puts what it needs below the attachment's own.
        self._forward.close()
        try:
            callback.start(self)
            self._attached.callback(callback.leave)
            self._callbacks.append(callback)
        finally:
            self._forward.enter_context(_stepping_aside(self))

    def detach(self) -> None:
        """Leave module and torch as they were; may be called more than once."""
        try:
            if self._is_attached:
                for callback in self._callbacks:
                    callback.finish()
        finally:
            self._close()

    def state_dict(self) -> dict[str, Any]:
        """What to go on from after a restart: the step, and the state of each callback."""
        states = {type(callback).__name__: callback.state_dict() for callback in self._callbacks}
        return {"step": self.step_index, "callbacks": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.step_index = state_dict["step"]
        for callback in self._callbacks:
            if state := state_dict["callbacks"].get(type(callback).__name__):
                callback.load_state_dict(state)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a call of the module, as a batch of training or of an evaluation."""
        if not (self.module.training and torch.is_grad_enabled()):
            for callback in self._callbacks:
                callback.begin_evaluation(_EVALUATION)
            try:
                return forward(*args, **kwargs)
            finally:
                for callback in self._callbacks:
                    callback.end_evaluation()
        if not self._is_in_batch:
            self._is_in_batch, self.has_stepped = True, False
            for callback in self._callbacks:
                callback.begin_batch()
        call = self._call
        result = forward(*args, **kwargs) if call is None else call(forward, args, kwargs)
        loss = find_loss(result)
        for callback in self._callbacks:
            callback.begin_backward(loss)
        return result

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer begins its step: the gradients are there."""
        if self._is_in_batch and self._ends_with(optimizer):
            self._stepping = optimizer
            for callback in self._callbacks:
                callback.end_backward()
        elif not self.step_index and self._num_idle_steps < _IDLE_STEPS:
            self._num_idle_steps += self._ends_with(optimizer)
            if self._num_idle_steps == _IDLE_STEPS:
                self._warn_of_no_call()

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        if self._stepping is not optimizer:
            return
        self._stepping = None
        self._is_in_batch, self.has_stepped = False, True
        self.step_index += 1
        for callback in self._callbacks:
            callback.end_batch()

    def _ends_with(self, optimizer: Optimizer) -> bool:
        if self._optimizers is not None:
            return any(optimizer is known for known in self._optimizers)
        own = {id(param) for param in self.module.parameters()}
        return any(
            id(param) in own for group in optimizer.param_groups for param in group["params"]
        )

    def _warn_of_no_call(self) -> None:
        name = type(self.module).__name__
        warnings.warn(
            f"module={name}: an optimizer has stepped {_IDLE_STEPS} times, and no call of the "
            "module was seen, so that callbacks have done nothing. Expected calls of the module "
            "that was given; if it was compiled or wrapped afterwards, attach what is called; if "
            "the loop calls another method of it than forward, call the module instead.",
            stacklevel=5,
        )

    def _close(self) -> None:
        self._is_attached = False
        self._forward.close()
        self._attached.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _Forward:
    """Stands in for the ``forward`` of an attached module, or for its compiled call."""

    def __init__(self, attachment: Attachment, method: Any) -> None:
        # First: it takes over the attributes of what it wraps, which may stand in as well.
        functools.update_wrapper(self, method)
        self.attachment = attachment
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._method(*args, **kwargs)
        return self.attachment.run(self._method, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied_method(_own(self._method), memo)

    def __reduce__(self) -> Any:
        return reduced_method(_own(self._method))


def _own(method: Any) -> Any:
    """The module's own method, under what callbacks have put over it."""
    while not isinstance(method, MethodType) and hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


def _called(module: nn.Module) -> str:
    """Name of the attribute that a call of a module runs: another one after ``compile()``."""
    return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"


def _stepping_aside(attachment: Attachment) -> AbstractContextManager[None]:
    """Within this context calls of the module go through the attachment."""
    (name,) = attachment.steps
    method = _Forward(attachment, getattr(attachment.module, name))
    return shadowed(attachment.module, **{name: method})


def _on_optimizers(attachment: Attachment) -> ExitStack:
    """Tell an attachment of the steps of all optimizers, until what is returned is closed."""
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
    # A module that is gone has nobody left to detach it.
    weakref.finalize(attachment, handles.close).atexit = False
    return handles


def attachment_of(module: nn.Module) -> Attachment | None:
    """What callbacks work in that are attached to a module."""
    forward = vars(module).get(_called(module))
    return forward.attachment if isinstance(forward, _Forward) else None

"""Callbacks around a module in any training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unitscale.arguments import shown
from lightning_unitscale.dispatch.nodes import HandedOn
from lightning_unitscale.loops.given import check_log_dir, given_callbacks
from lightning_unitscale.loops.hooks import (
    CalledLoop,
    attachment_of,
    called_methods,
    on_optimizers,
    stepping_optimizers,
    through,
    unwrapped,
    warn_of_no_call,
    warn_of_no_step,
)
from lightning_unitscale.loops.loggers import checked_loggers
from lightning_unitscale.loops.loop import LoopCallback, StepCaller
from lightning_unitscale.loops.shared_parameters import SharedParameters
from lightning_unitscale.lossless.full_precision import find_loss
from lightning_unitscale.ranks import rank, world_size

_EVALUATION = "evaluation"
# The attachments of the modules that are being called.
_CALLING: HandedOn[tuple[Attachment, ...]] = HandedOn("calling", ())
_IDLE_STEPS = 3


def attach(
    module: nn.Module,
    optimizer: Any = None,
    callbacks: LoopCallback | Iterable[LoopCallback] = (),
    *,
    methods: str | Iterable[str] = (),
    log_dir: str | Path | None = None,
    loggers: Any = (),
    scaler: Any = None,
) -> Attachment:
    """Let callbacks work on a module in a training loop of any kind.

    A training step is what the module's calls in training mode compute, with their backward passes,
    until an optimizer steps that has parameters of the module; calls of a closure, within the step,
    are of that step. Calls in evaluation mode, or without gradients, are an evaluation, unless an
    optimizer steps after nothing but such calls with gradients: from then on these are training.
    The loop itself has to tell nothing.

    Args:
        module: The module, as it is called: after ``DistributedDataParallel``, ``fully_shard`` or
            ``accelerator.prepare``.
        optimizer: Whose steps end a training step, one or several; by default every optimizer of
            torch that has a parameter of the module. One that is none of torch's has to be given.
        callbacks: One or several: ``UnitScaleCallback`` at the dispatcher (lossless, simulated
            formats, FP8), ``ScaleMonitor``.
        methods: Names of other methods of the module that the loop calls: calls of these are calls
            of the module too. Those of a LightningModule's steps are known.
        log_dir: Folder of TensorBoard's event files, for ``ScaleMonitor``.
        loggers: What ``ScaleMonitor`` writes to as well, one or several: a logger of Lightning or
            Fabric, a ``SummaryWriter``, a run of W&B, Trackio or MLflow.
        scaler: The ``GradScaler`` that multiplies the loss, if there is one.

    Returns:
        The attachment: a context, and a handle with ``detach()``, ``state_dict()`` and
        ``load_state_dict()``.

    Raises:
        TypeError: If an argument is none of these.
        ValueError: If a callback needs more than such a loop can give, two of them set the same, or
            nothing can be written to ``log_dir``.

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
    return Attachment(
        module,
        optimizer,
        callbacks,
        methods=methods,
        log_dir=log_dir,
        loggers=loggers,
        scaler=scaler,
    )


class Attachment(CalledLoop):
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
        methods: str | Iterable[str] = (),
        log_dir: str | Path | None = None,
        loggers: Any = (),
        scaler: Any = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"module={shown(module)}: no torch.nn.Module; expected the module that is trained; "
                "pass the model itself."
            )
        self.module = unwrapped(module)
        if attachment_of(self.module) is not None:
            raise ValueError(
                f"module={type(module).__name__}: callbacks are attached to it already; expected "
                "all of them in one call; pass them together, or detach() the others first."
            )
        self.steps = called_methods(self.module, methods)
        self._optimizers = None if optimizer is None else stepping_optimizers(optimizer)
        self._callbacks: list[LoopCallback] = []
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise TypeError(
                f"scaler={shown(scaler)}: no gradient scaler; expected a torch.amp.GradScaler; "
                "leave it out if the loss is not scaled."
            )
        self._scaler = scaler
        self._log_dir = log_dir
        self._loggers = checked_loggers(loggers)
        self._writer: Any = None
        # Whether the module has been called in training since the last step.
        self._is_in_batch = False
        # Whether only calls in evaluation mode have recorded gradients since the last step, and
        # whether one has followed them: a model that is fine-tuned in the mode it was loaded in.
        self._has_evaluated = self._trains_in_evaluation = False
        # Optimizer steps before the first call: a step or two may make the optimizer's state.
        self._num_idle_steps = 0
        self._shared = SharedParameters(module)
        self._met: WeakSet[Optimizer] = WeakSet()
        # The optimizer whose step is under way and ends a training step.
        self._stepping: Any = None
        self._call: StepCaller | None = None
        # What is undone at the end, the calls of the module first.
        self._attached, self._forward = ExitStack(), ExitStack()
        self._is_attached = True
        with ExitStack() as undo:
            undo.callback(self._close)
            if log_dir is not None and self.is_global_zero:
                check_log_dir(log_dir)
            self._attached.callback(on_optimizers(self, self._optimizers or ()).close)
            self._forward.enter_context(through(self))
            for callback in given_callbacks(callbacks):
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
            ValueError: If there is one that sets the same, or it needs more than such a loop can
                give.
        """
        given_callbacks([*self._callbacks, callback])
        # A callback puts what it needs below the attachment's own.
        self._forward.close()
        try:
            with ExitStack() as undo:
                undo.callback(callback.leave)
                callback.start(self)
                self._attached.callback(undo.pop_all().close)
            self._callbacks.append(callback)
        finally:
            self._forward.enter_context(through(self))

    def keep(self, context: AbstractContextManager[Any]) -> None:
        """Enter a context, until everything is left as it was."""
        self._attached.enter_context(context)

    def follow(self, name: str) -> None:
        """Let calls of one more method of the module be calls of the module.

        Args:
            name: Of the method.
        """
        self._forward.close()
        # Each stands aside for the methods that it is told of when it starts.
        for callback in reversed(self._callbacks):
            callback.leave()
        self.steps = called_methods(self.module, (*self.steps, name))
        for callback in self._callbacks:
            callback.start(self)
        self._forward.enter_context(through(self))

    def detach(self) -> None:
        """Leave module and torch as they were; may be called more than once."""
        try:
            if self._is_attached:
                if self._is_in_batch and not self.step_index:
                    warn_of_no_step(self.module)
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

    @override
    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a call of the module, as a batch of training or of an evaluation."""
        # Somebody may have kept the method that stood in.
        if self in _CALLING.get() or not self._is_attached:
            return forward(*args, **kwargs)
        with _CALLING.being((*_CALLING.get(), self)):
            return self._run(forward, args, kwargs)

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        is_training = self.module.training or self._trains_in_evaluation
        if not (is_training and torch.is_grad_enabled()):
            self._has_evaluated |= torch.is_grad_enabled()
            for callback in self._callbacks:
                callback.begin_evaluation(_EVALUATION)
            try:
                return forward(*args, **kwargs)
            finally:
                for callback in self._callbacks:
                    callback.end_evaluation()
        if not self._is_in_batch:
            self._is_in_batch, self.has_stepped, self._has_evaluated = True, False, False
            for callback in self._callbacks:
                callback.begin_batch()
        call = self._call
        result = forward(*args, **kwargs) if call is None else call(forward, args, kwargs)
        loss = find_loss(result)
        for callback in self._callbacks:
            callback.begin_backward(loss)
        return result

    @override
    def before_step(self, optimizer: Any, *, has_closure: bool = False) -> None:
        """Note that an optimizer begins its step: its closure may call the module within it."""
        is_new = isinstance(optimizer, Optimizer) and optimizer not in self._met
        if is_new and self._ends_with(optimizer):
            self._met.add(optimizer)
            for callback in self._callbacks:
                callback.meet_optimizer(optimizer)
        if not has_closure:
            self._end_backward(optimizer)

    @override
    def after_step(self, optimizer: Any, *, has_closure: bool = False) -> None:
        """Note that an optimizer has stepped."""
        if has_closure:
            self._end_backward(optimizer)
        if self._stepping is not optimizer:
            return
        self._stepping = None
        self._is_in_batch, self.has_stepped = False, True
        self.step_index += 1
        for callback in self._callbacks:
            callback.end_batch()

    def _end_backward(self, optimizer: Any) -> None:
        """The gradients are there, if the optimizer's steps end a training step."""
        if not self._is_in_batch:
            if not self._trains_in_evaluation:
                self._trains_in_evaluation = self._has_evaluated and self._ends_with(optimizer)
                self._count_idle(optimizer)
        elif self._ends_with(optimizer):
            self._stepping = optimizer
            for callback in self._callbacks:
                callback.end_backward()

    def _count_idle(self, optimizer: Any) -> None:
        if self.step_index or self._num_idle_steps == _IDLE_STEPS:
            return
        # One that was not given has parameters of the module where the loop makes its own.
        if self._ends_with(optimizer) or self._shared.are_in(optimizer):
            self._num_idle_steps += 1
            if self._num_idle_steps == _IDLE_STEPS:
                warn_of_no_call(self.module, _IDLE_STEPS)

    def _ends_with(self, optimizer: Any) -> bool:
        is_shared = self._optimizers is None and self._shared.are_in(optimizer)
        return is_shared or any(optimizer is known for known in self._optimizers or ())

    def _close(self) -> None:
        self._is_attached = False
        self._forward.close()
        self._attached.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

"""A loop that only calls a module and steps an optimizer, as callbacks see it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unitscale.dispatch.nodes import HandedOn
from lightning_unitscale.loops.hooks import OptimizerSteps, called_methods, unwrapped
from lightning_unitscale.loops.loggers import checked_loggers
from lightning_unitscale.loops.loop import Loop, LoopCallback, StepCaller
from lightning_unitscale.lossless.full_precision import find_loss
from lightning_unitscale.ranks import rank, world_size

_EVALUATION = "evaluation"
# The loops whose modules are being called.
_CALLING: HandedOn[tuple[CalledLoop, ...]] = HandedOn("calling", ())
_IDLE_STEPS = 3


class CalledLoop(Loop):
    """Finds batches, evaluations and training steps in a module's calls and optimizers' steps."""

    training_step = "forward"
    has_loss_outside = True
    step_index = 0
    has_stepped = False
    should_stop = False
    scaler: Any = None

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        methods: str | Iterable[str],
        log_dir: str | Path | None,
        loggers: Any,
    ) -> None:
        self.module = unwrapped(module)
        self.steps = called_methods(self.module, methods)
        self._optimizers = OptimizerSteps(module, optimizer)
        self._callbacks: list[LoopCallback] = []
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
        self._met: WeakSet[Optimizer] = WeakSet()
        # The optimizer whose step is under way and ends a training step.
        self._stepping: Any = None
        self._call: StepCaller | None = None
        self._is_attached = True

    @property
    @override
    def device(self) -> torch.device:
        tensors = (*self.module.parameters(), *self.module.buffers())
        return tensors[0].device if tensors else torch.device("cpu")

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

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a call of the module, as a batch of training or of an evaluation."""
        # Other code may have kept the method that stood in.
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

    def before_step(self, optimizer: Any, *, has_closure: bool = False) -> None:
        """Note that an optimizer begins its step: its closure may call the module within it."""
        is_new = isinstance(optimizer, Optimizer) and optimizer not in self._met
        if is_new and self._optimizers.end_with(optimizer):
            self._met.add(optimizer)
            for callback in self._callbacks:
                callback.meet_optimizer(optimizer)
        if not has_closure:
            self._end_backward(optimizer)

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
        """Report that the gradients are complete, if the optimizer's steps end a training step."""
        if not self._is_in_batch:
            if not self._trains_in_evaluation:
                if self._has_evaluated:
                    self._trains_in_evaluation = self._optimizers.end_with(optimizer)
                self._count_idle(optimizer)
        elif self._optimizers.end_with(optimizer):
            self._stepping = optimizer
            for callback in self._callbacks:
                callback.end_backward()

    def _count_idle(self, optimizer: Any) -> None:
        if self.step_index or self._num_idle_steps == _IDLE_STEPS:
            return
        # One that was not given has parameters of the module where the loop makes its own.
        if self._optimizers.end_with(optimizer) or self._optimizers.share_parameters(optimizer):
            self._num_idle_steps += 1
            if self._num_idle_steps == _IDLE_STEPS:
                warnings.warn(
                    f"module={type(self.module).__name__}: an optimizer has stepped {_IDLE_STEPS} "
                    "times, and no call of the module that records gradients was seen, so the "
                    "callbacks have seen no training step. Attach the module that the loop calls: "
                    "the compiled or wrapped one, or the parts that it calls. If the loop calls "
                    "another method than forward, name it in attach(..., methods=).",
                    stacklevel=6,
                )

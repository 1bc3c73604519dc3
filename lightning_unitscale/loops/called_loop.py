"""Find training steps in a loop that only calls a module and steps an optimizer."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

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
from lightning_unitscale.capture.module_steps import LIGHTNING_STEPS
from lightning_unitscale.loops.loggers import checked_loggers
from lightning_unitscale.loops.loop import Loop, LoopCallback, StepCaller
from lightning_unitscale.loops.ranks import UNEVEN, joins_ranks, rank, world_size
from lightning_unitscale.matmuls.autograd_nodes import HandedOn
from lightning_unitscale.matmuls.module_matmuls import find_loss
from lightning_unitscale.monitor.watcher import CalledMethod
from lightning_unitscale.patching import Replacement, shadowed

_EVALUATION = "evaluation"
# The loops with a call of their module in progress.
_CALLING: HandedOn[tuple[CalledLoop, ...]] = HandedOn("calling", ())
_IDLE_STEPS = 3
# A loop may accumulate gradients over many calls, or load weights after a first one.
_MAX_CALLS, _MAX_CHANGES = 2**8, 3


class CalledLoop(Loop):
    """A loop that is inferred from a module's calls and optimizers' steps."""

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
        self.module, self._wrapper = unwrapped(module), module
        self.steps = called_methods(self.module, methods)
        self._optimizers = OptimizerSteps(module, optimizer)
        self._callbacks: list[LoopCallback] = []
        self._log_dir = log_dir
        self._loggers = checked_loggers(loggers)
        self._writer: Any = None
        # True if the module has been called in training since the last step.
        self._is_in_batch = False
        # True if only calls in evaluation mode have recorded gradients since the last step, and if
        # a step has followed such calls (fine-tuning a model that was loaded in evaluation mode).
        self._has_evaluated = self._trains_in_evaluation = False
        # Optimizer steps before the first call. One or two may create the optimizer's state.
        self._num_idle_steps = 0
        self._met: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepping: Any = None  # the optimizer that is stepping and ends a training step
        self.stepless = SteplessCalls(self.module)
        self._call: StepCaller | None = None
        self._is_attached = True

    @property
    @override
    def callbacks(self) -> Sequence[Any]:
        return self._callbacks

    @property
    @override
    def device(self) -> torch.device:
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        first = next(tensors, None)
        return torch.device("cpu") if first is None else first.device

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

    @override
    def running_steps_by(self, call: StepCaller) -> AbstractContextManager[None]:
        return shadowed(self, _call=call)

    @override
    def stop(self) -> None:
        self.should_stop = True

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a call of the module as a batch of training or of an evaluation."""
        # Other code may have kept the replaced method.
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
            if joins_ranks(self._wrapper) and self not in UNEVEN:
                self._leave_ranks()
            for callback in self._callbacks:
                callback.begin_batch()
        call = self._call
        with contextlib.nullcontext() if self.step_index else self.stepless.call():
            result = forward(*args, **kwargs) if call is None else call(forward, args, kwargs)
        loss = find_loss(result)
        for callback in self._callbacks:
            callback.begin_backward(loss)
        return result

    def _leave_ranks(self) -> None:
        """Exchange nothing with other ranks, which may run other numbers of steps."""
        UNEVEN.add(self)
        if self.is_global_zero:
            warnings.warn(
                f"module={type(self._wrapper).__name__}: it trains in torch's Join context, in "
                "which ranks may run different numbers of steps. So each rank measures its own "
                "units, and ScaleMonitor shows the first rank's batches. For joint units, give all "
                "ranks the same number of batches, without Join.",
                stacklevel=6,
            )

    def before_step(self, optimizer: Any, *, has_closure: bool = False) -> None:
        """Note that an optimizer begins its step. Its closure may call the module."""
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
        """Report complete gradients, if the optimizer's steps end a training step."""
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
        # An optimizer that was not passed may still have parameters of the module.
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


class SteplessCalls:
    """The calls of a module in training before the first step of an optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Of calls, and of changes of a parameter between them, with its last version.
        self._num_calls = self._num_changes = self._version = 0
        self._has_warned = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Run a call within this context. Warn if no step seems to follow the calls."""
        self._num_changes += bool(self._num_calls) and self._latest_version() != self._version
        self._num_calls += 1
        if self._num_calls == _MAX_CALLS or self._num_changes == _MAX_CHANGES:
            self.warn(stacklevel=10)
        yield
        self._version = self._latest_version()

    def _latest_version(self) -> int:
        return next((p._version for p in self._module.parameters() if p.requires_grad), 0)

    def warn(self, stacklevel: int) -> None:
        """Warn once that no optimizer has ended a step."""
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"module={type(self._module).__name__}: it was called in training, but no optimizer "
            "step was seen, so the callbacks have seen no training step. Pass the optimizer whose "
            "step() the loop calls: attach(module, optimizer, ...). If the loop creates its own "
            "torch optimizer with parameters of the module, leave the argument out. If it updates "
            "the parameters itself, pass an object with a method step(), and call it afterwards.",
            stacklevel=stacklevel,
        )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that replicas of a module call."""
    # A module that is compiled in place compiles its whole call, inner calls included.
    while isinstance(module, DistributedDataParallel) and module._compiled_call_impl is None:
        module = module.module
    return module


def stepping_optimizers(optimizer: Any) -> list[Any]:
    """Return the stepping optimizers of one or several, which other packages may have wrapped."""
    # These are torch's own optimizers if there are any, and otherwise objects with a `step`.
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
                f"optimizer={shown(item)}: it has no step(). Expected an optimizer, or several in "
                "a list. Leave it out to use every torch optimizer with parameters of the module."
            )
    return found


def _held_optimizer(wrapper: Any) -> Any:
    """Return the torch optimizer that another one wraps. Only torch's have the needed hooks."""
    if hasattr(wrapper, "optimizer"):
        return wrapper.optimizer
    values = getattr(wrapper, "__dict__", {}).values()
    return next((value for value in values if isinstance(value, Optimizer)), None)


class OptimizerSteps:
    """The optimizers that train a module: those passed, or all with some of its parameters."""

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        self._module = module
        self._given = None if optimizer is None else stepping_optimizers(optimizer)
        # Where a parameter was found last: its group and index, its owner in the module, its name.
        # This saves a search through thousands of parameters in every step.
        self._found: WeakKeyDictionary[Any, tuple[int, int, nn.Module, str]] = WeakKeyDictionary()

    def end_with(self, optimizer: Any) -> bool:
        """Check whether a step of an optimizer ends a training step."""
        if self._given is None:
            return self.share_parameters(optimizer)
        return any(optimizer is known for known in self._given)

    def share_parameters(self, optimizer: Any) -> bool:
        """Check whether an optimizer has a parameter of the module."""
        groups = optimizer.param_groups
        if (found := self._found.get(optimizer)) is not None:
            group, index, owner, name = found
            with contextlib.suppress(IndexError, KeyError):
                if owner._parameters[name] is groups[group]["params"][index]:
                    return True
        places = {
            id(parameter): (owner, name)
            for owner in self._module.modules()
            for name, parameter in owner._parameters.items()
        }
        for group, options in enumerate(groups):
            for index, parameter in enumerate(options["params"]):
                if (place := places.get(id(parameter))) is not None:
                    self._found[optimizer] = group, index, *place
                    return True
        return False

    def hook(self, before: Callable[..., None], after: Callable[..., None]) -> ExitStack:
        """Call a loop's methods around every step, until the returned context is closed."""
        methods = [weakref.WeakMethod(method) for method in (before, after)]

        def call(which: int, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (method := methods[which]()) is not None:
                closure = args[0] if args else kwargs.get("closure")
                method(optimizer, has_closure=callable(closure))

        def step_hook(which: int) -> Callable[..., None]:
            # Torch passes the arguments of the step, the optimizer first. The user's compiled step
            # must not include this.
            @torch.compiler.disable
            def run(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                call(which, optimizer, args[1:], kwargs)

            return run

        def hooked(optimizer: Any, step: Callable[..., Any]) -> Replacement:
            def run(*args: Any, **kwargs: Any) -> Any:
                call(0, optimizer, args, kwargs)
                result = step(*args, **kwargs)
                call(1, optimizer, args, kwargs)
                return result

            return Replacement(step, run)

        handles = ExitStack()
        handles.callback(register_optimizer_step_pre_hook(step_hook(0)).remove)
        handles.callback(register_optimizer_step_post_hook(step_hook(1)).remove)
        for optimizer in self._given or ():
            if not isinstance(optimizer, Optimizer):  # it has no hooks
                step = hooked(optimizer, optimizer.step)
                handles.enter_context(shadowed(optimizer, step=step))
        # Close the hooks of a loop that is gone with its module without detach().
        weakref.finalize(before.__self__, handles.close).atexit = False  # type: ignore[attr-defined]
        return handles


def called(module: nn.Module) -> str:
    """Return the attribute that a call of a module runs, which ``compile()`` changes."""
    return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"


def called_methods(module: nn.Module, methods: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of called methods: of the module, a LightningModule's steps, others."""
    is_list = isinstance(methods, Iterable) and not isinstance(methods, (str, bytes))
    names = tuple(methods) if is_list else (methods,)
    for name in names:
        if not isinstance(name, str) or not callable(getattr(module, name, None)):
            raise ValueError(
                f"methods={shown(methods)}: {type(module).__name__} has no method {shown(name)}. "
                "Expected names of methods that the loop calls. Correct the name."
            )
    steps = (name for name in LIGHTNING_STEPS if callable(getattr(module, name, None)))
    others = (name for name in dict.fromkeys((*steps, *names)) if name != "forward")
    return called(module), *others


def through(loop: Loop, run: StepCaller) -> AbstractContextManager[None]:
    """Run the calls of a loop's module by ``run`` within this context."""
    module = loop.module
    methods = {name: CalledMethod(getattr(module, name), loop, run) for name in loop.steps}
    return shadowed(module, **methods)


def attachment_of(module: nn.Module) -> Loop | None:
    """Return the loop of the callbacks that are attached to a module."""
    forward = vars(module).get(called(module))
    if not isinstance(forward, CalledMethod) or forward.is_removed:
        return None
    return forward.owner if isinstance(forward.owner, Loop) else None  # else it is only tracked

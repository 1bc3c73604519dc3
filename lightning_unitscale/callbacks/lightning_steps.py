"""Manage the steps of a LightningModule for all callbacks, and the hooks that callbacks share."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from lightning_unitscale.arguments import is_same
from lightning_unitscale.callbacks import packages
from lightning_unitscale.callbacks.around_steps import (
    around_backward_passes,
    keep_plain_where_recorded,
    untraced_calls,
    untraced_trainers,
)
from lightning_unitscale.callbacks.distributed import pipeline_of
from lightning_unitscale.callbacks.options import mode_of
from lightning_unitscale.callbacks.out_of_memory import note_memory
from lightning_unitscale.capture.absent_ranks import is_wrapper
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.dynamo_capture import is_compiled
from lightning_unitscale.capture.executors import CompileMode
from lightning_unitscale.capture.module_steps import LIGHTNING_STEPS, ModuleSteps, steps_of
from lightning_unitscale.capture.passes import GraphPass
from lightning_unitscale.loops.attach import Attachment, attach_in_fabric
from lightning_unitscale.loops.loop import (
    Claim,
    Loop,
    LoopCallback,
    class_given,
    leaving_after,
    why_not_together,
)
from lightning_unitscale.patching import nothing, shadowed

if TYPE_CHECKING:
    import lightning.pytorch as pl

# The first hook that a Trainer or Fabric calls raises the error. Hooks for an exception must not
# hide that exception.
_GUARDED = {"setup": True, "on_after_setup": True, "on_exception": False}
_LOGGING = ("log", "log_dict")


def captures_steps(trainer: pl.Trainer) -> bool:
    """Check whether a strategy or a callback runs captured steps of a Trainer's module."""
    if pipeline_of(trainer) is not None:
        return True
    return any(
        isinstance(callback, StepsCallback) and callback.captures_steps(trainer)
        for callback in all_callbacks(trainer)
    )


def enter(trainer: pl.Trainer, owner: pl.Callback) -> None:
    """Begin a callback's setup: leave an earlier run, and leave this one after any error."""
    callbacks = all_callbacks(trainer)
    check_callbacks(callbacks)
    if isinstance(owner, StepsCallback):
        owner.end()
        earlier = callbacks[: callbacks.index(owner)] if owner in callbacks else []
        owner.guards = contextlib.ExitStack()
        owner.guards.enter_context(leaving_after(earlier, owner.end, always=False))
        owner.guards.enter_context(leaving_after([trainer.strategy], owner.end, always=True))


def attach_steps(
    trainer: pl.Trainer, module: pl.LightningModule, owner: pl.Callback
) -> ModuleSteps:
    """Return the captured steps of a module. The first callback replaces the module's own."""
    if not isinstance(owner, StepsCallback) or owner.guards is None:
        enter(trainer, owner)
    name = type(owner).__name__
    if is_compiled(module):
        raise packages.misconfigured(
            f"{name}: the LightningModule {type(module).__name__} is compiled already, so its "
            "steps cannot be captured. Expected a plain module. Leave out torch.compile and pass "
            "UnitScaleCallback(compile=True) instead."
        )
    steps = steps_of(module)
    if steps is None:
        steps = ModuleSteps(module, existing_steps(module), defer=_LOGGING, untraced=untraced_calls)
        steps.say = packages.rank_zero_info
        steps.stays_plain = _why_plain(module)
        steps.attach(name)
        steps.keep(around_backward_passes(steps, module))
        steps.keep(untraced_trainers())
    steps.attach(name)
    return steps


def _why_plain(module: nn.Module) -> str:
    """Return why no step of a module may be captured, or an empty string."""
    for fqn, parameter in module.named_parameters():
        if is_wrapper(parameter):
            # Fake tensors of the graphs refer to it until the callbacks leave.
            kind = type(parameter).__name__
            return f"{fqn} is a {kind}, which a Trainer cannot move while a graph refers to it"
    return ""


def step_arguments(
    module: pl.LightningModule, step: str, batch: Any, batch_idx: int, dataloader_idx: int = 0
) -> tuple[Any, ...]:
    """Return the positional arguments that Lightning passes to a step, or a batch hook."""
    hook = getattr(module, step)
    arguments: list[Any] = [batch]
    if packages.is_param_in_hook_signature(hook, "batch_idx", min_args=2):
        arguments.append(batch_idx)
    if step in {"training_step", "on_train_batch_start"}:
        return tuple(arguments)
    if packages.is_param_in_hook_signature(hook, "dataloader_idx", min_args=3):
        arguments.append(dataloader_idx)
    return tuple(arguments)


def starting_batch(
    module: pl.LightningModule, step: CapturedStep, batch_idx: int, dataloader_idx: int = 0
) -> AbstractContextManager[None]:
    """Run the module's hook for the batch before a rehearsal of the step in this context."""
    # Lightning calls the callbacks before the module, whose `on_train_batch_start` may set values
    # that the step reads.
    name = f"on_{step.name.removesuffix('_step').replace('training', 'train')}_batch_start"

    def start(batch: Any, *_: Any) -> None:
        arguments = step_arguments(module, name, batch, batch_idx, dataloader_idx)
        # The real call logs.
        with shadowed(module, log=nothing, log_dict=nothing):
            getattr(module, name)(*arguments)

    return shadowed(step, before_rehearsal=start if packages.is_overridden(name, module) else None)


def step_context(trainer: pl.Trainer, name: str) -> AbstractContextManager[None]:
    """Return the precision plugin's context of a step, such as ``train_step_context``."""
    short = name.removesuffix("_step").replace("validation", "val").replace("training", "train")
    context: AbstractContextManager[None] = getattr(
        trainer.precision_plugin, f"{short}_step_context"
    )()
    return context


def existing_steps(module: pl.LightningModule) -> list[str]:
    """Return the names of the steps that a module has."""
    # The default predict_step calls forward, which is worth capturing as well.
    return [
        name
        for name in LIGHTNING_STEPS
        if packages.is_overridden(name, module)
        or (name == "predict_step" and packages.is_overridden("forward", module))
    ]


def all_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the callbacks of a Trainer."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse callbacks that conflict."""
    text = why_not_together(callbacks)
    if text is not None:
        raise packages.misconfigured(text)


def _of_instances(kind: type, hook: FunctionType, *, refuses: bool) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], kind):
            return hook(*args, **kwargs)
        if refuses:
            raise packages.misconfigured(class_given(kind))
        return None

    return run


def _batch_start(name: str) -> Callable[..., None]:
    def hook(
        self: StepsCallback,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.begin_evaluation(name, batch, batch_idx, dataloader_idx)

    return hook


def _batch_end(
    self: StepsCallback,
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    outputs: Any,
    batch: Any,
    batch_idx: int,
    dataloader_idx: int = 0,
) -> None:
    self.end_evaluation(batch_idx)


def given_arguments(init: Callable[..., None], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of ``__init__`` that are not the defaults."""
    return {
        name: arguments[name]
        for name, parameter in inspect.signature(init).parameters.items()
        if name != "self" and not is_same(arguments[name], parameter.default)
    }


def _own_class(callback: Any) -> type:
    """Return the class of a callback without those that a user derived from it."""
    kinds = type(callback).__mro__
    return kinds[kinds.index(StepsCallback) - 1]


class _MadeOfArguments:
    """A callback that knows the arguments of its ``__init__``."""

    guards: contextlib.ExitStack | None = None  # leaves the run of a Trainer after an error

    _loop: Loop | None = None
    _arguments: Mapping[str, Any] = {}

    def _remember(self, arguments: Mapping[str, Any]) -> None:
        """Keep the arguments of ``__init__`` for ``repr``. Call it first, with ``locals()``."""
        self._arguments = given_arguments(arguments["__class__"].__init__, arguments)

    def __repr__(self) -> str:
        """Return the call that makes this callback."""
        shown = ", ".join(f"{name}={value!r}" for name, value in self._arguments.items())
        return f"{type(self).__name__}({shown})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, such as the one in the hyperparameters of a checkpoint."""
        # A Trainer sets these to methods of its module.
        state = {name: value for name, value in vars(self).items() if name not in _LOGGING}
        if self.guards is None and self._loop is None:
            return state
        # The state of a run cannot be copied. A class derived by the user may have other state.
        own = _own_class(self)
        users = {name: value for name, value in state.items() if not hasattr(own, name)}
        return users | vars(own(**self._arguments))


class StepsCallback(_MadeOfArguments, packages.Callback, LoopCallback):
    """The base of the callbacks: hooks around batches and at the end of a run."""

    compile: bool | CompileMode = False
    attachments: tuple[Attachment, ...] = ()  # in Lightning Fabric, one for each set-up module

    _batch: tuple[Any, int] | None = None  # of the running training step, and its index

    def __init__(self) -> None:
        super().__init__()
        self._captured = contextlib.ExitStack()  # leaves the captured steps

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # The first hooks raise if the class was given instead of an instance.
        for name, refuses in _GUARDED.items():
            hook = inspect.getattr_static(cls, name, None)
            if isinstance(hook, FunctionType):
                setattr(cls, name, _of_instances(cls, hook, refuses=refuses))

    @property
    def state_key(self) -> str:
        """Return the key of the callback's state in a checkpoint."""
        # Lightning compares keys when a Trainer is created. For two equal callbacks it would only
        # report that keys must be unique. So the list that it checks is checked here first.
        for value in sys._getframe(1).f_locals.values() if self._loop is None else ():
            if isinstance(value, list) and any(item is self for item in value):
                check_callbacks(value)
        return super().state_key

    @override
    def claims(self) -> Sequence[Claim]:
        return (Claim(f"what {_own_class(self).__name__} sets", repr(self)),)

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Attach to a module that Lightning Fabric has set up.

        Each further module gets its own callback with the same arguments.
        """
        callback = type(self)(**self._arguments) if self.attachments else self
        self.attachments = (*self.attachments, attach_in_fabric(callback, fabric, module))

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Raise if Lightning Fabric never passed a module to the callback.

        Raises:
            RuntimeError: If the module was set up by ``fabric.setup_module()``.
        """
        if not self.attachments:
            raise RuntimeError(
                f"{type(self).__name__} never saw a module. Fabric does not notify callbacks from "
                "setup_module(). Use model = fabric.setup(model), also without an optimizer."
            )

    def captures_steps(self, trainer: pl.Trainer) -> bool:
        """Check whether the callback adds passes to captured steps, which all callbacks then share.

        If no callback does, ``ScaleMonitor`` watches the uncaptured step, and
        ``UnitScaleCallback`` works at the dispatcher.
        """
        return False

    def _capture(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        partitioner: Any,
        passes: Sequence[GraphPass] = (),
    ) -> ModuleSteps:
        """Capture the steps of a module, within a budget or with Inductor if requested."""
        steps = attach_steps(trainer, module, self)
        self._captured.callback(steps.detach, type(self).__name__, *passes)
        if partitioner is not None:
            steps.partition_by(partitioner)
            self._captured.callback(steps.partition_by, None)
        if self.compile:
            steps.use_executor("inductor", mode_of(self.compile))
        keep_plain_where_recorded(steps, module)
        for graph_pass in passes:
            steps.add_pass(graph_pass)
        return steps

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch, batch_idx
        if self._loop is not None:
            self._loop.begin_batch()
        self.begin_batch(batch, batch_idx)

    @override
    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self._batch = None
        self.end_batch()

    on_validation_batch_start = _batch_start("validation_step")
    on_test_batch_start = _batch_start("test_step")
    on_predict_batch_start = _batch_start("predict_step")
    on_validation_batch_end = _batch_end
    on_test_batch_end = _batch_end
    on_predict_batch_end = _batch_end

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.end()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        step, is_entered = self._batch, self.guards is not None
        self.end()
        if step is None or not is_entered or not isinstance(exception, torch.OutOfMemoryError):
            return
        others = (each for each in all_callbacks(trainer) if isinstance(each, StepsCallback))
        if all(other.guards is None for other in others):  # the module is as it was
            arguments = step_arguments(pl_module, "training_step", *step)
            note_memory(exception, trainer, pl_module, arguments)

    def end(self) -> None:
        """Leave the run of a Trainer. May be called more than once."""
        self._batch = None
        guards, self.guards = self.guards, None
        with guards or contextlib.nullcontext():
            self.leave()

"""Define the interface between training loops and callbacks, and check for conflicts."""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_unitscale.arguments import shown
from lightning_unitscale.patching import Replacement, shadowed

# Calls a step of a module with these arguments and keyword arguments.
StepCaller = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_EXPECTED = "Expected UnitScaleCallback(), ScaleMonitor() or several in a list"


class Loop(abc.ABC):
    """A training loop, as callbacks use it."""

    module: nn.Module
    # Names of the methods that a batch calls, and the one that a training batch calls.
    steps: tuple[str, ...]
    training_step: str
    # True if the loss is computed after that call instead of within it.
    has_loss_outside: bool = False
    num_steps: int | None = None  # the total number of optimizer steps, if the loop knows it
    is_fitting: bool = True  # true if the loop trains, so that an evaluation is part of a training

    def begin_batch(self) -> None:  # noqa: B027
        """Begin a training batch."""

    @property
    def callbacks(self) -> Sequence[Any]:
        """Return the callbacks of the loop."""
        return ()

    @property
    @abc.abstractmethod
    def step_index(self) -> int:
        """Return the number of optimizer steps so far."""

    @property
    @abc.abstractmethod
    def has_stepped(self) -> bool:
        """Check whether the batch that has just ended completed an optimizer step."""

    @property
    def is_last_step(self) -> bool:
        """Check whether the step that begins is known to be the last one."""
        return self.num_steps is not None and self.step_index + 1 >= self.num_steps

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Return the device of the module."""

    @property
    @abc.abstractmethod
    def scaler(self) -> Any:
        """Return the ``GradScaler`` of the loss, if there is one."""

    @property
    @abc.abstractmethod
    def num_parts(self) -> int:
        """Return the number of replicas or microbatches that a gradient averages over."""

    @property
    @abc.abstractmethod
    def is_global_zero(self) -> bool:
        """Check whether this is the rank that writes."""

    @property
    @abc.abstractmethod
    def loggers(self) -> Sequence[Any]:
        """Return the loop's loggers, of the kinds in ``loops/loggers.py``."""

    @abc.abstractmethod
    def running_steps_by(self, call: StepCaller) -> AbstractContextManager[None]:
        """Run training steps by ``call`` within this context."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Request the end of the loop after this step."""

    def keep_metrics(self, numbers: Mapping[str, float]) -> None:  # noqa: B027
        """Keep numbers for callbacks of the loop that monitor metrics, if there are any."""

    @property
    def loss_scale(self) -> float:
        """Return the factor of the loss, and so of all gradients: 1 without a scaler."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    @property
    def has_loss_scaler(self) -> bool:
        """Check whether the loss scaler skips steps with infinite gradients."""
        return self.scaler is not None and bool(self.scaler.is_enabled())


@dataclass(frozen=True)
class Claim:
    """A setting of one callback for a run that no other callback may also set."""

    subject: str  # such as ``"the memory budget"``
    setting: str  # what the user wrote, such as ``"UnitScaleCallback(remat=0.5)"``
    value: str | None = None  # equal values do not conflict


class LoopCallback:
    """The methods that a loop calls. A Lightning callback calls them from its hooks."""

    def claims(self) -> Sequence[Claim]:
        """Return the settings that no other callback may set for the same module."""
        name = type(self).__name__
        return (Claim(f"what {name} sets", f"{name}()"),)

    def start(self, loop: Loop) -> None:
        """Begin a loop, or resume it. Refuse options that the loop does not support."""
        name = type(self).__name__
        raise ValueError(
            f"{name}: it captures steps, which works only in a Lightning Trainer. Expected a "
            "Trainer. In another loop use lightning_unitscale.transforms."
        )

    def meet_optimizer(self, optimizer: Optimizer) -> None:
        """Check an optimizer of torch before its first step on the module's parameters."""

    def begin_batch(self, batch: Any = None, batch_idx: int = 0) -> None:
        """Begin a training batch, or the batches of an optimizer step. Not all loops pass it."""

    def begin_backward(self, loss: Tensor | None) -> None:
        """Begin the backward pass of a loss, or of ``None`` if the loss is not known."""

    def end_backward(self) -> None:
        """End the backward pass. The gradients are complete."""

    def end_batch(self) -> None:
        """End a training batch. ``loop.has_stepped`` is true if the optimizer stepped."""

    def begin_evaluation(self, name: str, batch: Any = None, *indices: int) -> None:
        """Begin a batch of a step such as ``"validation_step"``: its index, and its loader's."""

    def end_evaluation(self, batch_idx: int = 0) -> None:
        """End a batch of an evaluation."""

    def finish(self) -> None:
        """Finish a training that has ended without an exception."""

    def leave(self) -> None:
        """Restore the module. May be called more than once."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a restart, if there is any."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""


def why_not_together(callbacks: Iterable[Any]) -> str | None:
    """Return why callbacks conflict, or ``None`` if they do not."""
    listed = list(callbacks)
    for callback in listed:
        if is_own_class(callback):
            return class_given(callback)
    own = [callback for callback in listed if isinstance(callback, LoopCallback)]
    claims: defaultdict[str, list[tuple[LoopCallback, Claim]]] = defaultdict(list)
    for callback in own:
        for claim in callback.claims():
            claims[claim.subject].append((callback, claim))
    texts = (_why_not(subject, made) for subject, made in claims.items())
    return next(filter(None, texts), None)


def _why_not(subject: str, made: Sequence[tuple[LoopCallback, Claim]]) -> str | None:
    values = {claim.value for _, claim in made}
    if len(made) == 1 or (len(values) == 1 and None not in values):
        return None
    kinds = {type(callback).__name__ for callback, _ in made}
    if len(kinds) == 1:
        return (
            f"callbacks: {kinds.pop()} is given {len(made)} times. Expected it once. Remove the "
            "others."
        )
    settings = " and ".join(claim.setting for _, claim in made)
    return (
        f"callbacks: {settings} both set {subject}, and only one of them can apply. Expected "
        "one such setting. Leave the others out."
    )


def is_own_class(callback: Any) -> bool:
    """Check whether a callback is one of our classes instead of an instance."""
    return isinstance(callback, type) and issubclass(callback, LoopCallback)


def class_given(kind: type) -> str:
    """Return the error for a class that was given instead of an instance."""
    name = kind.__name__
    return (
        f"callbacks={name}: it is the class. Expected an instance. Write {name}(), with its "
        "arguments."
    )


def given_callbacks(callbacks: Any) -> tuple[LoopCallback, ...]:
    """Return one callback or several as a tuple, after a check."""
    is_one = isinstance(callbacks, (LoopCallback, type, str, bytes, Mapping))
    is_list = isinstance(callbacks, Iterable) and not is_one
    listed: list[Any] = list(callbacks) if is_list else [callbacks]
    for callback in listed:
        if is_own_class(callback):
            raise TypeError(class_given(callback))
        if not isinstance(callback, LoopCallback):
            raise TypeError(f"callbacks={shown(callback)}: {_what_it_is(callback)}")
    text = why_not_together(listed)
    if text is not None:
        raise ValueError(text)
    return tuple(listed)


def _what_it_is(callback: Any) -> str:
    # Lightning's, of any of its packages. None is imported here.
    if hasattr(callback, "on_train_batch_start"):
        return f"it works in a Lightning Trainer only. {_EXPECTED}. Leave it out."
    return f"it is not a callback of lightning_unitscale. {_EXPECTED}. Pass one of them."


def leaving_after(owners: Iterable[Any], leave: Callable[[], None], *, always: bool) -> ExitStack:
    """Call ``leave`` after other callbacks' ``on_exception``, until the context is closed."""
    # Lightning calls `on_exception` of each callback in turn, and of none after one that raises.
    # Its searches for a learning rate and for a batch size remove the callbacks while they run. The
    # former does not restore them when it fails.

    def run(method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with ExitStack() as leaving:
            leaving.callback(leave)
            method(*args, **kwargs)
            if not always:
                leaving.pop_all()

    hooks = ExitStack()
    for owner in owners:
        method = owner.on_exception
        hooks.enter_context(shadowed(owner, on_exception=Replacement(method, partial(run, method))))
    return hooks

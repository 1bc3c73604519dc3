"""The interface between training loops and callbacks, and which callbacks go together."""

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
    """A training loop, as callbacks see it."""

    module: nn.Module
    # Names of the methods that a batch calls, and the one among them of a training batch.
    steps: tuple[str, ...]
    training_step: str
    # Whether the loss is computed after that call, and not within it.
    has_loss_outside: bool = False
    # How many optimizer steps there will have been at the end, if the loop knows.
    num_steps: int | None = None
    # Whether the loop trains, so that an evaluation is a part of a training.
    is_fitting: bool = True

    def begin_batch(self) -> None:  # noqa: B027
        """A training batch begins."""

    @property
    @abc.abstractmethod
    def step_index(self) -> int:
        """The number of optimizer steps so far."""

    @property
    @abc.abstractmethod
    def has_stepped(self) -> bool:
        """Return whether the batch that has just ended completed an optimizer step."""

    @property
    def is_last_step(self) -> bool:
        """Return whether the step that begins is known to be the last one."""
        return self.num_steps is not None and self.step_index + 1 >= self.num_steps

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device of the module."""

    @property
    @abc.abstractmethod
    def scaler(self) -> Any:
        """The ``GradScaler`` that the loss is multiplied by, if there is one."""

    @property
    @abc.abstractmethod
    def num_parts(self) -> int:
        """The number of parts whose mean is the gradient of a batch: replicas, microbatches."""

    @property
    @abc.abstractmethod
    def is_global_zero(self) -> bool:
        """Return whether this is the rank that writes."""

    @property
    @abc.abstractmethod
    def loggers(self) -> Sequence[Any]:
        """The loggers of the loop, of the kinds in ``loops/loggers.py``."""

    @abc.abstractmethod
    def running_steps_by(self, call: StepCaller) -> AbstractContextManager[None]:
        """Within this context training steps are run by ``call``."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Ask the loop to end after this step."""

    def keep_metrics(self, numbers: Mapping[str, float]) -> None:  # noqa: B027
        """Keep numbers for those of the loop's callbacks that monitor some, if it has such."""

    @property
    def loss_scale(self) -> float:
        """Factor on the loss, and so on all gradients."""
        return scale_of(self.scaler)

    @property
    def has_loss_scaler(self) -> bool:
        """Return whether steps with infinite gradients are skipped by who scales the loss."""
        return self.scaler is not None and bool(self.scaler.is_enabled())


def scale_of(scaler: Any) -> float:
    """Return the factor of a ``GradScaler``, 1 without one."""
    return 1.0 if scaler is None else float(scaler.get_scale())


@dataclass(frozen=True)
class Claim:
    """A setting that one callback makes for a run, and no other can make beside it."""

    subject: str  # such as ``"the memory budget"``
    setting: str  # how the user has asked for it, such as ``"UnitScaleCallback(remat=0.5)"``
    value: str | None = None  # equal values go together


class LoopCallback:
    """The methods that a loop calls; a Lightning callback calls them from its hooks."""

    def claims(self) -> Sequence[Claim]:
        """Return what no other callback may set for the same module."""
        name = type(self).__name__
        return (Claim(f"what {name} sets", f"{name}()"),)

    def start(self, loop: Loop) -> None:
        """A loop begins, or goes on.

        Raises:
            ValueError: If what the callback was asked for cannot be had in this loop.
        """
        name = type(self).__name__
        raise ValueError(
            f"{name}: it captures steps, which it can in a Lightning Trainer only. Expected a "
            "Trainer. In another loop use lightning_unitscale.transforms."
        )

    def meet_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer of torch is about to step for the first time, on the module's parameters."""

    def begin_batch(self, batch: Any = None, batch_idx: int = 0) -> None:
        """A training batch begins, or the batches of one optimizer step; not all loops pass it."""

    def begin_backward(self, loss: Tensor | None) -> None:
        """A loss was computed; ``None`` if it is not known."""

    def end_backward(self) -> None:
        """The gradients are complete."""

    def end_batch(self) -> None:
        """A training batch has ended; ``loop.has_stepped`` says whether the optimizer stepped."""

    def begin_evaluation(self, name: str, batch: Any = None, *indices: int) -> None:
        """A batch of a step such as ``"validation_step"`` begins: its index, and its loader's."""

    def end_evaluation(self, batch_idx: int = 0) -> None:
        """It has ended."""

    def finish(self) -> None:
        """Training has ended, without an exception."""

    def leave(self) -> None:
        """Leave the module as it was. May be called more than once."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs, if anything."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""


def why_not_together(callbacks: Iterable[Any]) -> str | None:
    """Return why callbacks do not go together; ``None`` if they do."""
    listed = list(callbacks)
    for callback in listed:
        if is_own_class(callback):
            return class_given(callback)
    own = [callback for callback in listed if isinstance(callback, LoopCallback)]
    claims: defaultdict[str, list[tuple[LoopCallback, Claim]]] = defaultdict(list)
    for callback in own:
        for claim in callback.claims():
            claims[claim.subject].append((callback, claim))
    for subject, made in claims.items():
        text = _why_not(subject, made)
        if text is not None:
            return text
    return None


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
        f"callbacks: {settings} both set {subject}, and only one of them can be in force. Expected "
        "one such setting. Leave the others out."
    )


def is_own_class(callback: Any) -> bool:
    """Return whether the class of a callback was given in place of an instance."""
    return isinstance(callback, type) and issubclass(callback, LoopCallback)


def class_given(kind: type) -> str:
    """Return the error for a class that was given in place of an instance."""
    name = kind.__name__
    return (
        f"callbacks={name}: it is the class. Expected an instance. Write {name}(), with its "
        "arguments."
    )


def given_callbacks(callbacks: Any) -> tuple[LoopCallback, ...]:
    """One callback or several, as a tuple."""
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
    # Lightning's, of whichever of its packages: none is imported here.
    if hasattr(callback, "on_train_batch_start"):
        return f"it works in a Lightning Trainer only. {_EXPECTED}. Leave it out."
    return f"it is no callback of lightning_unitscale. {_EXPECTED}. Pass one of them."


def leaving_after(owners: Iterable[Any], leave: Callable[[], None], *, always: bool) -> ExitStack:
    """Call ``leave`` after ``on_exception`` of others, until what is returned is closed.

    Lightning calls ``on_exception`` of one callback after the other, and none after one that
    raises. Its searches for a learning rate and for a batch size take the callbacks out of the
    Trainer for as long as they run, and the former does not put them back when it fails.
    """

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

"""What callbacks ask of a training loop, and what a loop tells callbacks."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Calls a step of a module with these arguments and keyword arguments.
StepCaller = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Loop(abc.ABC):
    """A training loop, as callbacks see it.

    Attributes:
        module: The module that is trained; names of tensors are paths in it.
        steps: Names of its methods that a batch calls.
        training_step: The one among them that a training batch calls.
        has_loss_outside: Whether the loss is computed after that call, and not within it.
        num_steps: How many optimizer steps there will have been at the end, where the loop tells.
    """

    module: nn.Module
    steps: tuple[str, ...]
    training_step: str
    has_loss_outside: bool = False
    num_steps: int | None = None

    def begin_batch(self) -> None:  # noqa: B027
        """A training batch begins."""

    @property
    @abc.abstractmethod
    def step_index(self) -> int:
        """How many optimizer steps there have been."""

    @property
    @abc.abstractmethod
    def has_stepped(self) -> bool:
        """Whether the batch that has just ended completed an optimizer step."""

    @property
    def is_last_step(self) -> bool:
        """Whether the step that begins is known to be the last one."""
        return self.num_steps is not None and self.step_index + 1 >= self.num_steps

    @property
    @abc.abstractmethod
    def is_fitting(self) -> bool:
        """Whether the loop trains, so that an evaluation is a part of a training."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where the module is."""

    @property
    @abc.abstractmethod
    def scaler(self) -> Any:
        """The ``GradScaler`` that the loss is multiplied by, if there is one."""

    @property
    @abc.abstractmethod
    def num_parts(self) -> int:
        """Of how many batches the gradient of one batch is the mean: replicas, microbatches."""

    @property
    @abc.abstractmethod
    def is_global_zero(self) -> bool:
        """Whether this is the rank that writes."""

    @property
    @abc.abstractmethod
    def loggers(self) -> Sequence[Any]:
        """What the loop logs to, as ``loops/loggers.py`` knows it."""

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
        """Whether steps with infinite gradients are skipped by who scales the loss."""
        return self.scaler is not None and bool(self.scaler.is_enabled())


def scale_of(scaler: Any) -> float:
    """The factor of a ``GradScaler``, 1 without one."""
    return 1.0 if scaler is None else float(scaler.get_scale())


@dataclass(frozen=True)
class Claim:
    """A setting that one callback makes for a run, and no other can make beside it.

    Attributes:
        subject: What is set, such as ``"the memory budget"``.
        setting: How the user has asked for it, such as ``"UnitScaleCallback(remat=0.5)"``.
        value: If it is given, equal values go together.
    """

    subject: str
    setting: str
    value: str | None = None


class LoopCallback:
    """What a loop calls; a Lightning callback calls the same methods from its hooks."""

    def claims(self) -> Sequence[Claim]:
        """What no other callback may set for the same module."""
        name = type(self).__name__
        return (Claim(f"what {name} sets", f"{name}()"),)

    def start(self, loop: Loop) -> None:
        """A loop begins, or goes on.

        Raises:
            ValueError: If what the callback was asked for cannot be had in this loop.
        """
        name = type(self).__name__
        raise ValueError(
            f"{name}: it captures steps, which it can in a Lightning Trainer only; expected a "
            "Trainer; in another loop use lightning_unitscale.transforms."
        )

    def meet_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer of torch is about to step for the first time, on the module's parameters."""

    def begin_batch(self, batch: Any = None, batch_idx: int = 0) -> None:
        """A training batch begins, or the batches of one optimizer step.

        Args:
            batch: The batch; ``None`` in loops that do not tell.
            batch_idx: Its index.
        """

    def begin_backward(self, loss: Tensor | None) -> None:
        """A loss is there, if it is known."""

    def end_backward(self) -> None:
        """The gradients are there."""

    def end_batch(self) -> None:
        """A training batch has ended; ``loop.has_stepped`` says whether the optimizer stepped."""

    def begin_evaluation(self, name: str, batch: Any = None, *indices: int) -> None:
        """A batch of an evaluation begins.

        Args:
            name: Of the step, such as ``"validation_step"``.
            batch: The batch; ``None`` in loops that do not tell.
            *indices: Of the batch, and of its loader.
        """

    def end_evaluation(self, batch_idx: int = 0) -> None:
        """It has ended."""

    def finish(self) -> None:
        """Training has ended, without an exception."""

    def leave(self) -> None:
        """Leave the module as it was. May be called more than once."""

    def state_dict(self) -> dict[str, Any]:
        """What to go on from after a restart; empty where there is nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""

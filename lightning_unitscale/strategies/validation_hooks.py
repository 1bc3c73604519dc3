"""Whether hooks of a validation read weights, for which every rank needs all of them.

Stages validate without the weights of other ranks, but a hook may merge adapters into weights, or
swap in averages. All ranks run the same hooks, so that each has to have the values. In the first
validation of a training they are there, and are watched.

Private names, checked on torch 2.13 and 2.11: ``torch._C.DisableTorchFunctionSubclass``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from lightning_unitscale.patching import StandIn
from lightning_unitscale.strategies.ownership import describes

_HOOKS = (
    "on_validation_model_eval", "on_validation_start", "on_validation_epoch_start",
    "on_validation_batch_start",
)  # fmt: skip
# Their callbacks read no weights there.
_KNOWN = ("lightning.", "pytorch_lightning.", "lightning_unitscale.")


class BeforeValidation(StandIn):
    """Stands in for the first hook of a validation, before which its strategy is called."""

    def __init__(self, method: Any, before: Callable[[], None]) -> None:
        super().__init__(method)
        self._before = before

    @override
    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        return self._method(*args, **kwargs)


def has_validation_hooks(module: pl.LightningModule, callbacks: Iterable[pl.Callback]) -> bool:
    """Return whether the user has written a hook that runs before the batches of a validation."""
    owners: list[tuple[Any, type]] = [(module, pl.LightningModule)]
    owners += [(callback, pl.Callback) for callback in callbacks]
    return any(
        getattr(type(owner), name, None) is not getattr(base, name, None)
        and not type(owner).__module__.startswith(_KNOWN)
        for owner, base in owners
        for name in _HOOKS
    )


class WatchedParameter(nn.Parameter):
    """A parameter that tells whether its values are asked for."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run as it is, and note what does more than describe the tensor."""
        if not describes(func):
            cls.is_read = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    is_read = False


class Watch:
    """Watches the parameters of a module until it ends."""

    def __init__(self, module: nn.Module) -> None:
        # A class of its own: others may watch as well.
        self._kind = type("WatchedParameter", (WatchedParameter,), {})
        self._parameters = [one for one in module.parameters() if type(one) is nn.Parameter]
        for parameter in self._parameters:
            parameter.__class__ = self._kind

    def end(self) -> bool:
        """Leave the parameters as they were; returns whether some were read. Idempotent."""
        for parameter in self._parameters:
            if type(parameter) is self._kind:
                parameter.__class__ = nn.Parameter
        self._parameters = []
        return bool(self._kind.is_read)  # type: ignore[attr-defined]

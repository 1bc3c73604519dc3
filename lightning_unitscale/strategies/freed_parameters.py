"""Parameters without memory, and parameters that note whether their values are read.

A tensor whose storage is gone crashes the process when an operation reads it (a segmentation fault
on a CPU, torch 2.13). So while a parameter is freed its class is one that raises instead.

Stages validate without the weights of other ranks, but a hook may merge adapters into weights, or
swap in averages. All ranks run the same hooks, so that each needs the values. During the first
validation of a training every rank has them, and they are watched.

Private names, checked on torch 2.13 and 2.11: ``torch._C.DisableTorchFunctionSubclass`` and
``_cdata``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

# Functions that need no value of the tensor.
_DESCRIBES = frozenset(
    {"__hash__", "__len__", "__reversed__", "data_ptr", "dim", "element_size", "get_device",
     "is_complex", "is_contiguous", "is_floating_point", "is_shared", "nelement", "numel",
     "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage",
     "stride", "untyped_storage"}
)  # fmt: skip
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


def describes(func: Any) -> bool:
    """Return whether a function of a tensor needs no value of it."""
    attribute = _attribute(func)
    if attribute is not None:
        return bool(attribute) and attribute not in _VIEWS
    return getattr(func, "__name__", "") in _DESCRIBES


def _attribute(func: Any) -> str | None:
    """Return the name of the attribute that a function gets or sets; ``None`` for a method."""
    if getattr(func, "__name__", "") not in {"__get__", "__set__"}:
        return None
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


class FreedParameter(nn.Parameter):
    """A parameter whose storage is freed: it has a shape, a type and a device, but no values."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run functions that only describe the tensor, and refuse all others."""
        if describes(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            f"{_attribute(func) or getattr(func, '__name__', func)}: the values of this parameter "
            "are on another rank of the pipeline (free_unowned=True). Read weights in hooks of the "
            "validation or after the training, pass free_unowned=False, or save a checkpoint."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"FreedParameter({tuple(self.shape)}, {self.dtype}, {self.device})"


class FreedStorage:
    """Frees the memory of parameters, and allocates it again."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], kept: Iterable[Tensor]) -> None:
        held = Counter(_storage(tensor) for tensor in (*kept, *parameters.values()))
        self.parameters = {
            name: param
            for name, param in parameters.items()
            # A storage that two parameters share is freed by neither.
            if held[_storage(param)] == 1
            and type(param) is nn.Parameter
            and param.untyped_storage().nbytes() == param.numel() * param.element_size() > 0
        }
        self.is_free = False

    def free(self) -> None:
        """Free the memory, gradients included. Idempotent."""
        if self.is_free:
            return
        for param in self.parameters.values():
            param.grad = None
            if not param.untyped_storage().resizable():
                # Weights that are mapped from a file, as from_pretrained does.
                param.data = param.detach().clone()
            param.untyped_storage().resize_(0)
            param.__class__ = FreedParameter
        self.is_free = True

    def take(self) -> None:
        """Allocate the memory again, which the caller fills with values. Idempotent."""
        if not self.is_free:
            return
        for param in self.parameters.values():
            param.__class__ = nn.Parameter
            param.untyped_storage().resize_(param.numel() * param.element_size())
        self.is_free = False

    def lose(self) -> None:
        """Make the values NaN, on the CPU: after an error no rank can send them."""
        if not self.is_free:
            return
        for param in self.parameters.values():
            param.__class__ = nn.Parameter
            lost = torch.empty(param.shape, dtype=param.dtype)
            param.data = lost.fill_(torch.nan) if lost.is_floating_point() else lost.zero_()
        self.is_free = False

    def copied(self, state: Any) -> Any:
        """Return a structure with CPU copies of the tensors in memory that will be freed."""
        own = {_storage(param) for param in self.parameters.values()}
        copies: dict[Any, Tensor] = {}

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or _storage(leaf) not in own:
                return leaf
            # Tied weights stay one tensor.
            key = (_storage(leaf), leaf.storage_offset(), leaf.shape, leaf.stride())
            if key not in copies:
                copies[key] = leaf.detach().to("cpu", copy=True)
            return copies[key]

        if not isinstance(state, dict):
            return tree_map(copy, state)
        for key, value in state.items():  # in place: a state dict carries versions with it
            state[key] = tree_map(copy, value)
        return state

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Give freed parameters their usual class within this context, for captures and guards."""
        freed = self.is_free
        if freed:
            for param in self.parameters.values():
                param.__class__ = nn.Parameter
        try:
            yield
        finally:
            if freed and self.is_free:
                for param in self.parameters.values():
                    param.__class__ = FreedParameter


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class WatchedParameter(nn.Parameter):
    """A parameter that notes whether its values are read."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and note whether it does more than describe the tensor."""
        if not describes(func):
            cls.is_read = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    is_read = False


class Watch:
    """Watches the parameters of a module until it ends."""

    def __init__(self, module: nn.Module) -> None:
        # A class of its own: other modules may be watched at the same time.
        self._kind = type("WatchedParameter", (WatchedParameter,), {})
        self._parameters = [one for one in module.parameters() if type(one) is nn.Parameter]
        for parameter in self._parameters:
            parameter.__class__ = self._kind

    def end(self) -> bool:
        """Restore the parameters, and return whether some were read. Idempotent."""
        for parameter in self._parameters:
            if type(parameter) is self._kind:
                parameter.__class__ = nn.Parameter
        self._parameters = []
        return bool(self._kind.is_read)  # type: ignore[attr-defined]

"""Parameters without memory: what other ranks own, between the moments in which it is needed here.

A tensor whose storage is gone crashes the process when an operation reads it (a segmentation fault
on a CPU, torch 2.13). So while a parameter is freed its class is one that raises instead.

Private names, checked on torch 2.13: ``torch._C.DisableTorchFunctionSubclass``, ``_cdata``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

# What asks for no value of the tensor.
_DESCRIBES = frozenset(
    {"__hash__", "__len__", "__reversed__", "data_ptr", "dim", "element_size", "get_device",
     "is_complex", "is_contiguous", "is_floating_point", "is_shared", "nelement", "numel",
     "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage",
     "stride", "untyped_storage"}
)  # fmt: skip
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


class FreedParameter(nn.Parameter):
    """A parameter whose storage is freed: it has a shape, a type and a device, and no values."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Lets through what only describes the tensor.

        Raises:
            RuntimeError: If its values are asked for.
        """
        owner = getattr(func, "__self__", None)
        name = getattr(func, "__name__", "")
        attribute = getattr(owner, "__name__", "") if name in {"__get__", "__set__"} else None
        if attribute not in _VIEWS and (attribute or name in _DESCRIBES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            f"{attribute or name or func}: the values of this parameter are on another rank of "
            "the pipeline (free_unowned=True); expected reads of weights in validation and after "
            "the training, when every rank has all of them; read it there, or save a checkpoint."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"FreedParameter({tuple(self.shape)}, {self.dtype}, {self.device})"


class FreedStorage:
    """Frees the memory of parameters, and takes it again.

    Args:
        parameters: The parameters, by name. One that shares its memory with a tensor of ``kept``,
            or that does not fill it, keeps it.
        kept: Tensors whose memory stays.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], kept: Iterable[Tensor]) -> None:
        held = Counter(_storage(one) for one in (*kept, *parameters.values()))
        self.parameters = {
            name: one
            for name, one in parameters.items()
            # A storage that two parameters share is freed by neither.
            if held[_storage(one)] == 1
            and type(one) is nn.Parameter
            and one.untyped_storage().nbytes() == one.numel() * one.element_size() > 0
        }
        self.is_free = False

    def free(self) -> None:
        """Free the memory, gradients included. Idempotent."""
        if self.is_free:
            return
        for one in self.parameters.values():
            one.grad = None
            one.untyped_storage().resize_(0)
            one.__class__ = FreedParameter
        self.is_free = True

    def take(self) -> None:
        """Take memory again, of any values: the caller fills it. Idempotent."""
        if not self.is_free:
            return
        for one in self.parameters.values():
            one.__class__ = nn.Parameter
            one.untyped_storage().resize_(one.numel() * one.element_size())
        self.is_free = False

    def lose(self) -> None:
        """After an error, when nobody can bring the values: they are NaN, on the CPU."""
        if not self.is_free:
            return
        for one in self.parameters.values():
            one.__class__ = nn.Parameter
            lost = torch.empty(one.shape, dtype=one.dtype)
            one.data = lost.fill_(torch.nan) if lost.is_floating_point() else lost.zero_()
        self.is_free = False

    def copied(self, state: Any) -> Any:
        """The structure, with copies on the CPU of what lies in the memory that will be freed."""
        own = {_storage(one) for one in self.parameters.values()}
        copies: dict[Any, Tensor] = {}

        def copy(one: Any) -> Any:
            if not isinstance(one, Tensor) or _storage(one) not in own:
                return one
            # Tied weights stay one tensor.
            key = (_storage(one), one.storage_offset(), one.shape, one.stride())
            if key not in copies:
                copies[key] = one.detach().to("cpu", copy=True)
            return copies[key]

        if not isinstance(state, dict):
            return tree_map(copy, state)
        for key, value in state.items():  # in place: a state dict carries versions with it
            state[key] = tree_map(copy, value)
        return state

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Within this context the freed are of the usual class: for what captures and guards."""
        freed = self.is_free
        if freed:
            for one in self.parameters.values():
                one.__class__ = nn.Parameter
        try:
            yield
        finally:
            if freed and self.is_free:
                for one in self.parameters.values():
                    one.__class__ = FreedParameter


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

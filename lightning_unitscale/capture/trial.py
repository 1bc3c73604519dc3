"""A call of a step that is captured for the first time, and undone if it fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_unitscale.capture.rollback import undoers
from lightning_unitscale.profiler.sharded import is_sharded


class Trial:
    """Undoes what a call of a step has done so far, as if it had not begun.

    Covered: random states, gradients, and whatever a module holds. Of parameters no copy is kept,
    which might not fit: if one has changed, the call cannot be undone.
    """

    def __init__(self, module: nn.Module, *arguments: Any, keep: Collection[str] = ()) -> None:
        self._module = module
        self._keep = keep
        self._takes = any(isinstance(value, Iterator) for value in arguments)
        self._undo: list[Callable[[], object]] = []
        self._before: list[Any] = []

    @property
    def has_begun(self) -> bool:
        """Whether it can be undone, if no parameter changes."""
        return bool(self._undo)

    def begin(self) -> None:
        """Note how things are; nothing of the call has run yet."""
        # What was taken from an iterator cannot be put back, nor what FSDP knows of its gathering.
        # Most calls never begin, and all parameters are asked.
        if not self._undo and not self._takes and not is_sharded(self._module):
            self._before = [_state_of(param) for param in self._module.parameters()]
            self._undo = list(undoers(self._module, self._keep))

    def undo(self) -> bool:
        """Undo the call; returns whether that was possible."""
        if not self._undo:
            return False  # nor may parameters be read: FSDP has freed what it gathered
        after = list(map(_state_of, self._module.parameters()))
        if len(after) != len(self._before) or not all(map(_is_same, after, self._before)):
            return False
        for undo in reversed(self._undo):
            undo()
        return True


def _state_of(parameter: nn.Parameter) -> Any:
    """What tells whether a parameter has other numbers: also after a write past its version."""
    if is_lazy(parameter):
        return None
    where, numbers = parameter.untyped_storage(), parameter.detach()
    checksum = numbers.sum() if numbers.device.type != "meta" else None
    return where.data_ptr(), parameter._version, checksum


def _is_same(after: Any, before: Any) -> bool:
    if after is None or before is None:
        return after is before
    *after, total = after
    *before, expected = before
    if after != before:
        return False
    return not isinstance(total, Tensor) or torch.equal(total.nan_to_num(), expected.nan_to_num())

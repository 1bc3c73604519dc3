"""Sees a loss that is NaN or infinite without making the host wait for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Pending:
    """A loss that is on its way to the host."""

    step: int
    value: Tensor
    arrived: torch.cuda.Event


class LossWatch:
    """Looks at the loss of every step.

    On the CPU a loss is looked at when it is there. On a CUDA device it is copied to pinned memory
    behind the step's kernels and looked at when the copy has arrived, mostly one step later; no
    copy is begun while one is under way. Losses of other devices are not looked at.
    """

    def __init__(self) -> None:
        self._pending: _Pending | None = None
        self._buffer: Tensor | None = None
        self._is_bad = False

    def see(self, step: int, loss: Tensor) -> int | None:
        """Take in the loss of a step.

        Returns:
            The step of the first NaN or infinity since the loss was last finite, once.
        """
        loss = loss.detach()
        if loss.device.type == "cpu":
            return self._judge(step, loss)
        if loss.device.type != "cuda":
            return None
        found = None
        if self._pending is not None:
            if not self._pending.arrived.query():
                return None
            found = self._judge(self._pending.step, self._pending.value)
        if self._buffer is None:
            self._buffer = torch.empty((), dtype=torch.float64, pin_memory=True)
        self._buffer.copy_(loss.double().sum(), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending = _Pending(step, self._buffer, arrived)
        return found

    def _judge(self, step: int, loss: Tensor) -> int | None:
        was_bad, self._is_bad = self._is_bad, not bool(torch.isfinite(loss).all())
        return step if self._is_bad and not was_bad else None

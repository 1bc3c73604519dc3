"""Numbers between a device and the host, for which neither waits.

A copy between a CUDA device and memory that the system may move waits for all that was computed
before; one to or from pinned memory takes its place in the queue.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """A tensor on its way to the host.

    From a CUDA device it is sent behind the kernels that make it; elsewhere it is there at once.

    Args:
        tensor: Of any shape; what is written into it later is not seen on CUDA.
    """

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._copy = tensor.cpu()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.device_of(tensor):
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def has_arrived(self) -> bool:
        """Whether :meth:`numbers` need not wait."""
        return self._event is None or self._event.query()

    def numbers(self) -> Tensor:
        """The tensor on the host; waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def sent_to(device: torch.device, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """A few numbers on a device, behind what it has to do already.

    Args:
        device: Where to.
        numbers: The numbers.
        dtype: Their type.

    Returns:
        Shape ``(len(numbers),)``.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    pinned = torch.empty(len(numbers), dtype=dtype, pin_memory=True)
    pinned.copy_(torch.tensor(numbers, dtype=dtype))
    return pinned.to(device, non_blocking=True)

"""Numbers between a device and the host, for which neither waits.

A copy between a CUDA device and memory that the system may move waits for all that was computed
before; one to or from pinned memory takes its place in the queue.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """A tensor on its way to the host."""

    # From a CUDA device it is sent behind the kernels that make it; elsewhere it is there at once.

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._copy = tensor.cpu()
            return
        self._copy = _pinned(tensor)
        with torch.cuda.device_of(tensor):
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def has_arrived(self) -> bool:
        """Return whether :meth:`numbers` need not wait."""
        return self._event is None or self._event.query()

    def numbers(self) -> Tensor:
        """Return the tensor on the host; waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def joint_copy(tensors: Sequence[Tensor]) -> HostCopy:
    """Tensors of one shape on their way to the host, stacked, with one transfer."""
    device = tensors[0].device
    return HostCopy(torch.stack([tensor.detach().to(device) for tensor in tensors]))


def numbers_on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return a few numbers on a device, sent behind its pending work: ``(len(numbers),)``."""
    tensor = torch.tensor(numbers, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return tensor.to(device)
    return _pinned(tensor).copy_(tensor).to(device, non_blocking=True)


def _pinned(tensor: Tensor) -> Tensor:
    """Pinned memory for a copy of a tensor, wherever new tensors are made by default."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

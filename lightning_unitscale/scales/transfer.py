"""Copy numbers between a device and the host without waiting.

A copy between a CUDA device and pageable memory waits for all earlier kernels. A copy to or from
pinned memory is queued in the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """A tensor that is being copied to the host."""

    # From a CUDA device it is copied after the kernels that compute it. On other devices it is
    # available immediately.

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
        """Check whether :meth:`numbers` returns without waiting."""
        return self._event is None or self._event.query()

    def numbers(self) -> Tensor:
        """Wait for the tensor, and return it on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def joint_copy(tensors: Sequence[Tensor]) -> HostCopy:
    """Copy tensors of one shape to the host, stacked, in one transfer."""
    device = tensors[0].device
    return HostCopy(torch.stack([tensor.detach().to(device) for tensor in tensors]))


def numbers_on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return numbers on a device, copied after its pending work, shape ``(len(numbers),)``."""
    tensor = torch.tensor(numbers, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return tensor.to(device)
    return _pinned(tensor).copy_(tensor).to(device, non_blocking=True)


def _pinned(tensor: Tensor) -> Tensor:
    """Return pinned memory for a copy of a tensor, whatever the default device is."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

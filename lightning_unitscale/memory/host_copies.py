"""Copy tensors between a device and the host beside computing.

A copy is a value of the graph that runs it. It holds the tensor that it reads until computing has
waited for it, so the allocator cannot hand out that memory meanwhile. ``record_stream`` would do
this too, but it frees memory when the copy stream is idle, not where the plan expects it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor


class OverlappedCopy:
    """One copy, which may still be running.

    An error in the middle of a step drops it. Then computing waits for it too, before the memory of
    its tensors can have another owner.
    """

    __slots__ = ("_event", "_result", "_source")

    def __init__(self, source: Tensor, result: Tensor, event: Any = None) -> None:
        self._source: Tensor | None = source
        self._result = result
        self._event = event

    def wait(self) -> Tensor:
        """Let later work of the device wait for the copy, and return its result."""
        if self._event is not None:
            self._event.wait()  # in the current stream of the device; the host does not wait
            self._event = None
        self._source = None
        return self._result

    def __del__(self) -> None:
        self.wait()


def start_to_host(tensor: Tensor) -> OverlappedCopy:
    """Start to copy a tensor to the host's memory, pinned if the tensor is on a GPU."""
    size, stride = tensor.size(), tensor.stride()
    if tensor.device.type == "cuda":
        result = torch.empty_strided(size, stride, dtype=tensor.dtype, pin_memory=True)
        return _started(tensor, result, tensor.device, "to host")
    # Outside torch's allocator, so that its events are those of the device alone, also on a CPU.
    memory = np.empty(tensor.untyped_storage().nbytes(), dtype=np.uint8)
    result = torch.from_numpy(memory).view(tensor.dtype).as_strided(size, stride)
    result.copy_(tensor)
    return OverlappedCopy(tensor, result)


def start_to_device(tensor: Tensor, device: torch.device) -> OverlappedCopy:
    """Start to copy a tensor from the host's memory to a device."""
    result = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if device.type == "cuda":
        return _started(tensor, result, device, "to device")
    result.copy_(tensor)
    return OverlappedCopy(tensor, result)


def wait_for(copy: OverlappedCopy) -> Tensor:
    """Let later work of the device wait for a copy, and return its result."""
    return copy.wait()


def _started(
    source: Tensor, result: Tensor, device: torch.device, direction: str
) -> OverlappedCopy:
    with torch.cuda.device(device):
        stream = _stream(device, direction)
        # After the kernels that compute the source, or that last used the result's memory.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            result.copy_(source, non_blocking=True)
        return OverlappedCopy(source, result, stream.record_event())


@functools.cache
def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return the stream of one direction. A GPU copies in both at once."""
    return torch.cuda.Stream(device)

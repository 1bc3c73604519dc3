"""Copy numbers between a device and the host without waiting, and repeat launches of kernels.

A copy between a CUDA device and pageable memory waits for all earlier kernels. A copy to or from
pinned memory is queued in the stream.

At each launch, Triton looks up the kernel by all arguments, which takes ten times as long as the
launch. For arguments of the same types, alignments and numbers, the result can be reused: a launch
returns its ``CompiledKernel``, whose ``run`` takes the grid, stream, ``function``,
``packed_metadata``, three arguments for hooks, and the arguments in their order, pointers as
integers too. Checked on Triton 3.6 and 3.7; with other versions nothing is reused.

Private names of torch were checked on 2.14, 2.13 and 2.11. Triton and Inductor call them as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

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


_CHECKED: Final = ("3.6.", "3.7.")


# Address of the current stream of a CUDA device, and the index of the current device.
current_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def stream_of(device: torch.device) -> int:
    """Return the address of a device's current stream; 0 on the CPU."""
    return current_stream(device.index) if device.type == "cuda" else 0


# A compiled kernel, launched without checks: takes the grid, a stream of the current device, and
# all arguments in their order.
RepeatedLaunch: TypeAlias = Callable[..., None]


def repeated_launch(compiled: Any) -> RepeatedLaunch | None:
    """Return a function that repeats a launch, from the launch's result, or ``None``."""
    # Triton's interpreter returns nothing.
    names = ("run", "function", "packed_metadata")
    if not can_repeat() or not all(hasattr(compiled, name) for name in names):
        return None
    run, function, metadata = (getattr(compiled, name) for name in names)
    return lambda grid, stream, *arguments: run(
        grid, 1, 1, stream, function, metadata, None, None, None, *arguments
    )


def can_repeat() -> bool:
    """Check whether launches can be repeated: no profiler has launch hooks."""
    import triton

    if not triton.__version__.startswith(_CHECKED):
        return False
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return not any(getattr(hook, "calls", hook) for hook in hooks)

"""Repeat launches of compiled Triton kernels, on the stream that is current.

Triton finds a kernel by all of its arguments again at each launch, which takes ten times as long as
the launch. What it found for arguments of the same types, alignments and numbers can be kept: a
launch returns its ``CompiledKernel``, whose ``run`` takes the grid, stream, ``function``,
``packed_metadata``, three arguments for hooks, and the arguments in their order, pointers as
integers too. Checked on Triton 3.6 and 3.7; with another version nothing is kept.

Private names of torch: ``_cuda_getCurrentRawStream`` and ``_cuda_getDevice`` of ``torch._C``,
checked on torch 2.11 and 2.13. Triton and Inductor call them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

_CHECKED: Final = ("3.6.", "3.7.")


def _stream(index: int) -> int:
    stream: int = torch.cuda.current_stream(index).cuda_stream
    return stream


# Address of the current stream of a CUDA device, and the index of the current device.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def stream_of(device: torch.device) -> int:
    """Return the address of the stream that is current on a device; 0 on the CPU."""
    return current_stream(device.index) if device.type == "cuda" else 0


class RepeatedLaunch:
    """A compiled kernel, launched without checks of its arguments."""

    __slots__ = ("_function", "_metadata", "_run")

    def __init__(self, compiled: Any) -> None:
        self._run: Callable[..., Any] = compiled.run
        self._function, self._metadata = compiled.function, compiled.packed_metadata

    def __call__(self, grid: int, stream: int, *arguments: Any) -> None:
        """Launch it on a stream of the current device, with all arguments in their order."""
        self._run(grid, 1, 1, stream, self._function, self._metadata, None, None, None, *arguments)


def repeated_launch(compiled: Any) -> RepeatedLaunch | None:
    """Return a way to repeat a launch, from what the launch has returned; ``None`` without one."""
    # Triton's interpreter returns nothing.
    names = ("run", "function", "packed_metadata")
    if not can_repeat() or not all(hasattr(compiled, name) for name in names):
        return None
    return RepeatedLaunch(compiled)


def can_repeat() -> bool:
    """Return whether launches can be repeated: no profiler has hooks that each must call."""
    import triton

    if not triton.__version__.startswith(_CHECKED):
        return False
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return not any(getattr(hook, "calls", hook) for hook in hooks)

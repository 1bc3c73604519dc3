"""Repeat launches of compiled Triton kernels on the current stream.

At each launch, Triton looks up the kernel by all arguments, which takes ten times as long as the
launch. For arguments of the same types, alignments and numbers, the result can be reused: a launch
returns its ``CompiledKernel``, whose ``run`` takes the grid, stream, ``function``,
``packed_metadata``, three arguments for hooks, and the arguments in their order, pointers as
integers too. Checked on Triton 3.6 and 3.7; with other versions nothing is reused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

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

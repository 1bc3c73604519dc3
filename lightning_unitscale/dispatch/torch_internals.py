"""The only file here that uses private names of torch; checked on torch 2.13 and 2.11.

``torch._C._current_autograd_node`` and ``torch._C._autograd._get_sequence_nr`` tie a backward
product to the forward product that it belongs to: the forward kernel runs right after its autograd
node was made, whose number is the last one given out. ``Library._destroy`` takes overridden kernels
away again. Frames of ``Module._call_impl`` tell which module is running, and one of
``_engine_run_backward`` directly below a kernel tells that the autograd engine itself called it,
unless one of ``CheckpointFunction.backward`` or of ``recompute_fn``, within
``_checkpoint_without_reentrant_generator``, comes before: then a checkpoint runs its body again.
What torch keeps of a checkpoint, ``_CheckpointFrame``, is in the hooks on saved tensors while its
body runs, and on the stack when it runs again.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd import graph as autograd_graph
from torch.utils import checkpoint as checkpoints

Kernel = Callable[..., Any]

MODULE_CALL: CodeType = nn.Module._call_impl.__code__
ENGINE: CodeType = autograd_graph._engine_run_backward.__code__

CHECKPOINT: CodeType = inspect.unwrap(checkpoints.checkpoint).__code__
_REENTRANT: CodeType = checkpoints.CheckpointFunction.backward.__code__
_RECOMPUTATIONS: frozenset[CodeType] = frozenset(
    code
    for code in checkpoints._checkpoint_without_reentrant_generator.__code__.co_consts
    if isinstance(code, CodeType) and code.co_name == "recompute_fn"
)
RECOMPUTATIONS = _RECOMPUTATIONS | {_REENTRANT}

current_node: Callable[[], Any] = torch._C._current_autograd_node


def graph_task() -> int:
    """Number of the backward pass that runs on this thread."""
    number: int = torch._C._current_graph_task_id()
    return number


def saves_elsewhere() -> bool:
    """Whether hooks take what autograd saves: its own memory may be another tensor's soon."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def checkpoint_under_way() -> object | None:
    """What torch keeps of the checkpoint, not a reentrant one, whose body runs on this thread."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    for cell in () if hooks is None else getattr(hooks[1], "__closure__", None) or ():
        if isinstance(cell.cell_contents, checkpoints._CheckpointFrame):
            return cell.cell_contents
    return None


def checkpoint_of(frame: FrameType) -> object | None:
    """What torch keeps of the checkpoint that a frame computes again; ``None`` for others."""
    if frame.f_code.co_name != "unpack_hook":
        return None
    found = frame.f_locals.get("frame")
    return found if isinstance(found, checkpoints._CheckpointFrame) else None


def last_sequence_number() -> int:
    """Number of the autograd node that was made last on this thread."""
    number: int = torch._C._autograd._get_sequence_nr() - 1
    return number


def sequence_number(node: Any) -> int:
    """Number of an autograd node."""
    number: int = node._sequence_nr()
    return number


def checkpointed_body(frame: FrameType) -> Any:
    """The function whose checkpoint a frame makes, of ``CHECKPOINT``, or runs again."""
    values = frame.f_locals
    if frame.f_code is CHECKPOINT:
        return values["function"]
    return values["ctx"].run_function if frame.f_code is _REENTRANT else values["fn"]


def has_subclass(args: Sequence[Any]) -> bool:
    """Whether an argument is a tensor of a subclass, with functions of its own."""
    return any(
        isinstance(arg, torch.Tensor) and type(arg) not in (torch.Tensor, nn.Parameter)
        for arg in args
    )


def plain_functions() -> AbstractContextManager[None]:
    """Within this context neither subclasses of tensors nor modes hear of functions of torch."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def original_kernel(operator: str, key: str) -> Kernel | None:
    """What torch runs for an operator on a device now, or ``None`` where it has nothing."""
    packet_name, _, overload_name = operator.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    if packet is None or (overload_name or "default") not in packet.overloads():
        return None
    overload = getattr(packet, overload_name or "default")
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(overload.name(), key):
        return None
    kernel = torch.library.get_kernel(overload, key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel.call_boxed(keys, *args, **kwargs)

    return call


class KernelOverrides:
    """Kernels of aten operators that are exchanged until :meth:`remove`."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")

    def put(self, operator: str, key: str, kernel: Kernel) -> None:
        """Let a kernel of ours run for an operator on a device."""
        with warnings.catch_warnings():
            # torch says once per process that a kernel was overridden, which is on purpose.
            warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered")
            self._library.impl(operator, kernel, key, allow_override=True)

    def remove(self) -> None:
        """Put torch's own kernels back, without a trace."""
        self._library._destroy()

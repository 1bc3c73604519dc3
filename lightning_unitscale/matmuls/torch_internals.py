"""Private names of torch's dispatcher, engine and checkpoints; checked on torch 2.13 and 2.11.

``torch._C._current_autograd_node`` and ``torch._C._autograd._get_sequence_nr`` tie a backward
matmul to the forward matmul that it belongs to: the forward kernel runs right after its autograd
node was made, whose number is the last one that its thread has given out (``autograd_nodes.py``).
``Library._destroy`` takes overridden kernels away again, and what ``OpOverload._dispatch_cache``
remembers of them while a compiler traces has to go as well. Frames of ``Module._call_impl`` tell
which module is running, and one of ``_engine_run_backward`` directly below a kernel tells that the
autograd engine itself called it, unless one of ``CheckpointFunction.backward`` or of
``recompute_fn``, within ``_checkpoint_without_reentrant_generator``, comes before: then a
checkpoint runs its body again. What torch keeps of a checkpoint, ``_CheckpointFrame``, is in the
hooks on saved tensors while its body runs, and on the stack when it runs again.

``set_code_exec_strategy`` keeps Dynamo away from code and from what it calls;
``_len_torch_dispatch_stack`` and ``_profiler_enabled`` tell whether anybody wants to hear of calls
from the dispatcher.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._guards import detect_fake_mode
from torch.autograd import graph as autograd_graph
from torch.utils import checkpoint as checkpoints

from lightning_unitscale.compiling import is_compiling

Kernel = Callable[..., Any]

MODULE_CALL: CodeType = nn.Module._call_impl.__code__
# All that is there of a module after its ``compile()``.
_WRAPPED_CALL: CodeType = nn.Module._wrapped_call_impl.__code__
# By identity, as the other set: the hash of code takes ten times as long.
MODULE_CALLS = frozenset(map(id, (MODULE_CALL, _WRAPPED_CALL)))
ENGINE: CodeType = autograd_graph._engine_run_backward.__code__
FUNCTION_CALL: CodeType = inspect.unwrap(vars(torch.autograd.Function)["apply"]).__code__

OPERATOR_CALL: CodeType = torch._ops.OpOverload.__call__.__code__

CHECKPOINT: CodeType = inspect.unwrap(checkpoints.checkpoint).__code__
_REENTRANT: CodeType = checkpoints.CheckpointFunction.backward.__code__
_RECOMPUTATIONS = [
    code
    for code in checkpoints._checkpoint_without_reentrant_generator.__code__.co_consts
    if isinstance(code, CodeType) and code.co_name == "recompute_fn"
]
RECOMPUTATIONS = frozenset(map(id, (*_RECOMPUTATIONS, _REENTRANT)))
# Name of the function that has a checkpoint's body computed again.
UNPACK = "unpack_hook"

current_node: Callable[[], Any] = torch._C._current_autograd_node
# Number of the backward pass that runs on this thread, -1 if none does.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
_next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
_saving_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
fake_mode_of: Callable[[Any], Any] = detect_fake_mode
is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


def saves_elsewhere() -> bool:
    """Whether hooks take what autograd saves: its own memory may be another tensor's soon."""
    return _saving_hooks(True) is not None


def checkpoint_under_way() -> object | None:
    """What torch keeps of the checkpoint, not a reentrant one, whose body runs on this thread."""
    if (hooks := _saving_hooks(True)) is None:
        return None
    for cell in getattr(hooks[1], "__closure__", None) or ():
        if isinstance(cell.cell_contents, checkpoints._CheckpointFrame):
            return cell.cell_contents
    return None


def checkpoint_of(frame: FrameType) -> object | None:
    """What torch keeps of the checkpoint that a frame computes again; ``None`` for others."""
    if frame.f_code.co_name != UNPACK:
        return None
    found = frame.f_locals.get("frame")
    return found if isinstance(found, checkpoints._CheckpointFrame) else None


def last_sequence_number() -> int:
    """Number of the autograd node that was made last on this thread."""
    return _next_sequence_number() - 1


def sequence_number(node: Any) -> int:
    """Number of an autograd node on the thread that has made it, which counts by itself."""
    number: int = node._sequence_nr()
    return number


@dataclass(frozen=True, eq=False)
class RunAgain:
    """What a reentrant checkpoint runs again in place of its body."""

    body: Callable[..., Any]
    run: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Run the body by ``run``."""
        return self.run(self.body, *args)


def checkpointed_body(frame: FrameType) -> Any:
    """The function whose checkpoint a frame makes, of ``CHECKPOINT``, or runs again."""
    values = frame.f_locals
    if frame.f_code is CHECKPOINT:
        return values["function"]
    body = values["ctx"].run_function if frame.f_code is _REENTRANT else values["fn"]
    return body.body if isinstance(body, RunAgain) else body


def calling_frame() -> FrameType | None:
    """The frame that calls the kernel that asks; ``None`` if it is the autograd engine itself."""
    frame = sys._getframe(1).f_back
    return None if frame is None or frame.f_code is ENGINE else frame


def has_subclass(args: Sequence[Any]) -> bool:
    """Whether an argument is a tensor of a subclass, with functions of its own."""
    return any(
        isinstance(arg, torch.Tensor) and type(arg) not in (torch.Tensor, nn.Parameter)
        for arg in args
    )


# Within this context neither subclasses of tensors nor modes hear of functions of torch.
plain_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


def overload_of(operator: str) -> Any:
    """An operator of aten by its name; ``None`` where this version of torch has none."""
    packet_name, _, name = operator.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return None if packet is None else getattr(packet, name or "default", None)


def _original_kernel(overload: Any, key: str) -> Kernel | None:
    """What torch runs for an operator on a device now, or ``None`` where it has nothing."""
    if overload is None:
        return None
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(overload.name(), key):
        return None
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(torch.library.get_kernel(overload, key).call_boxed, keys)


def _leave_uncompiled(function: Kernel) -> None:
    """Let Dynamo compile neither a function nor what it calls."""
    # A layer of torch's own that is compiled by itself, as by ``linear.compile()``, runs as it is
    # written, and Dynamo would compile whatever Python its matmuls come to.
    while isinstance(function, functools.partial):
        function = function.func
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)


# By the name of an operator and device: the kernel that another runs for.
OVERRIDDEN: dict[str, dict[str, Kernel]] = defaultdict(dict)


def overridden_kernel(operator: str, device: str) -> Kernel:
    """The kernel of an operator that another one runs for; the operator itself where none does."""
    kernel = OVERRIDDEN[operator].get(device)
    return getattr(torch.ops.aten, operator) if kernel is None else kernel


class KernelOverrides:
    """Kernels of aten operators that are exchanged until :meth:`remove`."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._library = torch.library.Library("aten", "IMPL")
        self._overloads: list[Any] = []

    def put(self, operator: str, make_kernel: Callable[[Kernel], Kernel]) -> None:
        """Let a kernel of ours run for an operator, where torch has one."""
        overload = overload_of(operator)
        original = _original_kernel(overload, self._key)
        if original is None:
            return
        with warnings.catch_warnings():
            # torch says once per process that a kernel was overridden, which is on purpose.
            warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered")
            kernel = make_kernel(original)
            _leave_uncompiled(kernel)
            self._library.impl(operator, kernel, self._key, allow_override=True)
        overload._dispatch_cache.clear()
        self._overloads.append(overload)
        OVERRIDDEN[operator][self._key.lower()] = original

    def remove(self) -> None:
        """Put torch's own kernels back, without a trace."""
        self._library._destroy()
        for kernels in OVERRIDDEN.values():
            kernels.pop(self._key.lower(), None)
        for overload in self._overloads:
            # A compiler that traces it would take it for an operator with a gradient of its own.
            overload._dispatch_cache.clear()


def is_recording() -> bool:
    """Whether what runs is recorded for later: by a compiler, an export or ``torch.jit.trace``."""
    return is_compiling() or is_tracing()

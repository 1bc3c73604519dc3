"""Wrap the private names of torch's dispatcher, engine and checkpoints.

- ``torch._C._current_autograd_node`` and ``torch._C._autograd._get_sequence_nr`` map a backward
  matmul to its forward matmul. A forward kernel runs right after its autograd node is created,
  so the node has the last number of its thread (``autograd_nodes.py``).
- ``Library._destroy`` removes overridden kernels. Entries for them in
  ``OpOverload._dispatch_cache``, which a compiler's tracing adds, must be removed as well.
- A frame of ``Module._call_impl`` identifies the running module. A frame of
  ``_engine_run_backward`` directly below a kernel means that the autograd engine called it.
- A frame of ``Function.apply`` means that an autograd function runs. From torch 2.14 on, only the
  function's ``forward`` has a frame.
- A frame of ``CheckpointFunction.backward``, or of ``recompute_fn`` within
  ``_checkpoint_without_reentrant_generator``, means that a checkpoint is recomputed.
- ``_CheckpointFrame`` is a checkpoint's state. The saved-tensor hooks hold it while the body
  first runs, and a recomputation has it on the stack.
- ``set_code_exec_strategy`` makes Dynamo skip code and its callees.
- ``_len_torch_dispatch_stack`` and ``_profiler_enabled`` report modes and profilers, which need
  calls through the dispatcher.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._guards import detect_fake_mode
from torch.autograd import graph as autograd_graph
from torch.utils import checkpoint as checkpoints

from lightning_unitscale.compiling import is_compiling

Kernel = Callable[..., Any]

MODULE_CALL: CodeType = nn.Module._call_impl.__code__
# The only frame of a module after its ``compile()``.
_WRAPPED_CALL: CodeType = nn.Module._wrapped_call_impl.__code__
# By identity, as in RECOMPUTATIONS: hashing code takes ten times as long.
MODULE_CALLS = frozenset(map(id, (MODULE_CALL, _WRAPPED_CALL)))
ENGINE: CodeType = autograd_graph._engine_run_backward.__code__
# ``None`` from torch 2.14 on, where it is no Python function.
_APPLY: CodeType | None = getattr(
    inspect.unwrap(vars(torch.autograd.Function)["apply"]), "__code__", None
)
# Of the code for which :func:`function_call` may return arguments.
FUNCTION_NAME = "forward" if _APPLY is None else "apply"
OPERATOR_CALL: CodeType = torch._ops.OpOverload.__call__.__code__

CHECKPOINT: CodeType = inspect.unwrap(checkpoints.checkpoint).__code__
_REENTRANT: CodeType = checkpoints.CheckpointFunction.backward.__code__
_RECOMPUTATIONS = [
    code
    for code in checkpoints._checkpoint_without_reentrant_generator.__code__.co_consts
    if isinstance(code, CodeType) and code.co_name == "recompute_fn"
]
RECOMPUTATIONS = frozenset(map(id, (*_RECOMPUTATIONS, _REENTRANT)))
UNPACK = "unpack_hook"  # name of the function that triggers a checkpoint's recomputation

current_node: Callable[[], Any] = torch._C._current_autograd_node
# Base of the nodes of autograd functions that are written in Python.
PYTHON_NODE: type = torch._C._FunctionBase
# Number of the backward pass that runs on this thread, -1 if none does.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
_next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
# The saved-tensor hooks that are active, if any: saved tensors may then change address.
saving_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
fake_mode_of: Callable[[Any], Any] = detect_fake_mode
is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


def checkpoint_under_way() -> object | None:
    """Return the state of the non-reentrant checkpoint whose body runs on this thread."""
    if (hooks := saving_hooks(True)) is None:
        return None
    for cell in getattr(hooks[1], "__closure__", None) or ():
        if isinstance(cell.cell_contents, checkpoints._CheckpointFrame):
            return cell.cell_contents
    return None


def checkpoint_of(frame: FrameType) -> object | None:
    """Return the state of the checkpoint that a frame recomputes; ``None`` for other frames."""
    if frame.f_code.co_name != UNPACK:
        return None
    found = frame.f_locals.get("frame")
    return found if isinstance(found, checkpoints._CheckpointFrame) else None


# Whether code is the ``forward`` of an autograd function, by the code's identity.
_FORWARDS: dict[int, bool] = {}


def function_call(frame: FrameType) -> tuple[Any, ...] | None:
    """Return the arguments of the autograd function that a frame runs, ``None`` for others."""
    code = frame.f_code
    if _APPLY is not None:
        return frame.f_locals["args"] if code is _APPLY else None
    if code.co_name != FUNCTION_NAME:
        return None
    known = _FORWARDS.get(id(code))
    if known is None:
        known = _FORWARDS[id(code)] = code in _forwards(torch.autograd.Function)
        # Code must not be kept: a module that Dynamo compiled lives as long as the code it made.
        weakref.finalize(code, _FORWARDS.pop, id(code), None).atexit = False
    if not known:
        return None
    num_named = code.co_argcount + code.co_kwonlyargcount
    values = frame.f_locals
    args = tuple(values[name] for name in code.co_varnames[:num_named] if name in values)
    has_rest = code.co_flags & inspect.CO_VARARGS
    return args + tuple(values.get(code.co_varnames[num_named], ())) if has_rest else args


def _forwards(function: type[torch.autograd.Function]) -> Iterator[CodeType | None]:
    yield getattr(inspect.unwrap(function.forward), "__code__", None)
    for kind in function.__subclasses__():
        yield from _forwards(kind)


def last_sequence_number() -> int:
    """Return the number of this thread's latest autograd node."""
    return _next_sequence_number() - 1


def sequence_number(node: Any) -> int:
    """Return the number of an autograd node on the thread that created it."""
    return node._sequence_nr()


@dataclass(frozen=True, eq=False)
class RunAgain:
    """A replacement for the body of a reentrant checkpoint in a recomputation."""

    body: Callable[..., Any]
    run: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Run the body by ``run``."""
        return self.run(self.body, *args)


def checkpointed_body(frame: FrameType) -> Any:
    """Return the function that a frame checkpoints (``CHECKPOINT``) or recomputes."""
    values = frame.f_locals
    if frame.f_code is CHECKPOINT:
        return values["function"]
    body = values["ctx"].run_function if frame.f_code is _REENTRANT else values["fn"]
    return body.body if isinstance(body, RunAgain) else body


def calling_frame() -> FrameType | None:
    """Return the frame that called the kernel; ``None`` if the autograd engine called it."""
    frame = sys._getframe(1).f_back
    return None if frame is None or frame.f_code is ENGINE else frame


def has_subclass(args: Sequence[Any]) -> bool:
    """Check whether an argument is of a tensor subclass, which may override functions."""
    return any(
        isinstance(arg, torch.Tensor) and type(arg) not in (torch.Tensor, nn.Parameter)
        for arg in args
    )


# A context in which tensor subclasses and modes do not intercept torch's functions.
plain_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


def overload_of(operator: str) -> Any:
    """Return an operator of aten by its name; ``None`` if this torch version lacks it."""
    packet_name, _, name = operator.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return None if packet is None else getattr(packet, name or "default", None)


def _original_kernel(overload: Any, key: str) -> Kernel | None:
    """Return torch's current kernel for an operator on a device, or ``None``."""
    if overload is None:
        return None
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(overload.name(), key):
        return None
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(torch.library.get_kernel(overload, key).call_boxed, keys)


def _leave_uncompiled(function: Kernel) -> None:
    """Stop Dynamo from compiling a function and its callees."""
    # Until torch 2.13, its layers that are compiled alone (``linear.compile()``) run uncompiled.
    # Dynamo would compile the Python code of our kernels instead.
    while isinstance(function, functools.partial):
        function = function.func
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)


# The replaced kernels, by operator and device.
OVERRIDDEN: dict[str, dict[str, Kernel]] = defaultdict(dict)


def overridden_kernel(operator: str, device: str) -> Kernel:
    """Return the replaced kernel of an operator, or the operator if it was not replaced."""
    kernel = OVERRIDDEN[operator].get(device)
    return getattr(torch.ops.aten, operator) if kernel is None else kernel


class KernelOverrides:
    """Replacements for kernels of aten operators, until :meth:`remove`."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._library = torch.library.Library("aten", "IMPL")
        self._overloads: list[Any] = []

    def put(self, operator: str, make_kernel: Callable[[Kernel], Kernel]) -> None:
        """Replace the kernel of an operator, if torch has one."""
        overload = overload_of(operator)
        original = _original_kernel(overload, self._key)
        if original is None:
            return
        with warnings.catch_warnings():
            # torch warns once per process of an overridden kernel, which is intended here.
            warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered")
            kernel = make_kernel(original)
            _leave_uncompiled(kernel)
            self._library.impl(operator, kernel, self._key, allow_override=True)
        overload._dispatch_cache.clear()
        self._overloads.append(overload)
        OVERRIDDEN[operator][self._key.lower()] = original

    def remove(self) -> None:
        """Restore torch's own kernels."""
        self._library._destroy()
        for kernels in OVERRIDDEN.values():
            kernels.pop(self._key.lower(), None)
        for overload in self._overloads:
            # Otherwise a compiler would treat it as an operator with its own gradient.
            overload._dispatch_cache.clear()


def is_recording() -> bool:
    """Check whether a compiler, an export or ``torch.jit.trace`` records the running code."""
    return is_compiling() or is_tracing()

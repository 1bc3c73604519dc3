"""Use private names of torch to inspect its modes, as no other file of this folder does."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
import torch._dynamo.eval_frame
from torch import Tensor
from torch._dynamo.eval_frame import DisableContext
from torch.nn import Parameter
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import CheckpointFunction

from lightning_unitscale.capture.breaks import is_watched, unwatched
from lightning_unitscale.capture.graph_recorder import local_part
from lightning_unitscale.functional.scale import is_transforming
from lightning_unitscale.matmuls.torch_internals import RunAgain, is_recording, last_sequence_number
from lightning_unitscale.patching import shadowed

plain_functions = torch._C.DisableTorchFunction
is_batched = torch._C._functorch.is_legacy_batchedtensor
# An operator that is called by its own name: one of aten's, or of the user's.
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
# Dynamo's wrapper of a compiled function calls it before and after, whatever happens in between.
_AROUND_COMPILED = "set_skip_guard_eval_unsafe"
_PLAIN_DISPATCH = Tensor.__torch_dispatch__
PLAIN_TYPES = (Tensor, Parameter)


def unseen() -> AbstractContextManager[Any]:
    """Hide torch's computations from all modes and tensor subclasses within this context."""
    # A selective checkpoint, for example, counts every operation that it sees. This runs for every
    # row, so it does no extra work if there are no modes.
    return _unseen_by_modes() if is_watched() else plain_functions()


@contextlib.contextmanager
def _unseen_by_modes() -> Iterator[None]:
    with plain_functions(), unwatched():
        yield


def is_readable(tensor: Tensor) -> bool:
    """Check whether a tensor has statistics: real floating-point numbers in strided memory."""
    # Fake tensors, tensors within `torch.func`, batched gradients of `torch.autograd.grad` and
    # tensors of a CUDA graph that is being recorded have none.
    if type(tensor) not in PLAIN_TYPES:
        tensor = local_part(tensor)
        if type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH:
            return False
    return (
        tensor.is_floating_point()
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        and not is_transforming()
        and not is_batched(tensor)
        and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def takes_part(tensor: Tensor) -> bool:
    """Check whether a gradient can arrive: at a node, or at a leaf that is not a view of a leaf."""
    return tensor.requires_grad and (tensor.grad_fn is not None or tensor._base is None)


def is_transformed() -> bool:
    """Check whether tensors represent others: within ``torch.func``, or while torch traces."""
    return is_transforming() or is_recording()


@contextlib.contextmanager
def running_again_by(
    run_again: Callable[..., Any], is_own: Callable[[int], bool]
) -> Iterator[None]:
    """Recompute our own reentrant checkpoints by a function within this context."""
    # A checkpoint is recognized as ours by identity, after its first run.
    run = CheckpointFunction.forward

    @staticmethod  # type: ignore[misc]
    @functools.wraps(run)
    def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        result = run(ctx, function, *args)
        if is_own(id(ctx)):
            ctx.run_function = RunAgain(function, run_again)
        return result

    with shadowed(CheckpointFunction, forward=forward):
        yield


@contextlib.contextmanager
def in_force(mode: TorchFunctionMode) -> Iterator[None]:
    """Activate a mode for torch functions of this thread within this context."""
    if not torch._C._is_torch_function_all_disabled():
        with contextlib.nullcontext() if mode in _get_current_function_mode_stack() else mode:
            yield
        return
    # Code that has switched off all modes and subclasses does not see this one.
    others = [_pop_mode() for _ in _get_current_function_mode_stack()]
    try:
        with torch._C._EnableTorchFunction(), torch._C.DisableTorchFunctionSubclass(), mode:
            yield
    finally:
        _push(others)


@contextlib.contextmanager
def answering_as_without(mode: TorchFunctionMode) -> Iterator[None]:
    """Make ``has_torch_function`` ignore a mode within this context."""
    # Otherwise `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` use another algorithm.
    original = torch.overrides.has_torch_function

    def has_torch_function(relevant_args: Any) -> bool:
        above = _pop_through(mode)
        try:
            return bool(original(relevant_args))
        finally:
            _push(above)

    with shadowed(torch.overrides, has_torch_function=has_torch_function):
        yield


@contextlib.contextmanager
def outside_of_compiled_code(
    mode: TorchFunctionMode, see: Callable[[FrameType, range], None]
) -> Iterator[None]:
    """Remove a mode while user-compiled code runs, within this context."""
    # Dynamo would recompile because of the additional mode.
    original = vars(torch._dynamo.eval_frame)[_AROUND_COMPILED]
    running: list[tuple[FrameType, list[TorchFunctionMode], int]] = []

    def around(value: bool) -> Any:
        frame = sys._getframe(1)
        if running and running[-1][0] is frame:
            _, above, first = running.pop()
            _push(above)
            see(frame, range(first, last_sequence_number() + 1))
        # The wrapper of a function that is never compiled may call it too.
        elif not isinstance(frame.f_locals.get("self"), DisableContext) and (
            above := _pop_through(mode)
        ):
            running.append((frame, above, last_sequence_number() + 1))
        return original(value)

    with shadowed(torch._dynamo.eval_frame, **{_AROUND_COMPILED: around}):
        yield


def _pop_through(mode: TorchFunctionMode) -> list[TorchFunctionMode]:
    """Pop a mode and those above it from this thread's stack, or nothing if it is not there."""
    popped: list[TorchFunctionMode] = []
    while _get_current_function_mode() is not None:
        popped.append(_pop_mode())
        if popped[-1] is mode:
            return popped
    _push(popped)
    return []


def _push(popped: list[TorchFunctionMode]) -> None:
    for mode in reversed(popped):
        _push_mode(mode)

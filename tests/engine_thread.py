"""Run backward passes on a thread of the autograd engine, as on an accelerator.

Such a thread has no Python frame below a kernel, numbers the autograd nodes that it makes by
itself, and has none of the caller's thread-local variables. On a CPU the engine takes a thread of
its own only for backward calls that are nested too deeply in one another.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.utils import _python_dispatch as dispatch

from lightning_unitscale.matmuls.autograd_nodes import HandedOn
from lightning_unitscale.patching import nothing, shadowed

# The engine's ``MAX_DEPTH``, and one.
_DEPTH = 61
# A nested call allocates no memory, because some tests count it.
_NUMBER = torch.zeros(())
# Threads of the engine's pool, of which one waits when the others do not do so as yet.
_NUM_THREADS = 6
_IS_REACHED = HandedOn("tests.engine_thread", False)
_MODE_KEYS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def run_on_engine_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function on a thread of the engine, and return its result or raise its error.

    What torch hands on to the engine's threads is as it is here: modes, functorch's transforms,
    autocast, and whether gradients are recorded. No mode sees how the thread is reached.

    Args:
        function: The function, which may run a backward pass.
        *args: Its arguments.
        **kwargs: Its keyword arguments.
    """
    results: list[Any] = []
    errors: list[BaseException] = []
    function_state = torch._C._get_torch_function_state()
    modes = dispatch._get_current_dispatch_mode_stack()
    records = torch.is_grad_enabled()
    with ExitStack() as unseen:
        unseen.enter_context(torch._C.DisableTorchFunction())
        unseen.enter_context(dispatch._disable_current_modes())
        transforms = unseen.enter_context(pyfunctorch.temporarily_clear_interpreter_stack())

        def run() -> None:
            with ExitStack() as as_before:
                as_before.enter_context(torch.set_grad_enabled(records))
                as_before.enter_context(
                    pyfunctorch.temporarily_restore_interpreter_stack(transforms)
                )
                for mode in modes:
                    dispatch._push_mode(mode)
                    as_before.callback(dispatch._pop_mode)
                as_before.callback(
                    torch._C._set_torch_function_state, torch._C._get_torch_function_state()
                )
                torch._C._set_torch_function_state(function_state)
                as_before.enter_context(_IS_REACHED.being(True))
                try:
                    results.append(function(*args, **kwargs))
                except BaseException as error:
                    errors.append(error)

        _keep_thread_states()
        _nest(run, _DEPTH)
    if errors:
        raise errors[0]
    return results[0]


@functools.cache
def _keep_thread_states() -> None:
    """Let threads of the engine's pool keep Python's state of a thread, as those of devices do.

    Otherwise it goes with each call of a hook, and an error that a hook raises goes with it.
    """
    kept = {threading.get_ident()}

    def keep() -> None:
        if threading.get_ident() not in kept:
            kept.add(threading.get_ident())
            ctypes.pythonapi.PyGILState_Ensure()

    # Each of them nests as deeply itself before the next one takes over.
    _nest(nothing, (1 + _NUM_THREADS) * _DEPTH, keep)
    assert len(kept) > _NUM_THREADS


def _nest(run: Callable[[], None], depth: int, at_each: Callable[[], None] = nothing) -> None:
    if depth == 0:
        run()
        return
    with torch.enable_grad():
        leaf = _NUMBER.detach().requires_grad_()

        def hook(gradient: Tensor) -> None:
            at_each()
            _nest(run, depth - 1, at_each)

        leaf.register_hook(hook)
        # The function itself, whose name in torch.autograd gives way. Within torch's older vmap a
        # pass may compute gradients, and may not add them to those of leaves.
        torch.autograd.graph._engine_run_backward(
            (leaf.view_as(leaf),), (_NUMBER,), False, False, (leaf,), False, accumulate_grad=False
        )


def _is_tracing() -> bool:
    modes = map(torch._C._get_dispatch_mode, _MODE_KEYS)
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or any(modes)


@contextlib.contextmanager
def backward_on_engine_thread() -> Iterator[None]:
    """Within this context backward passes of this process run on threads of the engine.

    Both ``torch.autograd.backward``, which ``Tensor.backward`` calls, and ``torch.autograd.grad``
    end in one function. Traced passes, which no engine runs later, stay where they are.
    """
    engine = torch.autograd._engine_run_backward

    @functools.wraps(engine)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        # A pass within another one is on such a thread as it is.
        if _is_tracing() or _IS_REACHED.get():
            return engine(*args, **kwargs)
        return run_on_engine_thread(engine, *args, **kwargs)

    # Dynamo leaves torch's own function alone, and would look into ours.
    with shadowed(torch.autograd, _engine_run_backward=torch.compiler.disable(run_backward)):
        yield

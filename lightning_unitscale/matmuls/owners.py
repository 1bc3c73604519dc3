"""Whose a matmul is, also where no step is on the stack: in a backward pass, or in a loss.

What an optimizer multiplies is not the model's; a closure that it calls is again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from lightning_unitscale.capture.operators import MatmulRule
from lightning_unitscale.matmuls.autograd_nodes import thread_number
from lightning_unitscale.matmuls.calls import Call, call_of, maker_of
from lightning_unitscale.matmuls.session import LOCAL, SESSION, MatmulSession
from lightning_unitscale.matmuls.sites import frames, recomputed_checkpoint
from lightning_unitscale.matmuls.torch_internals import FUNCTION_CALL, current_node, graph_task

# Sessions that are open, by identity.
OPEN: dict[int, weakref.ref[MatmulSession]] = {}
# What is put into torch for them; closed with the last.
INSTALLED = ExitStack()
# By the number of a backward pass, which may run on several threads: whose matmul ran last in it.
_LATEST: dict[int, weakref.ref[MatmulSession]] = {}
_MAX_LATEST = 2**8


def asking_session(node: Any) -> tuple[MatmulSession | None, Call | None]:
    """Whose a matmul is that runs within an autograd node, and what the node was made for."""
    if (recorded := call_of(node)) is not None:
        return recorded[0](), recorded[1]
    if (session := SESSION.get()) is not None:
        return session, None
    # The body of a checkpoint, which a node has asked for that makes no matmul.
    sessions = [session for ref in list(OPEN.values()) if (session := ref()) is not None]
    checkpoint = recomputed_checkpoint()
    owners = [session for session in sessions if session.sites.has_run(checkpoint)]
    if not owners:
        # All of its matmuls may have been those of checkpoints within it.
        owners = [session for session in sessions if session.sites.owns_caller()]
    return next(iter(owners), None), None


def owner_of(rule: MatmulRule, args: Any) -> tuple[MatmulSession | None, Any, Call | None]:
    """Whose a matmul is, within which autograd node it runs, and what that was made for."""
    if (node := current_node()) is not None:
        session, call = asking_session(node)
        if session is None and call is None:
            session = maker_of(node)
        _note_latest(session)
        return session, node, call
    if (session := SESSION.get()) is not None:
        return session, None, None
    if graph_task() >= 0:
        # A hook, which no node runs, comes after what it belongs to.
        ref = _LATEST.get(graph_task())
        return None if ref is None else ref(), None, None
    if LOCAL.after_call is not None:
        return _session_of_loss(rule.operands_in(args)), None, None
    return None, None, None


def _note_latest(session: MatmulSession | None) -> None:
    task = graph_task()
    if session is None:
        _LATEST.pop(task, None)
    elif _LATEST.get(task) is not session.ref:
        if task not in _LATEST and len(_LATEST) >= _MAX_LATEST:
            del _LATEST[next(iter(_LATEST))]
        _LATEST[task] = session.ref


def _session_of_loss(operands: Sequence[Any]) -> MatmulSession | None:
    """Whose a matmul is that a loop computes between a module's call and the optimizer's step."""
    # Of the module's step is what needs a gradient, and is no other model's.
    session = None if LOCAL.after_call is None else LOCAL.after_call()
    if session is None or not session.is_after_call:
        return None
    # Autograd records the matmul by itself, or the function of the user's own that it is within.
    read: Any = operands
    if not torch.is_grad_enabled():
        read = [frame.f_locals["args"] for frame in frames() if frame.f_code is FUNCTION_CALL]
    if not needs_gradient(read) or session.sites.is_in_other_model():
        return None
    return session


def needs_gradient(values: Any) -> bool:
    """Return whether any tensor among values, in containers too, needs a gradient."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(values))


def waiting_session() -> MatmulSession | None:
    """Whose step has this thread, one of the user's own, run a module; nothing is scaled there."""
    # Another step may as well be running the module, or none: the step need not wait for the
    # thread.
    for ref in list(OPEN.values()):
        session = ref()
        threads = () if session is None else session.threads
        if session is None or not threads or thread_number() in threads:
            continue
        if session.sites.owns_caller():
            return session
    return None


def running_session() -> MatmulSession | None:
    """Whose step runs, or whose checkpoint is computed again."""
    node = current_node()
    return SESSION.get() if node is None else asking_session(node)[0]


def suspend_in_optimizers() -> None:
    """Let matmuls of optimizers' steps be nobody's, as long as there is a session."""
    # Not to be compiled with a step that the user compiles.
    before, after = torch.compiler.disable(_suspend), torch.compiler.disable(_resume)
    INSTALLED.callback(register_optimizer_step_pre_hook(before).remove)
    INSTALLED.callback(register_optimizer_step_post_hook(after).remove)


# Whose the matmuls were before an optimizer's step; one that raises does not resume.
_SUSPENDED: WeakKeyDictionary[Optimizer, weakref.ref[MatmulSession] | None] = WeakKeyDictionary()


def _suspend(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    session = SESSION.get()
    SESSION.set(None)
    _LATEST.pop(graph_task(), None)  # it may step in a hook of the backward pass
    _SUSPENDED[optimizer] = None if session is None else session.ref
    if session is None:
        return None
    # A closure runs the model, under manual optimization within the step that is suspended.
    kwargs = {name: _in_session(session, value) for name, value in kwargs.items()}
    return tuple(_in_session(session, value) for value in args), kwargs


def _in_session(session: MatmulSession, value: Any) -> Any:
    if isinstance(value, Optimizer) or not callable(value):
        return value

    @functools.wraps(value)
    def closure(*args: Any, **kwargs: Any) -> Any:
        with session.running():
            return value(*args, **kwargs)

    return closure


def _resume(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # Kernels may have been overridden in the middle of a step.
    if optimizer in _SUSPENDED:
        session = _SUSPENDED.pop(optimizer)
        SESSION.set(None if session is None else session())

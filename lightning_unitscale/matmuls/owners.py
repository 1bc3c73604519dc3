"""Find the session of a matmul, also in a backward pass or in a loss outside the module.

Matmuls of an optimizer's step belong to no session, but those of the closure that it calls do.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_unitscale.capture.graph_nodes import tensors_in
from lightning_unitscale.capture.operators import MatmulRule
from lightning_unitscale.matmuls.autograd_nodes import thread_number
from lightning_unitscale.matmuls.calls import Call, call_of, maker_of
from lightning_unitscale.matmuls.session import LOCAL, SESSION, MatmulSession, see_uncaptured
from lightning_unitscale.matmuls.sites import frames
from lightning_unitscale.matmuls.steady import LATEST
from lightning_unitscale.matmuls.torch_internals import (
    MODULE_CALLS,
    checkpoint_of,
    current_node,
    function_call,
    graph_task,
)

OPEN: dict[int, weakref.ref[MatmulSession]] = {}  # sessions that are open, by identity
# Undoes their changes to torch; closed with the last session.
INSTALLED = ExitStack()
_MAX_LATEST = 2**8


def asking_session(
    node: Any, *, is_called: bool = True
) -> tuple[MatmulSession | None, Call | None]:
    """Return the session of a matmul in an autograd node, and the node's forward matmul."""
    # Only Python code within the node, by which it ``is_called``, can recompute a checkpoint.
    if (recorded := call_of(node)) is not None:
        return recorded[0](), recorded[1]
    if (session := SESSION.get()) is not None or not is_called:
        return session, None
    # A node without a matmul may have triggered the recomputation of a checkpoint.
    sessions = [session for ref in list(OPEN.values()) if (session := ref()) is not None]
    checkpoint = next(filter(None, map(checkpoint_of, frames())), None)
    owners = [session for session in sessions if checkpoint in session.sites.starts]
    if not owners:
        # All matmuls of the checkpoint may belong to nested checkpoints.
        owners = [session for session in sessions if session.sites.owns_caller()]
    return next(iter(owners), None), None


def owner_of(
    rule: MatmulRule, args: Any, frame: FrameType | None
) -> tuple[MatmulSession | None, Any, Call | None]:
    """Return the session of a matmul, its autograd node, and the node's forward matmul."""
    if (node := current_node()) is not None:
        session, call = asking_session(node, is_called=frame is not None)
        if session is None and call is None:
            session = maker_of(node)
        _note_latest(session)
        return session, node, call
    if (session := SESSION.get()) is not None:
        return session, None, None
    if graph_task() >= 0:
        # No node runs a hook, so assign it to the session of the last matmul.
        ref = LATEST.get(graph_task())
        return None if ref is None else ref(), None, None
    if LOCAL.after_call is not None:
        return _session_of_loss(rule.operands_in(args)), None, None
    return None, None, None


def _note_latest(session: MatmulSession | None) -> None:
    task = graph_task()
    if session is None:
        LATEST.pop(task, None)
    elif LATEST.get(task) is not session.ref:
        if task not in LATEST and len(LATEST) >= _MAX_LATEST:
            del LATEST[next(iter(LATEST))]
        LATEST[task] = session.ref


def _session_of_loss(operands: Sequence[Any]) -> MatmulSession | None:
    """Return the session of a matmul between a module's call and the optimizer's step."""
    # A matmul belongs to the module's step if it needs a gradient and no other model runs it.
    session = None if LOCAL.after_call is None else LOCAL.after_call()
    if session is None or not session.is_after_call:
        return None
    # Autograd records the matmul itself, or the user's autograd function around it.
    read: Any = operands
    if not torch.is_grad_enabled():
        read = list(map(function_call, frames()))
    if not needs_gradient(read) or any(_calls_other_model(frame, session) for frame in frames()):
        return None
    return session


def _calls_other_model(frame: FrameType, session: MatmulSession) -> bool:
    """Check for the call of a model that neither contains the session's root nor belongs to it."""
    caller = frame.f_locals["self"] if id(frame.f_code) in MODULE_CALLS else None
    if caller is None or session.sites.path_of(id(caller)) is not None:
        return False
    root = session.sites.module
    # A module without parameters is a loss of the loop.
    has_parameters = next(caller.parameters(), None) is not None
    return has_parameters and not any(child is root for child in caller.modules())


def needs_gradient(values: Any) -> bool:
    """Check whether any tensor among nested values needs a gradient."""
    return any(tensor.requires_grad for tensor in tensors_in(values))


def waiting_session() -> MatmulSession | None:
    """Return the session with a running step whose module this user's thread calls."""
    # Nothing is scaled on the user's thread. It may belong to another step or to none, because the
    # step need not wait for it.
    for ref in list(OPEN.values()):
        session = ref()
        threads = () if session is None else session.threads
        if session is None or not threads or thread_number() in threads:
            continue
        if session.sites.owns_caller():
            return session
    return None


def see_elsewhere(operands: Sequence[Any]) -> None:
    """Let the open sessions check a forward matmul that belongs to none of them."""
    for ref in list(OPEN.values()):
        if (session := ref()) is not None:
            # On a thread of the step itself, it is an optimizer's matmul.
            in_step = bool(session.threads) and thread_number() not in session.threads
            see_uncaptured(session, operands, in_step=in_step)


def running_session() -> MatmulSession | None:
    """Return the session whose step runs or whose checkpoint is recomputed."""
    node = current_node()
    return SESSION.get() if node is None else asking_session(node)[0]


def suspend_in_optimizers() -> None:
    """Leave the matmuls of optimizers' steps unscaled while a session is open."""
    # A step that the user compiles must not include these hooks.
    before, after = torch.compiler.disable(_suspend), torch.compiler.disable(_resume)
    INSTALLED.callback(register_optimizer_step_pre_hook(before).remove)
    INSTALLED.callback(register_optimizer_step_post_hook(after).remove)


# The session before an optimizer's step. A step that raises does not resume it.
_SUSPENDED: WeakKeyDictionary[Optimizer, weakref.ref[MatmulSession] | None] = WeakKeyDictionary()


def _suspend(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    session = SESSION.get()
    SESSION.set(None)
    LATEST.pop(graph_task(), None)  # a hook of the backward pass may call the optimizer
    _SUSPENDED[optimizer] = None if session is None else session.ref
    if session is None:
        return None
    # A closure runs the model; under manual optimization this is in the suspended step.
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
    # A session may have opened during the optimizer's step.
    if optimizer in _SUSPENDED:
        session = _SUSPENDED.pop(optimizer)
        SESSION.set(None if session is None else session())

"""Override torch's matmul kernels, and route each call to the session that owns it.

The kernels of the devices in use are overridden while a session is open. They are restored when
the last session is closed or garbage-collected. Meanwhile, a matmul outside the sessions costs
15 to 20 us more.
"""

from __future__ import annotations

import functools
import weakref
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from lightning_unitscale.capture.operators import (
    COMPILED_BEFORE,
    RULE_OF,
    RULES,
    UNREACHED,
    MatmulRule,
    UnreachedRule,
)
from lightning_unitscale.matmuls import aot_pass, compiled_formats, joint_units
from lightning_unitscale.matmuls.calls import forget_calls, forget_made, leave
from lightning_unitscale.matmuls.compiled_runs import OWN_CALLERS, caller, is_ours
from lightning_unitscale.matmuls.execute import run_again
from lightning_unitscale.matmuls.fp8_linear import layer_kernel
from lightning_unitscale.matmuls.owners import (
    INSTALLED,
    OPEN,
    needs_gradient,
    owner_of,
    see_elsewhere,
    suspend_in_optimizers,
    waiting_session,
)
from lightning_unitscale.matmuls.session import LOCAL, SESSION, MatmulSession, run_inside
from lightning_unitscale.matmuls.steady import steady_backward, steady_forward
from lightning_unitscale.matmuls.torch_internals import (
    Kernel,
    KernelOverrides,
    calling_frame,
    plain_functions,
)

_PASSES = (compiled_formats.PASS, joint_units.PASS, *aot_pass.PASSES)
# By the identity of a session: its finalizer, which close_session or garbage collection calls.
_sessions: dict[int, weakref.finalize[..., MatmulSession]] = {}
_ELSEWHERE = "on a thread that the code of the step started"
_keys: set[str] = set()  # the dispatch keys whose kernels are overridden


class _Installed:
    """The number of times that a first session was opened, overall and as of this context."""

    # In torch 2.13 a setting of Inductor belongs to a Python context. A step may run in another
    # one: on a thread, in a task, or in the next cell of a notebook.

    number = 0
    here: ContextVar[int] = ContextVar("lightning_unitscale.passes", default=0)


def install_passes() -> None:
    """Install our Inductor passes in this Python context, before each step."""
    if _Installed.here.get() != _Installed.number:
        _Installed.here.set(_Installed.number)
        for graph_pass in _PASSES:
            graph_pass.install()


def open_session(session: MatmulSession) -> None:
    """Open a session for the matmuls of its module's steps. May be called more than once."""
    if not _sessions:
        _Installed.number += 1
        for graph_pass in _PASSES:
            INSTALLED.callback(graph_pass.remove)
        suspend_in_optimizers()
    install_passes()
    if id(session) not in _sessions:
        _sessions[id(session)] = weakref.finalize(session, _end, id(session), session.ref)
        _sessions[id(session)].atexit = False
        OPEN[id(session)] = session.ref
    for device in ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",):
        if device not in _keys:
            _override_matmuls(_overrides(device))
        if session.numerics and (key := f"Autograd{device}") not in _keys:
            # Tensors to save for the backward pass are chosen above autograd.
            _overrides(key).put("linear", layer_kernel)


def close_session(session: MatmulSession) -> None:
    """Close a session. The last one restores torch's kernels. May be called more than once."""
    session.close()
    if (finalizer := _sessions.get(id(session))) is not None:
        finalizer()


def _end(key: int, session: weakref.ref[MatmulSession]) -> None:
    _sessions.pop(key, None)
    OPEN.pop(key, None)
    forget_calls(session)
    forget_made(session)
    if not _sessions:
        INSTALLED.close()
        _keys.clear()


def num_overridden() -> int:
    """Return the number of dispatch keys whose kernels are overridden now."""
    return len(_keys)


def _overrides(key: str) -> KernelOverrides:
    overrides = KernelOverrides(key)
    INSTALLED.callback(overrides.remove)
    _keys.add(key)
    return overrides


def _override_matmuls(overrides: KernelOverrides) -> None:
    for rule in RULES:
        overrides.put(rule.operator, functools.partial(matmul_kernel, rule))
    for unreached in UNREACHED:
        kernel = functools.partial(unreached_kernel, unreached)
        if unreached.writes:
            kernel = functools.partial(writing_kernel, RULE_OF[unreached.writes], unreached)
        overrides.put(unreached.operator, kernel)
    # On a CPU they call an overridden kernel, with operands that are already in FP8.
    for operator in ("_scaled_mm", "_scaled_mm.out"):
        overrides.put(operator, lambda original: functools.partial(run_inside, original))


def matmul_kernel(rule: MatmulRule, original: Kernel) -> Kernel:
    """Make a kernel that passes a rule's matmuls to the sessions that own them."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        local = LOCAL
        if local.is_inside:
            return original(*args, **kwargs)
        frame = calling_frame()
        if kwargs:  # autograd passes some that are ``None``, as they are by default
            kwargs = {name: value for name, value in kwargs.items() if value is not None}
        running = None if frame is None else SESSION.get()
        if not kwargs and (frame is None or running is not None):
            with plain_functions():
                if frame is None:
                    again = steady_backward(rule, args)
                else:
                    again = steady_forward(running, rule, args, frame)
                if again is not None:
                    local.is_inside = True
                    try:
                        return run_again(again, args)
                    finally:
                        local.is_inside = False
        if is_ours(frame):
            return original(*args, **kwargs)
        session, node, call = owner_of(rule, args, frame)
        if session is None and node is None:
            operands = rule.operands_in(args)
            see_elsewhere(operands)
            if (waiting := waiting_session()) is not None:
                leave(operands)
                result = run_inside(original, *args, **kwargs)
                if waiting.counter is not None:
                    path, flops = waiting.sites.forward_run().path, rule.flops(args, result)
                    waiting.counter.add_with_gradients(path, "plain", _ELSEWHERE, flops, operands)
                return result
        if session is None or (frame is not None and caller() in OWN_CALLERS):
            return original(*args, **kwargs)
        with plain_functions():
            return session.run(rule, original, args, kwargs, node, call, frame)

    return kernel


def unreached_kernel(rule: UnreachedRule, original: Kernel) -> Kernel:
    """Make a kernel that counts the matmuls of an operator and leaves them unscaled."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        session = SESSION.get()
        if LOCAL.is_inside or session is None or (graph := caller()) in OWN_CALLERS:
            return original(*args, **kwargs)
        result = run_inside(original, *args, **kwargs)
        if session.counter is not None:
            path = session.sites.forward_run().path
            reason = rule.reason if graph is None else COMPILED_BEFORE
            flops = rule.flops(args, result)
            session.counter.add(path, "plain", reason, flops)
            if rule.has_backward and torch.is_grad_enabled() and needs_gradient(args):
                # Count them here, since the operator's own backward pass has no known session.
                session.counter.add(path, "plain", reason, 2 * flops)
        return result

    return kernel


def writing_kernel(rule: MatmulRule, unreached: UnreachedRule, original: Kernel) -> Kernel:
    """Make a kernel that writes a rule's matmul into the caller's tensor."""
    plain = unreached_kernel(unreached, original)
    writing = functools.partial(run_inside, getattr(torch.ops.aten, rule.operator).out)
    if not rule.addends:
        # An operator with a factor would allocate its result.
        rule = replace(rule, with_factor="")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        frame = calling_frame()
        if LOCAL.is_inside or is_ours(frame):
            return original(*args, **kwargs)
        session, node, call = owner_of(rule, args, frame)
        if session is None:
            return original(*args, **kwargs)
        if caller() is not None:
            return plain(*args, **kwargs)
        options = {**kwargs, "out": kwargs.get("out", args[0])}
        with plain_functions():
            return session.run(rule, writing, args, options, node, call, frame)

    return kernel

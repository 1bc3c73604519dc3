"""The eager executor of the table: kernels of torch's matmuls that ask whose matmul they run.

Kernels are overridden while there is a session, for the devices in use, and torch's own are back
when the last one has closed or was garbage-collected. A matmul of nobody's costs two microseconds
more meanwhile.
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
    RULES,
    UNREACHED,
    MatmulRule,
    UnreachedRule,
)
from lightning_unitscale.matmuls import aot_pass, compiled_formats, joint_units
from lightning_unitscale.matmuls.calls import forget, forget_made, leave
from lightning_unitscale.matmuls.compiled_runs import OWN_CALLERS, caller, is_ours
from lightning_unitscale.matmuls.fp8_linear import layer_kernel
from lightning_unitscale.matmuls.owners import (
    INSTALLED,
    OPEN,
    needs_gradient,
    owner_of,
    suspend_in_optimizers,
    waiting_session,
)
from lightning_unitscale.matmuls.session import LOCAL, SESSION, MatmulSession, run_inside
from lightning_unitscale.matmuls.torch_internals import (
    Kernel,
    KernelOverrides,
    calling_frame,
    plain_functions,
)

_PASSES = (compiled_formats.PASS, joint_units.PASS, *aot_pass.PASSES)
# By the identity of a session: what ends it, here or when nobody has it any more.
_sessions: dict[int, weakref.finalize[..., MatmulSession]] = {}
_ELSEWHERE = "a thread of the user's own, not that of the step"
# The dispatch keys whose kernels are overridden.
_keys: set[str] = set()


class _Installed:
    """How often there has been a first session, and for which of them the passes are there."""

    # In torch 2.13 a setting of Inductor is one of a context of Python, and a step may run in
    # another one: on a thread, in a task, or in the next cell of a notebook.

    number = 0
    here: ContextVar[int] = ContextVar("lightning_unitscale.passes", default=0)


def install_passes() -> None:
    """Have what this thread compiles given units and formats; asked before each step."""
    if _Installed.here.get() != _Installed.number:
        _Installed.here.set(_Installed.number)
        for graph_pass in _PASSES:
            graph_pass.install()


def open_session(session: MatmulSession) -> None:
    """Let a session have the matmuls of its module's steps; safe to call again."""
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
            # What is kept for the backward pass is chosen above autograd.
            _overrides(key).put("linear", layer_kernel)


def close_session(session: MatmulSession) -> None:
    """End it; torch's own kernels are back when it was the last. May be called more than once."""
    session.close()
    if (finalizer := _sessions.get(id(session))) is not None:
        finalizer()


def _end(key: int, session: weakref.ref[MatmulSession]) -> None:
    _sessions.pop(key, None)
    OPEN.pop(key, None)
    forget(session)
    forget_made(session)
    if not _sessions:
        INSTALLED.close()
        _keys.clear()


def num_overridden() -> int:
    """On how many kinds of devices kernels are overridden at this moment."""
    return len(_keys)


def _overrides(key: str) -> KernelOverrides:
    overrides = KernelOverrides(key)
    INSTALLED.callback(overrides.remove)
    _keys.add(key)
    return overrides


def _override_matmuls(overrides: KernelOverrides) -> None:
    for rule in RULES:
        overrides.put(rule.operator, functools.partial(matmul_kernel, rule))
    rules = {rule.operator: rule for rule in RULES}
    for unreached in UNREACHED:
        kernel = functools.partial(unreached_kernel, unreached)
        if unreached.writes:
            kernel = functools.partial(writing_kernel, rules[unreached.writes], unreached)
        overrides.put(unreached.operator, kernel)
    # On a CPU it multiplies by a kernel of the table, with operands that are in FP8 already.
    for operator in ("_scaled_mm", "_scaled_mm.out"):
        overrides.put(operator, lambda original: functools.partial(run_inside, original))


def matmul_kernel(rule: MatmulRule, original: Kernel) -> Kernel:
    """A kernel of a rule's operator that asks whose matmul it runs."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        frame = calling_frame()
        if LOCAL.is_inside or is_ours(frame):
            return original(*args, **kwargs)
        session, node, call = owner_of(rule, args)
        if session is None and node is None and (waiting := waiting_session()) is not None:
            operands = rule.operands_in(args)
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
    """A kernel that counts the matmuls of an operator and leaves them as they are."""

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
                # Counted here: a backward pass of its own does not say whose it is.
                session.counter.add(path, "plain", reason, 2 * flops)
        return result

    return kernel


def writing_kernel(rule: MatmulRule, unreached: UnreachedRule, original: Kernel) -> Kernel:
    """A kernel that writes a matmul of the table into a tensor of its caller's."""
    plain = unreached_kernel(unreached, original)
    writing = functools.partial(run_inside, getattr(torch.ops.aten, rule.operator).out)
    if not rule.addends:
        # What multiplies by a factor in passing makes a tensor.
        rule = replace(rule, with_factor="")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        frame = calling_frame()
        if LOCAL.is_inside or is_ours(frame):
            return original(*args, **kwargs)
        session, node, call = owner_of(rule, args)
        if session is None:
            return original(*args, **kwargs)
        if caller() is not None:
            return plain(*args, **kwargs)
        options = {**kwargs, "out": kwargs.get("out", args[0])}
        with plain_functions():
            return session.run(rule, writing, args, options, node, call, frame)

    return kernel

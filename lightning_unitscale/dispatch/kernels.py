"""The eager executor of the table: kernels of torch's products that ask whose product they run.

Kernels are overridden while there is a session, for the devices in use, and torch's own are back
when the last one has closed. A product of nobody's costs two microseconds more meanwhile.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.dispatch.calls import CALLS
from lightning_unitscale.dispatch.products import RULES, UNREACHED, ProductRule, UnreachedRule
from lightning_unitscale.dispatch.session import LOCAL, ProductSession
from lightning_unitscale.dispatch.torch_internals import (
    Kernel,
    KernelOverrides,
    current_node,
    original_kernel,
    plain_functions,
    sequence_number,
)

_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
# On a CPU it multiplies by a kernel of the table, with operands that are in FP8 already.
_FP8 = "_scaled_mm"
_sessions: dict[int, ProductSession] = {}
_optimizer_hooks: list[RemovableHandle] = []
_overrides: dict[str, KernelOverrides] = {}


def open_session(session: ProductSession, device_types: set[str]) -> None:
    """Let a session have the products of its module's steps; safe to call again.

    Args:
        session: The session.
        device_types: Where its module may run, such as ``{"cpu"}``.
    """
    _sessions[id(session)] = session
    for device_type in device_types:
        key = _KEYS.get(device_type)
        if key is not None and key not in _overrides:
            _overrides[key] = _override(key)
    if not _optimizer_hooks:
        # What an optimizer multiplies is not the model's; a closure that it calls is again.
        _optimizer_hooks.append(register_optimizer_step_pre_hook(_suspend))
        _optimizer_hooks.append(register_optimizer_step_post_hook(_resume))


def close_session(session: ProductSession) -> None:
    """End it; torch's own kernels are back when it was the last. May be called more than once."""
    session.close()
    _sessions.pop(id(session), None)
    if not _sessions:
        for overrides in _overrides.values():
            overrides.remove()
        _overrides.clear()
        for hook in _optimizer_hooks:
            hook.remove()
        _optimizer_hooks.clear()


def num_overridden() -> int:
    """On how many kinds of devices kernels are overridden at this moment."""
    return len(_overrides)


def _suspend(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    session = LOCAL.session
    LOCAL.suspended.append(session)
    LOCAL.session = None
    if session is None:
        return None
    # A closure runs the model, under manual optimization within the step that is suspended.
    kwargs = {name: _in_session(session, value) for name, value in kwargs.items()}
    return tuple(_in_session(session, value) for value in args), kwargs


def _in_session(session: ProductSession, value: Any) -> Any:
    if isinstance(value, Optimizer) or not callable(value):
        return value

    @functools.wraps(value)
    def closure(*args: Any, **kwargs: Any) -> Any:
        with session.running():
            return value(*args, **kwargs)

    return closure


def _resume(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # Kernels may have been overridden in the middle of a step.
    if LOCAL.suspended:
        LOCAL.session = LOCAL.suspended.pop()


def _override(key: str) -> KernelOverrides:
    overrides = KernelOverrides()
    for rule in RULES:
        if (original := original_kernel(rule.operator, key)) is not None:
            overrides.put(rule.operator, key, _product_kernel(rule, original))
    for unreached in UNREACHED:
        if (original := original_kernel(unreached.operator, key)) is not None:
            overrides.put(unreached.operator, key, _unreached_kernel(unreached, original))
    if (original := original_kernel(_FP8, key)) is not None:
        overrides.put(_FP8, key, _closed_kernel(original))
    return overrides


def _product_kernel(rule: ProductRule, original: Kernel) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if LOCAL.is_inside:
            return original(*args, **kwargs)
        node = current_node()
        if node is None:
            session = LOCAL.session
            if session is None:
                return original(*args, **kwargs)
            with plain_functions():
                return session.forward(rule, original, args, kwargs)
        call = CALLS.get(sequence_number(node))
        session = LOCAL.session or _recomputing() if call is None else call.session
        if session is None:
            return original(*args, **kwargs)
        with plain_functions():
            return session.within_backward(rule, original, args, kwargs, call, node)

    return kernel


def _recomputing() -> ProductSession | None:
    """Whose checkpoint computes once more, within a node that no product has made."""
    return next((session for session in _sessions.values() if session.owns_caller()), None)


def _closed_kernel(original: Kernel) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        previous, LOCAL.is_inside = LOCAL.is_inside, True
        try:
            return original(*args, **kwargs)
        finally:
            LOCAL.is_inside = previous

    return kernel


def _unreached_kernel(rule: UnreachedRule, original: Kernel) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        session = LOCAL.session
        if LOCAL.is_inside or session is None:
            return original(*args, **kwargs)
        return session.unreached(rule, original, args, kwargs)

    return kernel

"""The eager executor of the table: kernels of torch's products that ask whose product they run.

Kernels are overridden while there is a session, for the devices in use, and torch's own are back
when the last one has closed or was garbage-collected. A product of nobody's costs two microseconds
more meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.dispatch.aot_pass import PASSES
from lightning_unitscale.dispatch.calls import CALLS, Call, forget
from lightning_unitscale.dispatch.compiled_graphs import caller
from lightning_unitscale.dispatch.products import RULES, UNREACHED, ProductRule, UnreachedRule
from lightning_unitscale.dispatch.session import ProductSession
from lightning_unitscale.dispatch.sites import sites_of_checkpoint
from lightning_unitscale.dispatch.threads import LOCAL
from lightning_unitscale.dispatch.torch_internals import (
    Kernel,
    KernelOverrides,
    current_node,
    original_kernel,
    plain_functions,
    sequence_number,
)

_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
# Callers within Inductor whose products are not to be met again: a graph of ours has its units.
_COMPILED = ("ours", "compiler")
_COMPILED_BEFORE = "compiled before this callback was attached"
# Where linear layers are met as a whole, by what keeps less of them for the backward pass.
_AUTOGRAD_KEYS = {"cpu": "AutogradCPU", "cuda": "AutogradCUDA"}
# On a CPU it multiplies by a kernel of the table, with operands that are in FP8 already.
_FP8 = "_scaled_mm"
if TYPE_CHECKING:
    Finalizer = weakref.finalize[..., ProductSession]

# By the identity of a session: what ends it, here or when nobody has it any more.
_sessions: dict[int, Finalizer] = {}
_optimizer_hooks: list[RemovableHandle] = []
_overrides: dict[str, KernelOverrides] = {}


def open_session(session: ProductSession, device_types: set[str]) -> None:
    """Let a session have the products of its module's steps; safe to call again.

    Args:
        session: The session.
        device_types: Where its module may run, such as ``{"cpu"}``.
    """
    if not _sessions:
        for graph_pass in PASSES:
            graph_pass.install()
    if id(session) not in _sessions:
        finalizer = weakref.finalize(session, _end, id(session), session.ref)
        finalizer.atexit = False
        _sessions[id(session)] = finalizer
    for device_type in device_types:
        key = _KEYS.get(device_type)
        if key is not None and key not in _overrides:
            _overrides[key] = _override(key)
        key = _AUTOGRAD_KEYS.get(device_type)
        if session.numerics is not None and key is not None and key not in _overrides:
            _overrides[key] = _override_layers(key)
    if not _optimizer_hooks:
        # What an optimizer multiplies is not the model's; a closure that it calls is again.
        _optimizer_hooks.append(register_optimizer_step_pre_hook(_suspend))
        _optimizer_hooks.append(register_optimizer_step_post_hook(_resume))


def close_session(session: ProductSession) -> None:
    """End it; torch's own kernels are back when it was the last. May be called more than once."""
    session.close()
    if (finalizer := _sessions.get(id(session))) is not None:
        finalizer()


def _end(key: int, session: weakref.ref[ProductSession]) -> None:
    _sessions.pop(key, None)
    forget(session)
    if not _sessions:
        for graph_pass in PASSES:
            graph_pass.remove()
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


def _asking_session(call: Call | None) -> ProductSession | None:
    """Whose a product is that runs within an autograd node."""
    if call is not None:
        return call.session()
    if LOCAL.session is not None:
        return LOCAL.session
    # The body of a checkpoint, which a node has asked for that makes no product.
    if (sites := sites_of_checkpoint()) is not None:
        return sites.session()
    # All of its products may have been those of checkpoints within it.
    alive = [finalizer.peek() for finalizer in _sessions.values()]
    sessions = [found[0] for found in alive if found is not None]
    return next((session for session in sessions if session.owns_caller()), None)


def _product_kernel(rule: ProductRule, original: Kernel) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if LOCAL.is_inside:
            return original(*args, **kwargs)
        node = current_node()
        if (node is not None or LOCAL.session is not None) and caller() in _COMPILED:
            return original(*args, **kwargs)
        if node is None:
            session = LOCAL.session
            if session is None:
                return original(*args, **kwargs)
            with plain_functions():
                return session.forward(rule, original, args, kwargs)
        call = CALLS.get(sequence_number(node))
        session = _asking_session(call)
        if session is None:
            return original(*args, **kwargs)
        with plain_functions():
            return session.within_backward(rule, original, args, kwargs, call, node)

    return kernel


def _override_layers(key: str) -> KernelOverrides:
    overrides = KernelOverrides()
    original = original_kernel("linear", key)
    assert original is not None, "torch has a linear for every device"
    overrides.put("linear", key, _layer_kernel(original))
    return overrides


def _layer_kernel(original: Kernel) -> Kernel:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        session = LOCAL.session
        if session is None and (node := current_node()) is not None:
            session = _asking_session(CALLS.get(sequence_number(node)))
        result = None
        if session is not None and session.numerics is not None and not LOCAL.is_inside:
            result = session.numerics.run_layer(session, input, weight, bias)
        return original(input, weight, bias) if result is None else result

    return linear


def _closed_kernel(original: Kernel) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        previous, LOCAL.is_inside = LOCAL.is_inside, True
        try:
            return original(*args, **kwargs)
        finally:
            LOCAL.is_inside = previous

    return kernel


def _unreached_kernel(rule: UnreachedRule, original: Kernel) -> Kernel:
    foreign = dataclasses.replace(rule, reason=_COMPILED_BEFORE)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        session = LOCAL.session
        if LOCAL.is_inside or session is None:
            return original(*args, **kwargs)
        graph = caller()
        if graph in _COMPILED:
            return original(*args, **kwargs)
        reached_by = rule if graph is None else foreign
        return session.unreached(reached_by, original, args, kwargs)

    return kernel

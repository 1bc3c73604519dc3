"""Products that no factor reaches, or not everywhere: these run as they are, and are counted."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_unitscale.dispatch.compiled_graphs import COMPILED_BEFORE
from lightning_unitscale.dispatch.compiled_runs import OWN_CALLERS, caller, is_ours
from lightning_unitscale.dispatch.owners import owner_of
from lightning_unitscale.dispatch.session import LOCAL, SESSION, run_inside
from lightning_unitscale.dispatch.torch_internals import Kernel, calling_frame, plain_functions
from lightning_unitscale.graph.matmuls import DISTANCES, FUSED, RECURRENT
from lightning_unitscale.graph.operators import Arguments, ProductRule, contraction
from lightning_unitscale.profiler.costs import cudnn_recurrent_flops, recurrent_flops


@dataclass(frozen=True)
class UnreachedRule:
    """An operator that multiplies matrices where no factor can reach its operands."""

    operator: str  # its name in ``torch.ops.aten``, with the overload if that is not the default
    reason: str  # why its products run as they are
    flops: Callable[[Arguments, Any], int]  # floating-point operations of a call
    # Whether its gradients come from a kernel of the same kind, with twice as many.
    has_backward: bool = False
    # The operator of the table whose products this one writes into a tensor that it is
    # given. Factors reach them except in a graph that was compiled before.
    writes: str = ""


_WIDENED = "a product whose result has a type of its own"


def _encoder_layer_flops(args: Arguments, _: Any) -> int:
    weights = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 2]
    tokens = math.prod(args[0].shape[:-1])
    return 2 * int(tokens) * sum(int(weight.numel()) for weight in weights)


def _distance_flops(args: Arguments, _: Any) -> int:
    return 2 * int(args[0].numel()) * int(args[1].shape[-2])


# Operators of the table whose results are written, or added, into a tensor: how that is spelled,
# and at which argument their operands begin.
_WRITING = (
    ("addmm", "_", 1),
    ("baddbmm", "_", 1),
    ("addbmm", "_", 1),
    ("addmv", "_", 1),
    ("mm", ".out", 0),
    ("bmm", ".out", 0),
    ("addmm", ".out", 1),
    ("baddbmm", ".out", 1),
)

# Operators of CUDA whose result has another type than their operands, and where these begin.
_WIDENING = (("mm", 0), ("bmm", 0), ("addmm", 1), ("baddbmm", 1))

UNREACHED: tuple[UnreachedRule, ...] = (
    *(
        UnreachedRule(name + form, COMPILED_BEFORE, contraction(at, at + 1), writes=name)
        for name, form, at in _WRITING
    ),
    *(
        UnreachedRule(f"{name}.{form}", _WIDENED, contraction(at, at + 1))
        for name, at in _WIDENING
        for form in ("dtype", "dtype_out")
    ),
    UnreachedRule("_int_mm", "a product of integers", contraction(0, 1)),
    UnreachedRule("_cdist_forward", DISTANCES, _distance_flops),
    UnreachedRule("mkldnn_rnn_layer", RECURRENT, recurrent_flops, has_backward=True),
    UnreachedRule("_cudnn_rnn", RECURRENT, cudnn_recurrent_flops, has_backward=True),
    UnreachedRule("_transformer_encoder_layer_fwd", FUSED, _encoder_layer_flops),
    UnreachedRule("_native_multi_head_attention", FUSED, _encoder_layer_flops),
)


def unreached_kernel(rule: UnreachedRule, original: Kernel) -> Kernel:
    """A kernel that counts the products of an operator and leaves them as they are."""

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
            if rule.has_backward and torch.is_grad_enabled() and _needs_gradient(args):
                # Counted here: a backward pass of its own does not say whose it is.
                session.counter.add(path, "plain", reason, 2 * flops)
        return result

    return kernel


def writing_kernel(rule: ProductRule, unreached: UnreachedRule, original: Kernel) -> Kernel:
    """A kernel that writes a product of the table into a tensor of its caller's."""
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


def _needs_gradient(args: Arguments) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(args))

"""Capture the ``forward`` of an ordinary module: in a copy that runs the graphs, or exported.

Uses ``torch.export._trace._export_to_torch_ir`` (checked on torch 2.14, 2.13 and 2.11): the graph
of a strict export before it is lowered, with ``F.*`` nodes, the user's inputs and outputs, and
parameters under their own names; and ``_is_exporting_flag`` with the context that sets it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import functional_export
from torch.export._trace import _export_to_torch_ir

from lightning_unitscale.arguments import check_instance
from lightning_unitscale.capture.aliasing import make_out_of_place
from lightning_unitscale.capture.answers import trace_one_graph
from lightning_unitscale.capture.breaks import is_of_dynamo, reason_raised, wants_dynamos_texts
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.decompose import expand_composites
from lightning_unitscale.capture.dynamo_capture import CapturedGraph, is_compiled
from lightning_unitscale.capture.graph_nodes import Names
from lightning_unitscale.capture.module_steps import ModuleSteps, steps_of
from lightning_unitscale.capture.passes import GraphPass
from lightning_unitscale.capture.patches import plain_libraries
from lightning_unitscale.capture.rollback import detached_copy, set_up_by
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.patching import shadowed

_STATE = "_compiling_state_context"
MATMULS = "_module_matmuls"
TRACKER = "_scale_tracker"  # hooks and wrappers that observe the calls of a module


def captured_forward(
    module: nn.Module, owner: str, *passes: GraphPass
) -> tuple[nn.Module, CapturedStep]:
    """Deep-copy ``module`` with its own parameters, and run its ``forward`` as captured graphs."""
    new = own_copy(module)
    steps = capture(new, owner, passes)
    return new, steps.steps["forward"]


def own_copy(module: nn.Module) -> nn.Module:
    """Deep-copy ``module`` with its own parameters and the hooks on them."""
    reject_compiled(module)
    memo: dict[int, Any] = {}
    new: nn.Module = detached_copy(module, memo)
    for parameter in new.parameters():
        if not parameter.is_leaf:
            # torch's copy of a scripted module has already computed them.
            parameter.detach_().requires_grad_()
    for parameter in module.parameters():
        hook: Any
        for hook in (parameter._backward_hooks or {}).values():
            if getattr(hook, "__torch_unserializable__", False):
                continue  # the owner of the hook puts one on the copy
            # The hook may be a method of an object in the module.
            owner = memo.get(id(getattr(hook, "__self__", None)))
            copied = hook if owner is None else MethodType(hook.__func__, owner)
            memo[id(parameter)].register_hook(copied)
    return new


def matmuls_of(module: nn.Module) -> Any:
    """Return the object that runs the matmuls of a transformed module, or ``None``."""
    return module.__dict__.get(MATMULS)


def reject_compiled(module: nn.Module, more: str = " and pass compile=True here instead") -> None:
    """Refuse an object that is not a module, or a module that the user has compiled."""
    check_instance("module", module, nn.Module, "a torch.nn.Module", "pass the model itself")
    if is_compiled(module):
        raise ValueError(
            f"module={type(module).__name__}: it is compiled already. Expected an uncompiled one. "
            f"Leave out your torch.compile{more}."
        )


def capture(module: nn.Module, owner: str, passes: tuple[GraphPass, ...] = ()) -> ModuleSteps:
    """Capture ``forward``. Units and formats are applied around it."""
    matmuls, tracker = matmuls_of(module), module.__dict__.get(TRACKER)
    for each in (matmuls, tracker):
        if each is not None:
            each.detach()
    steps = steps_of(module)
    if steps is None:
        steps = ModuleSteps(module, ("forward",))
    for graph_pass in passes:
        steps.add_pass(graph_pass)
    steps.attach(owner)
    if matmuls is not None:
        matmuls.attach_again()
    if tracker is not None:
        tracker.capture(steps)
    set_explain(module)
    return steps


def set_explain(module: nn.Module) -> None:
    """Give a module the method ``explain()``."""
    module.__dict__["explain"] = MethodType(explain_forward, module)


def explain_forward(module: nn.Module) -> str:
    """Describe the captured graphs, the scaled and rounded matmuls, and the passes."""
    # As a method of the module it is `module.explain()`. A copy of the module explains itself.
    matmuls, steps = matmuls_of(module), steps_of(module)
    parts = [one.explain() for one in (matmuls, steps) if one is not None]
    return "\n\n".join(parts) or "Nothing is captured: forward runs uncaptured."


def export_forward(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    expand: bool = True,
    attentions: Mapping[str, bool] = MappingProxyType({}),
    plain: bool = False,
) -> fx.GraphModule:
    """Export ``module.forward`` as a graph module with its signature and a step's node names."""

    def trace() -> fx.GraphModule:
        exported: fx.GraphModule = _export_to_torch_ir(module, args, kwargs)
        return exported

    try:
        graph_module = _trace_as_if_plain(trace, module, args, kwargs) if plain else trace()
    except Exception as error:
        raise CaptureError.of(
            f"{type(module).__name__}.forward", [reason_raised(error)], manner=" as one graph"
        ) from (error if wants_dynamos_texts() or not is_of_dynamo(error) else None)
    Names().assign(CapturedGraph(graph_module, (), 0, ()), graph_module)
    if expand:
        expand_composites(graph_module, attentions)
    make_out_of_place(graph_module.graph)
    return graph_module


def _trace_as_if_plain(
    trace: Callable[[], fx.GraphModule],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> fx.GraphModule:
    """Trace a call. If that fails, run the call and trace it again."""
    with _as_if_plain():
        try:
            return trace_one_graph(trace)
        except Exception as error:
            if not is_of_dynamo(error):
                raise
        set_up_by(lambda: module(*args, **kwargs), module)
        return trace_one_graph(trace)


@contextlib.contextmanager
def _as_if_plain() -> Iterator[None]:
    """Make an export answer traced code that nothing is exported."""
    # Hugging Face's models pass attention an explicit mask when exported, and so use another
    # kernel, with other bits, than in a run.
    usual = getattr(functional_export, _STATE)

    @contextlib.contextmanager
    def compiling() -> Iterator[None]:
        with usual():
            torch.compiler._is_exporting_flag = False
            yield

    not_exporting = shadowed(functional_export, **{_STATE: compiling})
    with not_exporting, plain_libraries(), warnings.catch_warnings():
        # This is transformers' collector of hidden states, which is set and reset in every call.
        collector = r"(?s)While compiling, we found certain side effects.*_active_collector"
        warnings.filterwarnings("ignore", collector)
        yield

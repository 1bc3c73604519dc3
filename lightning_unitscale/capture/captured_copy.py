"""Transform an ordinary module into a copy whose ``forward`` runs captured graphs."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from lightning_unitscale.arguments import check_instance
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.dynamo_capture import is_compiled
from lightning_unitscale.capture.module_steps import ModuleSteps, steps_of
from lightning_unitscale.capture.passes import GraphPass
from lightning_unitscale.capture.rollback import detached_copy

MATMULS = "_module_matmuls"
# Hooks and wrappers that observe the calls of a module.
TRACKER = "_scale_tracker"


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
            # It may be a method of an object in the module.
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
    """Describe what was captured, what runs scaled or in a format, and what each pass did.

    As a method of the module it is ``module.explain()``. A copy of the module explains itself.
    """
    matmuls, steps = matmuls_of(module), steps_of(module)
    parts = [one.explain() for one in (matmuls, steps) if one is not None]
    return "\n\n".join(parts) or "Nothing is captured: forward runs as it is."

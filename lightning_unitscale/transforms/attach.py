"""What every transform of a plain module shares: a copy whose ``forward`` is captured."""

from __future__ import annotations

import copy

from torch import nn

from lightning_unitscale.graph.capture import is_compiled
from lightning_unitscale.graph.captured_step import CapturedStep
from lightning_unitscale.graph.passes import GraphPass
from lightning_unitscale.graph.steps import ModuleSteps, steps_of


def captured_forward(
    module: nn.Module, owner: str, *passes: GraphPass
) -> tuple[nn.Module, CapturedStep]:
    """A deep copy of ``module`` with its own parameters, whose ``forward`` runs through ``passes``.

    Transforms nest in any order: a module that is captured already keeps its passes, and all of
    them run in the order of their stages.

    Raises:
        ValueError: If ``module`` was compiled by the user.
    """
    reject_compiled(module)
    new = copy.deepcopy(module)
    steps = steps_of(new)
    if steps is None:
        steps = ModuleSteps(new, ("forward",))
    for one in passes:
        steps.add_pass(one)
    steps.attach(owner)
    new.__dict__["explain"] = _Explain(steps)
    return new, steps.steps["forward"]


def reject_compiled(module: nn.Module) -> None:
    """Refuse a module that has ``torch.compile`` on it: its graph is not ours to rewrite."""
    if is_compiled(module):
        raise ValueError(
            f"module={type(module).__name__}: it is compiled already; expected a plain module; "
            "leave out your torch.compile and pass compile=True here instead."
        )


class _Explain:
    """``module.explain()``: an object rather than a closure, so that a copy explains itself."""

    def __init__(self, steps: ModuleSteps) -> None:
        self.steps = steps

    def __call__(self) -> str:
        """What was captured and what each pass did."""
        return self.steps.explain()

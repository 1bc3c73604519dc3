"""A module's steps, captured, rewritten by passes, run by an executor, and what is said of them.

``steps_of(module)`` is the one place where callbacks and transforms meet: each adds its passes, and
whoever comes first puts the captured steps on the module, whoever leaves last takes them off.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

from tabulate import tabulate
from torch import nn

from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.settings import ATTRIBUTE, StepSettings, not_to_be_pickled
from lightning_unitscale.capture.side_effects import Calls
from lightning_unitscale.graph.passes import GraphPass, PassRecord


def passes_table(records: Sequence[PassRecord]) -> str:
    """A table of every pass over every graph."""
    rows = [
        (
            record.step,
            record.graph_index,
            "observed" if record.observed else "plain",
            record.pass_name,
            f"{record.nodes_before} -> {record.nodes_after}",
            f"{1e3 * record.seconds:.1f}",
            "\n".join(record.changes),
        )
        for record in records
    ]
    headers = ("step", "graph", "variant", "pass", "nodes", "ms", "changes")
    return tabulate(rows, headers=headers) if rows else "No graph has been captured yet."


def breaks_list(graph_breaks: Sequence[str]) -> str:
    """The graph breaks with their reasons, each once."""
    breaks = list(dict.fromkeys(graph_breaks))
    if not breaks:
        return "No graph breaks."
    lines = "\n".join(f"  {reason}" for reason in breaks)
    return f"{len(breaks)} graph breaks:\n{lines}\n  (TORCH_LOGS=graph_breaks says more of each)"


EVALUATION_STEPS = ("validation_step", "test_step", "predict_step")
LIGHTNING_STEPS = ("training_step", *EVALUATION_STEPS)


def steps_of(module: nn.Module) -> ModuleSteps | None:
    """The captured steps of a module, or ``None`` when nothing was attached to it."""
    return module.__dict__.get(ATTRIBUTE)


class ModuleSteps(StepSettings):
    """The captured steps of one module with the passes that all of them share.

    Args:
        module: Module whose methods are captured; it is changed by :meth:`attach` only.
        step_names: Methods to capture; those the module does not have are left out.
        defer: Methods of the module whose calls are made after the step (``log``, ``log_dict``).
        untraced: Says which methods of which objects are no part of the model, though the step
            calls them (``optimizer.step``).
    """

    def __init__(
        self,
        module: nn.Module,
        step_names: Sequence[str],
        *,
        defer: Sequence[str] = (),
        untraced: Callable[[nn.Module], Calls] | None = None,
    ) -> None:
        super().__init__(module, step_names, defer=defer, untraced=untraced)
        self.steps: dict[str, CapturedStep] = {
            name: CapturedStep(self, name) for name in step_names
        }
        self._owners: list[str] = []

    @property
    def owners(self) -> tuple[str, ...]:
        """Who has attached the steps."""
        return tuple(self._owners)

    def attach(self, owner: str) -> None:
        """Put the captured steps on the module; safe to call again for another owner."""
        if owner not in self._owners:
            self._owners.append(owner)
        self.module.__dict__[ATTRIBUTE] = self
        for name, step in self.steps.items():
            self.module.__dict__[name] = step

    def detach(self, owner: str, *passes: GraphPass) -> None:
        """Take the owner's interest and passes away; the last one restores the module. Idempotent.

        Graphs captured so far stay until then, and with them what ``explain()`` says of them.
        """
        if owner in self._owners:
            self._owners.remove(owner)
        self.passes = [graph_pass for graph_pass in self.passes if graph_pass not in passes]
        self._observers.discard(owner)
        if self._owners or steps_of(self.module) is not self:
            return
        attributes = self.module.__dict__
        del attributes[ATTRIBUTE]
        for name, step in self.steps.items():
            # Whoever has put something over it since takes it away himself.
            if attributes.get(name) is step:
                del attributes[name]
                if name in self._shadowed:
                    attributes[name] = self._shadowed[name]
        self.reset()

    def explain(self) -> str:
        """A table of every pass over every graph, and the graph breaks with their reasons."""
        parts = [passes_table(self.records), breaks_list(self.graph_breaks)]
        parts += [text for graph_pass in self.passes if (text := graph_pass.report())]
        return "\n\n".join(parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleSteps:
        """A copy for the copied module: the same passes, nothing captured yet."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.module = copy.deepcopy(self.module, memo)
        new.defer = self.defer
        new.untraced = self.untraced
        new.executor = self.executor
        new.partition_fn = copy.deepcopy(self.partition_fn, memo)
        new.passes = copy.deepcopy(self.passes, memo)
        new.records, new.graph_breaks = [], []
        new._observers = set(self._observers)
        new._always_observed = self._always_observed
        new._shadowed = copy.deepcopy(self._shadowed, memo)
        new.steps = {name: CapturedStep(new, name) for name in self.steps}
        for name, step in self.steps.items():
            memo[id(step)] = new.steps[name]
        for name, step in self.steps.items():
            # A transform's own object goes with the copy; a callback's method would take the
            # callback, and its Trainer, along.
            if not isinstance(step.before_call, (types.FunctionType, types.MethodType)):
                new.steps[name].interpreter = copy.deepcopy(step.interpreter, memo)
                new.steps[name].before_call = copy.deepcopy(step.before_call, memo)
        new._owners = list(self._owners)
        return new

    def __reduce__(self) -> Any:
        raise not_to_be_pickled(self.module, next(iter(self.steps)))

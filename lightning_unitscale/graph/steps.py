"""A module's steps, captured, rewritten by passes and run by an executor.

``steps_of(module)`` is the one place where callbacks and transforms meet: each adds its passes, and
whoever comes first puts the captured steps on the module, whoever leaves last takes them off.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_unitscale.graph.capture import Executor
from lightning_unitscale.graph.captured_step import CapturedStep, not_to_be_pickled
from lightning_unitscale.graph.passes import GraphPass, PassRecord, Stage
from lightning_unitscale.graph.steps_report import breaks_list, passes_table
from lightning_unitscale.graph.untraced import Calls

EVALUATION_STEPS = ("validation_step", "test_step", "predict_step")
LIGHTNING_STEPS = ("training_step", *EVALUATION_STEPS)
_ATTRIBUTE = "_captured_steps"


def steps_of(module: nn.Module) -> ModuleSteps | None:
    """The captured steps of a module, or ``None`` when nothing was attached to it."""
    return module.__dict__.get(_ATTRIBUTE)


class ModuleSteps:
    """The captured steps of one module with the passes that all of them share.

    Args:
        module: Module whose methods are captured; it is changed by :meth:`attach` only.
        step_names: Methods to capture; those the module does not have are left out.
        defer: Methods of the module whose calls are made after the step (``log``, ``log_dict``).
        untraced: Says which methods of which objects are no part of the model, though the step
            calls them (``optimizer.step``).

    Attributes:
        passes: Passes over every graph, in the order they were given.
        records: What the passes did, graph by graph.
        graph_breaks: Reasons of the graph breaks met while capturing.
    """

    def __init__(
        self,
        module: nn.Module,
        step_names: Sequence[str],
        *,
        defer: Sequence[str] = (),
        untraced: Callable[[nn.Module], Calls] | None = None,
    ) -> None:
        self.module = module
        self.defer = tuple(defer)
        self.untraced = untraced
        self.executor: Executor = "eager"
        self.partition_fn: Any = None
        self.passes: list[GraphPass] = []
        self.records: list[PassRecord] = []
        self.graph_breaks: list[str] = []
        self._observers: set[str] = set()
        self._always_observed = False
        self._shadowed = {
            name: module.__dict__[name] for name in step_names if name in module.__dict__
        }
        self.steps = {name: CapturedStep(self, name) for name in step_names}
        self._owners: list[str] = []

    @property
    def owners(self) -> tuple[str, ...]:
        """Who has attached the steps."""
        return tuple(self._owners)

    @property
    def changes_function(self) -> bool:
        """Whether a pass makes the steps compute something else than the user's own code."""
        return any(one.stage is Stage.REPARAMETRIZE for one in self.passes)

    def changes_numbers(self, step: str) -> bool:
        """Whether a step is to give other numbers than the user's own code, on purpose.

        Changes of units are lossless and probes only look; rules and formats change results.
        """
        rounds = (one.stage.rounds for one in self.passes if one.runs_in(step))
        return self.changes_function or any(rounds)

    def attach(self, owner: str) -> None:
        """Put the captured steps on the module; safe to call again for another owner."""
        if owner not in self._owners:
            self._owners.append(owner)
        self.module.__dict__[_ATTRIBUTE] = self
        for name, step in self.steps.items():
            self.module.__dict__[name] = step

    def detach(self, owner: str, *passes: GraphPass) -> None:
        """Take the owner's interest and passes away; the last one restores the module. Idempotent.

        Graphs captured so far stay until then, and with them what ``explain()`` says of them.
        """
        if owner in self._owners:
            self._owners.remove(owner)
        self.passes = [one for one in self.passes if one not in passes]
        self._observers.discard(owner)
        if self._owners or steps_of(self.module) is not self:
            return
        attributes = self.module.__dict__
        del attributes[_ATTRIBUTE]
        for name, step in self.steps.items():
            # Whoever has put something over it since takes it away himself.
            if attributes.get(name) is step:
                del attributes[name]
                if name in self._shadowed:
                    attributes[name] = self._shadowed[name]
        self.reset()

    def add_pass(self, one: GraphPass) -> None:
        """Add a pass; every graph is captured anew before its next run."""
        self.passes.append(one)
        self.reset()

    def use_executor(self, executor: Executor) -> None:
        """Run the graphs by another executor from now on."""
        if executor != self.executor:
            self.executor = executor
            self.reset()

    def partition_by(self, partition_fn: Any) -> None:
        """Split forward and backward graphs by ``partition_fn`` from now on, or as torch does.

        The eager executor, which leaves that to autograd, gives way to ``"aot_eager"``.
        """
        self.partition_fn = partition_fn
        if partition_fn is not None and self.executor == "eager":
            self.executor = "aot_eager"
        elif partition_fn is None and self.executor == "aot_eager":
            self.executor = "eager"
        self.reset()

    def reset(self) -> None:
        """Forget every captured graph."""
        self.records.clear()
        self.graph_breaks.clear()
        for step in self.steps.values():
            step.reset()

    def observe(self, owner: str, wanted: bool, *, always: bool = False) -> None:
        """Say whether ``owner`` wants the next steps to run the variant that carries probes.

        With ``always`` every step will, and the plain variant is never compiled.
        """
        self._always_observed |= always
        if wanted or always:
            self._observers.add(owner)
        else:
            self._observers.discard(owner)

    def variants(self) -> tuple[bool, ...]:
        """Which variants a compiled graph needs: plain, observed, or both."""
        if self._always_observed:
            return (True,)
        return (False, True) if any(one.observes for one in self.passes) else (False,)

    @property
    def observed(self) -> bool:
        """Whether anybody wants the next step to carry probes."""
        return bool(self._observers)

    def find_untraced(self) -> Calls:
        """Methods of objects that the next step shall call outside of Dynamo."""
        return () if self.untraced is None else self.untraced(self.module)

    def original(self, name: str) -> Callable[..., Any]:
        """The user's own method, unwrapped."""
        if name in self._shadowed:
            shadowed: Callable[..., Any] = self._shadowed[name]
            return shadowed
        method: Callable[..., Any] = getattr(type(self.module), name).__get__(self.module)
        return method

    @property
    def is_attached(self) -> bool:
        """Whether these are the steps that the module has now."""
        return steps_of(self.module) is self

    def explain(self) -> str:
        """A table of every pass over every graph, and the graph breaks with their reasons."""
        parts = [passes_table(self.records), breaks_list(self.graph_breaks)]
        parts += [text for one in self.passes if (text := one.report())]
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

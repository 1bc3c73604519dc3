"""What the captured steps of one module share: passes, executor, and who looks at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_unitscale.capture.side_effects import Calls
from lightning_unitscale.dynamo.capture import Executor
from lightning_unitscale.graph.passes import GraphPass, PassRecord, Phase

# Where a module has its captured steps.
ATTRIBUTE = "_captured_steps"


class StepSettings:
    """The settings that all captured steps of a module have in common.

    Args:
        module: The module.
        step_names: Methods that are captured.
        defer: Methods of the module whose calls are made after the step.
        untraced: Says which methods of which objects are no part of the model.

    Attributes:
        steps: The captured steps by name.
        passes: Passes over every graph, in the order they were given.
        records: What the passes did, graph by graph.
        graph_breaks: Reasons of the graph breaks met while capturing.
    """

    steps: Mapping[str, Any]

    def __init__(
        self,
        module: nn.Module,
        step_names: Sequence[str],
        *,
        defer: Sequence[str],
        untraced: Callable[[nn.Module], Calls] | None,
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

    @property
    def changes_function(self) -> bool:
        """Whether a pass makes the steps compute something else than the user's own code."""
        return any(graph_pass.phase is Phase.REPARAMETRIZE for graph_pass in self.passes)

    def changes_numbers(self, step: str) -> bool:
        """Whether a step is to give other numbers than the user's own code, on purpose.

        Changes of units are lossless and probes only look; rules and formats change results.
        """
        rounds = (graph_pass.phase.rounds for graph_pass in self.passes if graph_pass.runs_in(step))
        return self.changes_function or any(rounds)

    def add_pass(self, graph_pass: GraphPass) -> None:
        """Add a pass; every graph is recaptured before its next run."""
        self.passes.append(graph_pass)
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

        Args:
            owner: Name of the callback or transform.
            wanted: Whether it wants the next step to.
            always: Whether every step shall; the plain variant is then never compiled.
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
        return (False, True) if any(graph_pass.observes for graph_pass in self.passes) else (False,)

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
        return self.module.__dict__.get(ATTRIBUTE) is self


def not_to_be_pickled(module: nn.Module, step: str) -> TypeError:
    """The error of whoever pickles a module, or a step of it, as it is captured."""
    return TypeError(
        f"{type(module).__name__}.{step} is captured and cannot be pickled; expected a module "
        "without captured steps; save its state_dict() instead, or pickle the module before the "
        "callbacks or transforms are attached."
    )

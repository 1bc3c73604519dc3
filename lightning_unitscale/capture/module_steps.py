"""Capture the steps of a module, and let passes rewrite and an executor run their graphs.

Callbacks and transforms both use ``steps_of(module)``. Each adds its passes. The first owner
installs the captured steps on the module, and the last one removes them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from tabulate import tabulate
from torch import Tensor, nn

from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.dynamo_capture import unmarked
from lightning_unitscale.capture.executors import CompileMode, Executor, GraphRewriter
from lightning_unitscale.capture.module_state import ATTRIBUTE, ModuleState
from lightning_unitscale.capture.passes import GraphPass, PassRecord
from lightning_unitscale.capture.side_effects import Calls
from lightning_unitscale.patching import shadowed

EVALUATION_STEPS = ("validation_step", "test_step", "predict_step")
LIGHTNING_STEPS = ("training_step", *EVALUATION_STEPS)


def passes_table(records: Sequence[PassRecord]) -> str:
    """Format a table of every pass over every graph."""
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
    """List the graph breaks with their reasons, each once."""
    breaks = list(dict.fromkeys(graph_breaks))
    if not breaks:
        return "No graph breaks."
    lines = "\n".join(f"  {reason}" for reason in breaks)
    return f"{len(breaks)} graph breaks:\n{lines}\n  (TORCH_LOGS=graph_breaks shows more of each)"


def steps_of(module: nn.Module) -> ModuleSteps | None:
    """Return the captured steps of a module, or ``None`` if nothing was attached to it."""
    return module.__dict__.get(ATTRIBUTE)


class ModuleSteps(ModuleState):
    """Captured steps of one module with the passes that they share."""

    def __init__(
        self,
        module: nn.Module,
        step_names: Sequence[str],
        *,
        defer: Sequence[str] = (),
        untraced: Callable[[nn.Module], Calls] = lambda _: (),
    ) -> None:
        super().__init__(module, defer, untraced)
        self.owners: list[str] = []
        self._put = ExitStack()
        self._shadowed = {
            name: module.__dict__[name] for name in step_names if name in module.__dict__
        }
        self.steps = {name: CapturedStep(self, name, self.original(name)) for name in step_names}

    def attach(self, owner: str) -> None:
        """Install the captured steps on the module. Other owners may call this again."""
        if owner not in self.owners:
            self.owners.append(owner)
        if not self.is_attached:
            self._put.enter_context(unmarked(self.module))
            self._put.enter_context(shadowed(self.module, **{ATTRIBUTE: self}, **self.steps))

    def keep(self, context: AbstractContextManager[Any]) -> None:
        """Stay within a context until the last owner detaches the steps."""
        self._put.enter_context(context)

    def detach(self, owner: str, *passes: GraphPass) -> None:
        """Remove the owner's passes. The last owner restores the module. Idempotent."""
        if owner in self.owners:
            self.owners.remove(owner)
        self.passes = [graph_pass for graph_pass in self.passes if graph_pass not in passes]
        self._observers.discard(owner)
        if not self.owners:
            self._put.close()
            self.reset()

    def add_pass(self, graph_pass: GraphPass) -> None:
        """Add a pass. Every graph is recaptured before its next run."""
        self.passes.append(graph_pass)
        self.reset()

    def use_executor(self, executor: Executor, mode: CompileMode | None = None) -> None:
        """Run the graphs by another executor from now on."""
        mode = mode or self.compile_mode
        if (executor, mode) != (self.executor, self.compile_mode):
            self.executor, self.compile_mode = executor, mode
            self.reset()

    def see_uncaptured(self, read: Sequence[Tensor], *, in_step: bool) -> None:
        """Let the passes check the operands of a matmul outside the graphs."""
        if not any(one.is_rehearsing for one in self.steps.values()):
            for graph_pass in self.passes:
                graph_pass.see_uncaptured(self.module, read, in_step=in_step)

    def partition_by(self, partition_fn: Any) -> None:
        """Split forward and backward graphs by ``partition_fn`` from now on, or as torch does."""
        self.partition_fn = partition_fn
        # The eager executor leaves that to autograd.
        if partition_fn is not None and self.executor == "eager":
            self.executor = "aot_eager"
        elif partition_fn is None and self.executor == "aot_eager":
            self.executor = "eager"
        self.reset()

    def rewrite_by(self, rewriter: GraphRewriter | None) -> None:
        """Rewrite AOTAutograd's graphs from now on, or leave them unchanged."""
        self.rewriter = rewriter
        self.reset()

    def reset(self) -> None:
        """Forget every captured graph."""
        self.records.clear()
        self.graph_breaks.clear()
        for step in self.steps.values():
            step.reset()

    def original(self, name: str) -> Callable[..., Any]:
        """Return the user's own method, unwrapped."""
        if name in self._shadowed:
            return self._shadowed[name]
        return getattr(type(self.module), name).__get__(self.module)

    def explain(self) -> str:
        """Format a table of every pass over every graph, and the graph breaks with reasons."""
        parts = [passes_table(self.records), breaks_list(self.graph_breaks)]
        parts += [text for graph_pass in self.passes if (text := graph_pass.report())]
        return "\n\n".join(parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleSteps:
        """Return a copy for the copied module, with the same passes and nothing captured yet."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        vars(new).update(
            vars(self), records=[], graph_breaks=[], owners=list(self.owners), _put=ExitStack()
        )
        new.rewriter = None  # set by the copy's own session, if it gets one
        new._observers = set(self._observers)
        for name in ("module", "partition_fn", "passes", "_shadowed"):
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        new.steps = {name: CapturedStep(new, name, new.original(name)) for name in self.steps}
        for name, step in self.steps.items():
            memo[id(step)] = new.steps[name]
        for name, step in self.steps.items():
            new.steps[name].before_call = copy.deepcopy(step.before_call, memo)
        if self.is_attached:
            # The module's copy may be only an empty shell yet.
            vars(new.module).update(new._shadowed)
            new._put.enter_context(shadowed(new.module, **{ATTRIBUTE: new}, **new.steps))
        return new

    def __reduce__(self) -> Any:
        raise self.not_to_be_pickled(next(iter(self.steps)))

"""A module's steps, captured, rewritten by passes, run by an executor, and what is said of them.

``steps_of(module)`` is the one place where callbacks and transforms meet: each adds its passes, and
whoever comes first puts the captured steps on the module, whoever leaves last takes them off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from tabulate import tabulate
from torch import nn

from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.sharded import ShardedModule
from lightning_unitscale.capture.side_effects import Calls
from lightning_unitscale.dynamo.breaks import Reason, is_watched
from lightning_unitscale.dynamo.capture import no_graph_breaks, unmarked
from lightning_unitscale.dynamo.executors import CompileMode, Executor, GraphRewriter
from lightning_unitscale.graph.passes import GraphPass, PassRecord, Phase
from lightning_unitscale.patching import nothing, shadowed

# Where a module has its captured steps.
ATTRIBUTE = "_captured_steps"
EVALUATION_STEPS = ("validation_step", "test_step", "predict_step")
LIGHTNING_STEPS = ("training_step", *EVALUATION_STEPS)


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


def steps_of(module: nn.Module) -> ModuleSteps | None:
    """The captured steps of a module, or ``None`` when nothing was attached to it."""
    return module.__dict__.get(ATTRIBUTE)


class ModuleSteps:
    """The captured steps of one module with the passes that all of them share."""

    def __init__(
        self,
        module: nn.Module,
        step_names: Sequence[str],
        *,
        defer: Sequence[str] = (),
        untraced: Callable[[nn.Module], Calls] = lambda _: (),
    ) -> None:
        self.module = module
        self.defer = tuple(defer)
        self.untraced = untraced
        self.executor: Executor = "eager"
        self.compile_mode: CompileMode = "default"
        self.partition_fn: Any = None
        # Rewrites what AOTAutograd makes of the graphs, if they run op by op.
        self.rewriter: GraphRewriter | None = None
        # The module, if its steps are captured as those of a whole one.
        self.sharded: ShardedModule | None = None
        self.passes: list[GraphPass] = []
        self.records: list[PassRecord] = []
        self.graph_breaks: list[Reason] = []
        self.say: Callable[[str], None] = nothing
        self.owners: list[str] = []
        self._observers: set[str] = set()
        self._always_observed = False
        self._put = ExitStack()
        self._shadowed = {
            name: module.__dict__[name] for name in step_names if name in module.__dict__
        }
        self.steps = {name: CapturedStep(self, name) for name in step_names}

    def attach(self, owner: str) -> None:
        """Put the captured steps on the module; safe to call again for another owner."""
        if owner not in self.owners:
            self.owners.append(owner)
        if not self.is_attached:
            self._put.enter_context(unmarked(self.module))
            self._put.enter_context(shadowed(self.module, **{ATTRIBUTE: self}, **self.steps))

    def keep(self, context: AbstractContextManager[Any]) -> None:
        """Stay within a context until the last owner detaches the steps."""
        self._put.enter_context(context)

    def detach(self, owner: str, *passes: GraphPass) -> None:
        """Take the owner's passes away; the last owner restores the module. Idempotent."""
        if owner in self.owners:
            self.owners.remove(owner)
        self.passes = [graph_pass for graph_pass in self.passes if graph_pass not in passes]
        self._observers.discard(owner)
        if not self.owners:
            self._put.close()
            self.reset()

    @property
    def changes_function(self) -> bool:
        """Whether a pass makes the steps compute something else than the user's own code."""
        return any(graph_pass.phase is Phase.REPARAMETRIZE for graph_pass in self.passes)

    def add_pass(self, graph_pass: GraphPass) -> None:
        """Add a pass; every graph is recaptured before its next run."""
        self.passes.append(graph_pass)
        self.reset()

    def use_executor(self, executor: Executor, mode: CompileMode | None = None) -> None:
        """Run the graphs by another executor from now on."""
        mode = mode or self.compile_mode
        if (executor, mode) != (self.executor, self.compile_mode):
            self.executor, self.compile_mode = executor, mode
            self.reset()

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
        """Have what AOTAutograd makes of the graphs rewritten from now on, or left as it is."""
        self.rewriter = rewriter
        self.reset()

    def reset(self) -> None:
        """Forget every captured graph."""
        self.records.clear()
        self.graph_breaks.clear()
        for step in self.steps.values():
            step.reset()

    def observe(self, owner: str, wanted: bool, *, always: bool = False) -> None:
        """Say whether ``owner`` wants the next steps to run the variant that carries probes."""
        self._always_observed |= always
        if wanted or always:
            self._observers.add(owner)
        else:
            self._observers.discard(owner)

    def variants(self) -> tuple[bool, ...]:
        """Which variants a compiled graph needs: plain, observed, or both."""
        if self._always_observed:
            return (True,)
        has_probes = any(graph_pass.phase is Phase.OBSERVE for graph_pass in self.passes)
        return (False, True) if has_probes else (False,)

    @property
    def observed(self) -> bool:
        """Whether anybody wants the next step to carry probes."""
        return bool(self._observers)

    def gathered(self) -> AbstractContextManager[None]:
        """Within this context a rehearsal finds whole parameters; all ranks enter it together."""
        return nullcontext() if self.sharded is None else self.sharded.gathered()

    def shard(self) -> None:
        """Let the module have the parameters that its optimizers have."""
        if self.sharded is not None:
            self.sharded.shard()

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Within this context a step runs of which only graphs know where parameters are."""
        if self.sharded is None:
            yield
            return
        if is_watched():
            raise RuntimeError(
                f"{type(self.module).__name__}: a mode such as FlopCounterMode looks at every "
                "operation of a step that is unit-scaled by rules with ModelParallelStrategy, and "
                "Dynamo captures nothing then; expected none; leave it out, or use DDP."
            )
        with self.sharded.standing_in(), no_graph_breaks():
            yield

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

    def explain(self) -> str:
        """A table of every pass over every graph, and the graph breaks with their reasons."""
        parts = [passes_table(self.records), breaks_list(self.graph_breaks)]
        parts += [text for graph_pass in self.passes if (text := graph_pass.report())]
        return "\n\n".join(parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleSteps:
        """A copy for the copied module: the same passes, nothing captured yet."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        vars(new).update(
            vars(self), records=[], graph_breaks=[], owners=list(self.owners), _put=ExitStack()
        )
        new.rewriter = None  # of the copy's own session, if it gets one
        new._observers = set(self._observers)
        for name in ("module", "partition_fn", "passes", "_shadowed"):
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        new.steps = {name: CapturedStep(new, name) for name in self.steps}
        for name, step in self.steps.items():
            memo[id(step)] = new.steps[name]
        for name, step in self.steps.items():
            new.steps[name].before_call = copy.deepcopy(step.before_call, memo)
        if self.is_attached:
            # Of the module's copy, only an empty shell may be there as yet.
            vars(new.module).update(new._shadowed)
            new._put.enter_context(shadowed(new.module, **{ATTRIBUTE: new}, **new.steps))
        return new

    def __reduce__(self) -> Any:
        raise self.not_to_be_pickled(next(iter(self.steps)))

    def not_to_be_pickled(self, step: str) -> TypeError:
        """The error of whoever pickles the module, or a step of it."""
        return TypeError(
            f"{type(self.module).__name__}.{step} is captured and cannot be pickled; expected a "
            "module without captured steps; save its state_dict() instead, or pickle the module "
            "before the callbacks or transforms are attached."
        )

"""Share passes and executors between all captured steps of a module, and count their captures.

A step that needs too many captures is no longer captured, if it computes the same uncaptured.
Dynamo may cut one call into dozens of graphs, or recapture a graph at most calls. Each takes about
a second, and so does the plan of a memory budget. A step whose captured numbers differ (by rules,
in a format) is captured each time.

A step is captured a second time if its first call has removed the reason for its break. Libraries
install hooks under a lock, fill caches, or make tensors when a module is first called. Dynamo
cannot trace that and captures the step in parts, though every later call is one graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch import nn

from lightning_unitscale.capture import dynamo_capture as capture
from lightning_unitscale.capture.breaks import Reason, is_watched, last_recapture
from lightning_unitscale.capture.executors import CompileMode, Executor, GraphRewriter
from lightning_unitscale.capture.fsdp_modules import ShardedModule
from lightning_unitscale.capture.passes import GraphPass, PassRecord, Phase
from lightning_unitscale.capture.side_effects import Calls
from lightning_unitscale.patching import nothing

ATTRIBUTE = "_captured_steps"  # attribute of a module for its captured steps
# A step is given up after this many calls that captured something, torch.compile's limit.
MANY_CAPTURES = 8
MANY_GRAPHS = 32  # maximum number of graphs of one call


class ModuleState:
    """Passes of a module, how its graphs run, and the records of the passes."""

    def __init__(
        self, module: nn.Module, defer: Sequence[str], untraced: Callable[[nn.Module], Calls]
    ) -> None:
        self.module = module
        self.defer = tuple(defer)
        self.untraced = untraced
        self.executor: Executor = "eager"
        self.compile_mode: CompileMode = "default"
        self.partition_fn: Any = None
        # Rewrites AOTAutograd's graphs, if they run op by op.
        self.rewriter: GraphRewriter | None = None
        # The module, if FSDP shards it but its steps are captured as if it were unsharded.
        self.sharded: ShardedModule | None = None
        self.passes: list[GraphPass] = []
        self.records: list[PassRecord] = []
        self.graph_breaks: list[Reason] = []
        self.say: Callable[[str], None] = nothing
        self.stays_plain = ""  # why no step may be captured, if there is a reason
        self.is_running = False  # True while a step runs, which includes the steps that it calls
        self._observers: set[str] = set()
        self._always_observed = False

    @property
    def is_attached(self) -> bool:
        """Check whether the module has these steps now."""
        return self.module.__dict__.get(ATTRIBUTE) is self

    @property
    def changes_function(self) -> bool:
        """Check whether a pass makes the steps compute something else than the user's own code."""
        return any(graph_pass.phase is Phase.REPARAMETRIZE for graph_pass in self.passes)

    def observe(self, owner: str, wanted: bool, *, always: bool = False) -> None:
        """Note whether ``owner`` wants the next steps to run the variant with probes."""
        self._always_observed |= always
        if wanted or always:
            self._observers.add(owner)
        else:
            self._observers.discard(owner)

    @property
    def observed(self) -> bool:
        """Check whether any owner wants the next step to have probes."""
        return bool(self._observers)

    def variants(self) -> tuple[bool, ...]:
        """Return the variants that a compiled graph needs: unobserved, observed, or both."""
        if self._always_observed:
            return (True,)
        has_probes = any(graph_pass.phase is Phase.OBSERVE for graph_pass in self.passes)
        return (False, True) if has_probes else (False,)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Run a step whose whole parameters exist only in its graphs."""
        if self.sharded is None:
            yield
            return
        if is_watched():
            raise RuntimeError(
                f"{type(self.module).__name__}: a mode such as FlopCounterMode observes every "
                "operation of a step that is unit-scaled by rules with ModelParallelStrategy, and "
                "Dynamo captures nothing then. Leave that mode out, or use DDP."
            )
        with self.sharded.standing_in(), capture.no_graph_breaks():
            yield

    def not_to_be_pickled(self, step: str) -> TypeError:
        """Return the error for pickling the module, or a step of it."""
        return TypeError(
            f"{type(self.module).__name__}.{step} is captured and cannot be pickled. Expected a "
            "module without captured steps. Save its state_dict() instead, or pickle the module "
            "before the callbacks or transforms are attached."
        )


class Recaptures:
    """Counter of a step's captures."""

    is_limited = False  # True if a rehearsed call may be refused

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start the count at nothing captured."""
        self._num_calls = self._num_captures = 0
        self.num_graphs = 0  # functions of the current call
        self._functions: Counter[CodeType] = Counter()

    def note_function(self, code: CodeType) -> str | None:
        """Count a function that Dynamo is about to capture."""
        self._functions[code] += 1
        if self.num_graphs < MANY_GRAPHS:
            return None
        return f"it is cut into more than {MANY_GRAPHS} graphs"

    def near_limit(self) -> list[CodeType]:
        """Return the functions, if one of them nears Dynamo's limit of captures."""
        most = max(self._functions.values(), default=0)
        if most < max(1, capture.RECOMPILE_LIMIT // 2):
            return []
        return [*self._functions]

    def after_call(self, *, has_captured: bool) -> str | None:
        """Count a call of the step, and return why it should no longer be captured, if so."""
        self._num_calls += 1
        self._num_captures += has_captured
        if self._num_captures < MANY_CAPTURES or 4 * self._num_captures <= 3 * self._num_calls:
            return None
        ((function, _),) = self._functions.most_common(1)
        return (
            f"it was captured again in {self._num_captures} of its first {self._num_calls} calls, "
            f"since {last_recapture(function) or 'something that it reads'} has changed each time"
        )


class SecondCapture:
    """Decides once per step whether it is captured again."""

    # Steps with passes never are, since measurements and units refer to their parts.

    def __init__(self, owner: ModuleState) -> None:
        self._owner = owner
        self._has_looked = False
        self.is_due = False  # True if the next call is recaptured as one graph

    def look(self, graph_breaks: list[Reason], trace: Callable[[], object]) -> None:
        """Trace the finished call again, if it broke, to check whether it is one graph now."""
        if not self._may_come or not graph_breaks:
            return
        self._has_looked = True
        try:
            trace()
            self.is_due = True
        except Exception:
            pass  # it breaks in the same way as before
        if not self.is_due:
            getattr(self._owner.partition_fn, "refuse", nothing)()

    def begin(self, graph_breaks: list[Reason]) -> bool:
        """Return whether the starting call is one graph, so that its parts are forgotten."""
        begin_call = getattr(self._owner.partition_fn, "begin_call", nothing)
        begin_call(puts_off=self._may_come, is_captured_again=self.is_due)
        if not self.is_due:
            return False
        self.is_due = False
        for graph_break in graph_breaks:
            self._owner.graph_breaks.remove(graph_break)
        return True

    @property
    def _may_come(self) -> bool:
        """Check whether a call that breaks is traced once more."""
        return not self._has_looked and not self._owner.passes

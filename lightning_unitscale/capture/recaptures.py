"""Stop capturing a step that costs too many captures, if it computes the same uncaptured.

Dynamo may cut one call into dozens of graphs, or recapture a graph at most calls. Each takes about
a second, and so does the plan of a memory budget. A step whose captured numbers differ (by rules,
in a format) is captured each time.

A step is captured a second time if its first call has removed the reason for its break. Libraries
install hooks under a lock, fill caches, or make tensors when a module is first called. Dynamo
cannot trace that and captures the step in parts, though every later call is one graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import CodeType

from lightning_unitscale.capture import dynamo_capture as capture
from lightning_unitscale.capture.breaks import Reason, last_recapture
from lightning_unitscale.capture.module_state import ModuleState
from lightning_unitscale.patching import nothing

# A step is given up after this many calls that captured something, torch.compile's limit.
MANY_CAPTURES = 8
# Maximum number of graphs of one call.
MANY_GRAPHS = 32


class Recaptures:
    """Counter of a step's captures."""

    is_limited = False  # whether a rehearsed call may be refused

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start the count at nothing captured."""
        self._num_calls = self._num_captures = 0
        self.num_graphs = 0  # of the current call
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
            f"it was captured anew in {self._num_captures} of its first {self._num_calls} calls, "
            f"since {last_recapture(function) or 'something that it reads'} has changed each time"
        )


class SecondCapture:
    """Decision, once per step, whether it is captured again.

    Steps with passes never are, since measurements and units refer to their parts.
    """

    def __init__(self, owner: ModuleState) -> None:
        self._owner = owner
        self._has_looked = False
        self.is_due = False  # the next call is recaptured, as one graph

    def look(self, graph_breaks: list[Reason], trace: Callable[[], object]) -> None:
        """Trace the finished call again, if it broke, to check whether it is one graph now."""
        if not self._may_come or not graph_breaks:
            return
        self._has_looked = True
        try:
            trace()
            self.is_due = True
        except Exception:
            pass  # it breaks as before
        if not self.is_due:
            getattr(self._owner.partition_fn, "refuse", nothing)()

    def begin(self, graph_breaks: list[Reason]) -> bool:
        """Return whether the starting call is one graph, so that its parts are forgotten."""
        partition_fn = self._owner.partition_fn
        getattr(partition_fn, "put_off_refusals", nothing)(self._may_come)
        if not self.is_due:
            return False
        self.is_due = False
        for graph_break in graph_breaks:
            self._owner.graph_breaks.remove(graph_break)
        getattr(partition_fn, "forget_plans", nothing)()
        return True

    @property
    def _may_come(self) -> bool:
        """Check whether a call that breaks is traced once more."""
        return not self._has_looked and not self._owner.passes

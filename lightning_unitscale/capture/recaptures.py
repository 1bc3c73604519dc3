"""A step that costs too many captures runs as it is, if that is the same computation.

Dynamo may cut one call into dozens of graphs, or capture a graph anew at most calls. Each takes
about a second, and the plan of a memory budget with it. If the step computes other numbers captured
than as it is (by rules, in a format), it is captured each time.

A step is captured a second time if its first call has removed the reason why it broke. Libraries
install hooks under a lock, fill caches, or make tensors when a module is first called. Dynamo does
not trace that and captures the step in parts, though every later call is one graph.
"""

from __future__ import annotations

from collections import Counter
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from lightning_unitscale.dynamo import capture
from lightning_unitscale.dynamo.breaks import last_recapture
from lightning_unitscale.graph.nodes import Names
from lightning_unitscale.patching import nothing, shadowed

if TYPE_CHECKING:
    from lightning_unitscale.capture.captured_step import CapturedStep

# Calls that captured something, after which a step is given up. torch.compile's limit is as large.
MANY_CAPTURES = 8
# Graphs that one call may be cut into.
MANY_GRAPHS = 32


class Recaptures:
    """Counts what is captured of a step."""

    is_limited = False  # whether a call that is rehearsed may be refused

    def __init__(self, step: CapturedStep) -> None:
        self._step = step
        self.reset()

    def reset(self) -> None:
        """Begin to count: nothing is captured."""
        self._num_calls = self._num_captures = 0
        self.num_graphs = 0  # of the current call
        self._functions: Counter[CodeType] = Counter()

    def note_function(self, code: CodeType) -> str | None:
        """Count a function that Dynamo is about to capture."""
        self._functions[code] += 1
        if self.num_graphs < MANY_GRAPHS:
            return None
        return f"it is cut into more than {MANY_GRAPHS} graphs"

    def before_call(self) -> None:
        """Forget what was captured before Dynamo, past its limit, runs more of it as it is."""
        most = max(self._functions.values(), default=0)
        if most < max(1, capture.RECOMPILE_LIMIT // 2):
            return
        messages = self._step.messages
        functions, has_warned = [*self._functions], messages.has_warned
        self._step.forget()
        capture.forget_code(functions)
        messages.has_warned = has_warned

    def after_call(self, *, has_captured: bool) -> None:
        """Decide whether the step is still captured."""
        self._num_calls += 1
        self._num_captures += has_captured
        if self._num_captures < MANY_CAPTURES or 4 * self._num_captures <= 3 * self._num_calls:
            return
        ((function, _),) = self._functions.most_common(1)
        reason = (
            f"it was captured anew in {self._num_captures} of its first {self._num_calls} calls, "
            f"since {last_recapture(function) or 'something that it reads'} has changed each time"
        )
        step = self._step
        if step.owner.changes_function:
            step.messages.warn_of_captures(reason)
        elif torch.is_grad_enabled():
            step.fallback.stay_plain(reason)


class SecondCapture:
    """Decides once for each step whether it is captured anew.

    Steps with passes never are: measurements and units refer to their parts.
    """

    def __init__(self, step: CapturedStep) -> None:
        self._step = step
        self._has_looked = False
        self.is_due = False  # the next call is captured anew, as one graph

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace the call that has ended again, if it broke, to see whether it is one graph now."""
        if not self._may_come or not self._step.graph_breaks:
            return
        self._has_looked = True
        anew = capture.with_own_code(self._step.__wrapped__)
        num_graph_calls = self._step.num_graph_calls
        with shadowed(self._step, names=Names(), graphs=[]):
            try:
                self._step.stop_at_graph(anew, args, kwargs)
                self.is_due = True
            except Exception:
                pass  # it breaks as before
        self._step.num_graph_calls = num_graph_calls
        if not self.is_due:
            getattr(self._step.owner.partition_fn, "refuse", nothing)()

    def begin(self) -> None:
        """Forget the parts if the call that begins is one graph."""
        partition_fn = self._step.owner.partition_fn
        getattr(partition_fn, "put_off_refusals", nothing)(self._may_come)
        if not self.is_due:
            return
        self.is_due = False
        owner = self._step.owner
        for graph_break in self._step.graph_breaks:
            owner.graph_breaks.remove(graph_break)
        self._step.forget()
        getattr(partition_fn, "forget_plans", nothing)()

    @property
    def _may_come(self) -> bool:
        """Whether a call that breaks is looked at once more."""
        return not self._has_looked and not self._step.owner.passes

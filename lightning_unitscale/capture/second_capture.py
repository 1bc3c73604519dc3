"""A step is captured once more if its first call has removed the reason why it broke.

Libraries install hooks under a lock, fill caches, or make tensors when a module is first called.
Dynamo does not trace that and captures the step in parts, though every later call is one graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_unitscale.dynamo import capture
from lightning_unitscale.graph.nodes import Names
from lightning_unitscale.patching import nothing, shadowed

if TYPE_CHECKING:
    from lightning_unitscale.capture.captured_step import CapturedStep


class SecondCapture:
    """Decides once for each step whether it is captured anew.

    Steps with passes never are: measurements and units refer to their parts.

    Attributes:
        is_due: Whether the next call is captured anew, as one graph.
    """

    def __init__(self, step: CapturedStep) -> None:
        self._step = step
        self._has_looked = False
        self.is_due = False

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace the call that has ended, if it broke, to see whether it is one graph now.

        Nothing of it runs again.
        """
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

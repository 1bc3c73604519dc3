"""The partitioner of a module's captured steps: knows the module, and what else is in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_unitscale.graph.graph_breaks import num_graph_breaks
from lightning_unitscale.remat.budget import Budget
from lightning_unitscale.remat.partitioner import RematPartitioner
from lightning_unitscale.remat.planner import Planner, RematPlan
from lightning_unitscale.remat.report import RematReport
from lightning_unitscale.remat.resident import gradient_bytes, module_bytes


class Granted:
    """The most bytes that the graphs of a run were granted of a fraction.

    Of a fraction a smaller last batch would have fewer bytes than its parameters leave: it gets
    those that an earlier graph was granted, which the run takes anyway.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def limit(self, own: int, floor: Callable[[], int]) -> int:
        """The limit of a graph; noted for later ones.

        Args:
            own: The fraction of the graph's own peak.
            floor: The least bytes that a plan of it needs; asked for where it matters.
        """
        if own < self._bytes and own < floor():
            return self._bytes
        self._bytes = max(self._bytes, own)
        return own


class StepPartitioner(RematPartitioner):
    """Plans every graph of a module's steps and keeps the reports.

    Args:
        budget: As of :class:`RematPartitioner`.
        module: The module.
        around: Bytes beside the module's own: alive throughout, and in the forward pass only.

    Attributes:
        reports: What was planned, graph by graph in the order of capture.

    Raises:
        ValueError: When a step turns out to be several graphs and the budget is in bytes.
    """

    def __init__(
        self,
        budget: Budget,
        module: nn.Module,
        around: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        super().__init__(budget, resident=self._resident, on_plan=self._keep)
        self.reports: list[RematReport] = []
        self._module = module
        self._around = around
        self._granted = Granted()
        self.begin_step()

    def begin_step(self) -> None:
        """What is captured from here on belongs to one step; called before each."""
        self._breaks_before = num_graph_breaks()
        self._kept_bytes = self._static_bytes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> StepPartitioner:
        """One for the copied module; what its callback knows is not taken along."""
        module = memo.get(id(self._module), self._module)
        return StepPartitioner(self.budget, module)

    def table(self) -> str:
        """The reports as text."""
        if not self.reports:
            return "Nothing has been planned yet: run a step with gradients."
        return "\n\n".join(f"graph {i}\n{one.table()}" for i, one in enumerate(self.reports))

    def choose(self, planner: Planner) -> RematPlan:
        """The plan of one graph."""
        if isinstance(self.budget, float):
            own = int(self.budget * planner.default.peak_bytes)
            limit = self._granted.limit(own, lambda: planner.floor.peak_bytes)
            if limit != own:
                return planner.plan(limit)
        return super().choose(planner)

    def _resident(self, static_bytes: int) -> tuple[int, int]:
        breaks = num_graph_breaks() > self._breaks_before
        if isinstance(self.budget, int) and breaks:
            raise ValueError(
                f"budget={self.budget!r}: the step breaks into several graphs, which are planned "
                "one by one, so that bytes cannot be promised for all of them together; expected a "
                "step that is captured whole, or a fraction such as budget=0.6, which holds for "
                "each graph; explain() shows where it breaks."
            )
        always, forward = self._around()
        # The graphs before this one in a step keep theirs until their own backward passes.
        always += self._kept_bytes
        self._static_bytes += static_bytes
        if breaks and forward:
            # Its backward pass meets the gradients of the graphs after it.
            later = max(0, gradient_bytes(self._module) - self._static_bytes)
            always, forward = always + later, forward - later
        return always + max(0, module_bytes(self._module) - static_bytes), forward

    def _keep(self, plan: RematPlan) -> None:
        self._kept_bytes += plan.saved_bytes
        self.reports.append(RematReport.of(plan))

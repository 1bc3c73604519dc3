"""Plan steps of many graphs within a budget, by a measurement of one whole step.

FSDP splits the step into one graph per module and gathers parameters outside those graphs. So the
first steps run with the plans that keep the least, and one step is measured from graph to graph.
Each graph shows by how many bytes its other plans differ.

Gathered parameters are inputs of a graph. A plan may keep them, or views of them, for the backward
pass as autograd does. FSDP frees their storage in between, and refills it before.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from lightning_unitscale.capture.graph_nodes import first_operation
from lightning_unitscale.memory.budgets import Budget, limit_of, refusal
from lightning_unitscale.memory.partitioner import RematPartitioner, limit_reach
from lightning_unitscale.memory.planner import Planner
from lightning_unitscale.memory.problem import Ints, Mask, NodeRegion, RematProblem
from lightning_unitscale.memory.real_memory import PeakMeter
from lightning_unitscale.memory.remat_plan import RematPlan, RematReport, reports_table
from lightning_unitscale.memory.schedule import input_bytes
from lightning_unitscale.scales.layout import Direction

Boundary = tuple[str, Direction, bool]
"""Name of a graph, its pass, and whether the boundary is the end of the pass."""
Parts = Sequence[tuple[Boundary | None, int]]
"""Peaks of a step between boundaries, each with the boundary at its end."""
_NUM_PLANS = 16


@dataclass(frozen=True)
class Choice:
    """Plan of a graph, in bytes relative to the plan that was measured."""

    plan: RematPlan
    held_bytes: int  # from the forward pass of the graph to its backward pass
    forward_bytes: int  # at the peak of its forward pass
    backward_bytes: int  # at the peak of its backward pass


@dataclass(frozen=True)
class GraphChoices:
    """Plans of one graph of many."""

    least: Choice
    default: Choice
    all: tuple[Choice, ...]


def graph_choices(planner: Planner, parameters: Mask, *, min_cut: bool = False) -> GraphChoices:
    """Return the plans of a graph whose nodes ``parameters`` are parameters."""
    problem = planner.problem
    given = problem.region == NodeRegion.INPUT
    given[problem.base[list(problem.forward_outputs)]] = True

    def of_caller(plan: RematPlan) -> Mask:
        """Return the storages that a plan keeps, and that the caller also holds for a while."""
        kept = np.zeros(len(problem), dtype=np.bool_)
        kept[problem.base[plan.saved]] = True
        return kept & given & ~parameters

    def order(plan: RematPlan) -> tuple[float, ...]:
        held = plan.saved_bytes + int(problem.num_bytes[of_caller(plan)].sum())
        return held, plan.peak_bytes, plan.seconds

    plans = [planner.min_cut] if min_cut else planner.tried(_NUM_PLANS)
    least = min(plans, key=order)

    def choice(plan: RematPlan) -> Choice:
        # The caller may drop its own values or not, so only newly kept values are counted.
        recreated = int(problem.num_bytes[of_caller(plan) & ~of_caller(least)].sum())
        held = plan.saved_bytes - least.saved_bytes + recreated
        (forward, backward), (before, after) = _peaks(plan), _peaks(least)
        return Choice(plan, held, forward - before, backward - after + recreated)

    return GraphChoices(choice(least), choice(planner.default), tuple(map(choice, plans)))


def _peaks(plan: RematPlan) -> tuple[int, int]:
    """Return the peaks of the forward and of the backward pass in bytes."""
    forward, backward = np.split(plan.timeline.live_bytes, [plan.timeline.num_forward])
    floor = input_bytes(plan.problem)
    return int(forward.max(initial=floor)), int(backward.max(initial=floor))


class StepPeaks:
    """Measured step, and its peak with other plans."""

    def __init__(self, parts: Parts, graphs: Mapping[str, GraphChoices]) -> None:
        self.calls: Counter[str] = Counter()  # of each graph
        peaks: dict[tuple[Any, ...], int] = {}
        # Graphs whose backward pass is still to come, and the running one.
        waiting: Counter[str] = Counter()
        running: tuple[str, Direction] | None = None
        for boundary, peak in parts:
            where = (tuple(sorted((+waiting).items())), running)
            peaks[where] = max(peaks.get(where, 0), peak)
            if boundary is None:
                continue
            graph, direction, is_end = boundary
            running = None if is_end else (graph, direction)
            if is_end and direction == "forward":
                waiting[graph] += 1
                self.calls[graph] += 1
            elif not is_end and direction == "backward":
                waiting[graph] -= 1
        self.graphs = {name: graph for name, graph in graphs.items() if name in self.calls}
        # The plans of the measured step, those that recompute nothing, and all.
        self.measured = {name: graph.least for name, graph in self.graphs.items()}
        self.default = {name: graph.default for name, graph in self.graphs.items()}
        self._all = [(name, each) for name, graph in self.graphs.items() for each in graph.all]
        names = list(self.graphs)
        self._peaks = np.array(list(peaks.values()), dtype=np.int64)
        # How often a plan's added bytes are alive: held, in the forward pass, in the backward pass.
        self._times = np.zeros((len(peaks), 3, len(names)), dtype=np.int64)
        for row, (held, active) in enumerate(peaks):
            for graph, count in held:
                self._times[row, 0, names.index(graph)] = count
            if active is not None:
                graph, direction = active
                self._times[row, 1 if direction == "forward" else 2, names.index(graph)] = 1

    def peak_bytes(self, choices: Mapping[str, Choice]) -> int:
        """Return the peak of the step with a plan for each graph."""
        rows = [(c.held_bytes, c.forward_bytes, c.backward_bytes) for c in choices.values()]
        added = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        peaks: Ints = self._peaks + (self._times * added).sum((1, 2))
        return int(peaks.max(initial=0))

    @cached_property
    def lowest(self) -> dict[str, Choice]:
        """Return the plans with the lowest peak that is found."""
        chosen = self.measured
        while True:
            others = ({**chosen, name: choice} for name, choice in self._all)
            best = min(others, key=self.peak_bytes, default=chosen)
            if self.peak_bytes(best) >= self.peak_bytes(chosen):
                return chosen
            chosen = best

    def fastest(self, limit: int) -> dict[str, Choice]:
        """Return plans within a limit that is not below the lowest. None could be faster alone."""
        # Plans that save the most time per byte at the peak come first.
        if self.peak_bytes(self.default) <= limit:
            return self.default
        chosen = self.lowest
        while True:
            peak = self.peak_bytes(chosen)
            faster = [
                (self.calls[name] * saved / max(grown - peak, 1), {**chosen, name: choice})
                for name, choice in self._all
                if (saved := chosen[name].plan.seconds - choice.plan.seconds) > 0
                and (grown := self.peak_bytes({**chosen, name: choice})) <= limit
            ]
            if not faster:
                return chosen
            _, chosen = max(faster, key=lambda found: found[0])


class MeasuredPartitioner(RematPartitioner):
    """Partitioner that plans the graphs of a step together once a whole step has been measured.

    Until then the graphs have the plans that keep the least. So do graphs that are captured later
    and were not measured, such as those for a batch of another size.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        self.meter: PeakMeter | None = None  # notified of the ends of graphs
        self.reports: list[RematReport] = []  # of each graph, with the predicted peak of the step
        self.is_planned = False
        self.graphs: dict[str, GraphChoices] = {}  # captured ones, until they are planned
        # By the graph, for all of its sizes.
        self._plans: dict[str, list[RematPlan]] = defaultdict(list)
        self._largest = 0
        self._num_later = 0
        self._name = ""

    def table(self) -> str:
        """Return the reports as text."""
        if not self.is_planned:
            return self.given_up or "Nothing is planned yet: one of the first steps is measured."
        later = (
            f"{self._num_later} captured later, for batches of other sizes, use the smallest plans"
        )
        return reports_table(self.reports) + (f"\n\n{later}" if self._num_later else "")

    def __call__(
        self, gm: fx.GraphModule, *args: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph of a joint graph."""
        forward, backward = super().__call__(gm, *args, **kwargs)
        if not self.is_planned:
            self._add_boundaries(forward, "forward")
            self._add_boundaries(backward, "backward")
        return forward, backward

    def choose(self, planner: Planner) -> RematPlan:
        """Return the plan of one graph."""
        problem = planner.problem
        real = [self.inputs.get(node.name) for node in problem.nodes]
        # Gathered parameters count as parameters.
        parameters = np.array([isinstance(value, nn.Parameter) for value in real], dtype=np.bool_)
        graph = _digest(problem, parameters)
        for plan in self._plans[graph]:
            if all(map(int.__le__, problem.sizes, plan.problem.sizes)):
                return planner.in_problem(plan, problem)
        choices = graph_choices(planner, parameters, min_cut=self.budget == "min_cut")
        if self.is_planned:
            self._note_later(planner)
        else:
            self._name = f"{graph} {problem.sizes}"
            self.graphs.setdefault(self._name, choices)
        return choices.least.plan

    def limit_sizes(self, sizes: Sequence[torch.SymInt], enlarged: Callable[[], RematPlan]) -> None:
        """Serve no sizes larger than those of the measured step."""
        if self.budget != "min_cut":
            limit_reach(sizes, lambda: False)

    def give_up(self, reason: str) -> None:
        """Forget the plans of a step that is not captured."""
        super().give_up(reason)
        self.graphs.clear()

    def plan(self, parts: Parts) -> None:
        """Plan all captured graphs by a measured step."""
        step = StepPeaks(parts, self.graphs)
        if self.budget == "min_cut":
            chosen = step.measured
        else:
            default, floor = step.peak_bytes(step.default), step.peak_bytes(step.lowest)
            limit = limit_of(self.budget, default, lambda: floor)
            if floor > limit:
                where = "of a step that was measured with the smallest plans"
                raise refusal(limit, floor, default, where)
            chosen = step.fastest(limit)
        peak = step.peak_bytes(chosen)
        for name, choice in chosen.items():
            self._plans[name.split()[0]].append(choice.plan)
            self.reports.append(replace(RematReport.of(choice.plan), peak_bytes=peak))
        self._largest = max((each.plan.peak_bytes for each in step.default.values()), default=0)
        self.graphs.clear()
        self.is_planned = True

    def _note_later(self, planner: Planner) -> None:
        self._num_later += 1
        if self.budget == "min_cut" or planner.default.peak_bytes <= self._largest:
            return
        self._largest = planner.default.peak_bytes
        warnings.warn(
            f"budget={self.budget!r}: a graph was captured after the step had been measured, and "
            "it is larger than all measured graphs. It uses its smallest plan, but the budget is "
            "not checked for it. Pad the batches, or put the largest batch among the first three.",
            stacklevel=2,
        )

    def _add_boundaries(self, module: fx.GraphModule, direction: Direction) -> None:
        graph = module.graph
        for is_end, place in ((False, first_operation(graph)), (True, graph.output_node())):
            with graph.inserting_before(place):
                graph.call_function(self._note, (self._name, direction, is_end))
        module.recompile()

    def _note(self, *boundary: Any) -> None:
        if self.meter is not None:
            self.meter.note(boundary)


def _digest(problem: RematProblem, parameters: Mask) -> str:
    """Return a digest that is equal for similar graphs, on all ranks, so that they share a plan."""
    digest = hashlib.sha256()
    for node, is_parameter in zip(problem.nodes, parameters.tolist(), strict=True):
        # If the sizes of a graph change, only those of its parameters count.
        size = node.num_bytes if is_parameter or not problem.sizes else 0
        digest.update(f"{node.name} {node.kind} {node.inputs} {size};".encode())
    return digest.hexdigest()[:16]

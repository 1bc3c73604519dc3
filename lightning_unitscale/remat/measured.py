"""Budgets of steps that are many graphs, by a measurement of one whole step.

FSDP breaks a step into a graph per module. What it gathers and frees around them, and what the step
computes outside of them, no graph shows. So the first steps run with the plans that keep the least,
one of these steps is measured from graph to graph, and by how many bytes each other plan of a graph
differs is known from the graph.

What FSDP gathered is an input of a graph. A plan may keep it, or a view of it, for the backward
pass as plain autograd does: FSDP frees its storage meanwhile, and fills it again before.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import fx, nn

from lightning_unitscale.profiler.measure import PeakMeter
from lightning_unitscale.remat.partitioner import RematPartitioner, limit_reach
from lightning_unitscale.remat.planner import Budget, Planner, RematPlan, refusal
from lightning_unitscale.remat.problem import Ints, Mask, NodeRegion, RematProblem
from lightning_unitscale.remat.report import RematReport, reports_table
from lightning_unitscale.remat.schedule import input_bytes

Direction = Literal["forward", "backward"]
Boundary = tuple[str, Direction, bool]
"""Which graph, its forward or backward pass, and whether it ends rather than begins."""
Parts = Sequence[tuple[Boundary | None, int]]
"""Peaks of a step from boundary to boundary, each with the boundary at which it ends."""
_NUM_PLANS = 16


@dataclass(frozen=True)
class Choice:
    """A plan of a graph, in bytes beside the one with which the step is measured.

    Attributes:
        plan: The plan.
        held_bytes: From the forward pass of the graph to its backward pass.
        forward_bytes: At the peak of its forward pass.
        backward_bytes: At the peak of its backward pass.
    """

    plan: RematPlan
    held_bytes: int
    forward_bytes: int
    backward_bytes: int


class GraphChoices:
    """The plans of a graph that is one of many."""

    def __init__(self, planner: Planner, parameters: Mask, *, min_cut: bool = False) -> None:
        self._problem = planner.problem
        self._parameters = parameters
        plans = [planner.min_cut] if min_cut else planner.tried(_NUM_PLANS)
        least = min(plans, key=lambda plan: (self._held(plan), plan.peak_bytes, plan.seconds))
        self.least = self._choice(least, least)
        self.default = self._choice(planner.default, least)
        self.all = [self._choice(plan, least) for plan in plans]

    def _choice(self, plan: RematPlan, least: RematPlan) -> Choice:
        new = self._of_caller(plan) & ~self._of_caller(least)
        # What the caller made it may let go of, or not: only what is kept anew is counted.
        callers = int(self._problem.num_bytes[new].sum())
        (forward, backward), (before, after) = _peaks(plan), _peaks(least)
        return Choice(
            plan,
            plan.saved_bytes - least.saved_bytes + callers,
            forward - before,
            backward - after + callers,
        )

    def _held(self, plan: RematPlan) -> int:
        return plan.saved_bytes + int(self._problem.num_bytes[self._of_caller(plan)].sum())

    def _of_caller(self, plan: RematPlan) -> Mask:
        """Storages that a plan keeps, and that are there for the caller too for a while."""
        problem = self._problem
        given = problem.region == NodeRegion.INPUT
        given[problem.base[list(problem.forward_outputs)]] = True
        kept = np.zeros(len(problem), dtype=np.bool_)
        kept[problem.base[plan.saved]] = True
        return kept & given & ~self._parameters


def _peaks(plan: RematPlan) -> tuple[int, int]:
    """Bytes of the forward and of the backward pass at their peaks, beside the inputs."""
    timeline, inputs = plan.timeline, input_bytes(plan.problem)
    forward, backward = np.split(timeline.live_bytes, [timeline.num_forward])
    return int(forward.max(initial=inputs)) - inputs, int(backward.max(initial=inputs)) - inputs


class MeasuredStep:
    """A step as it was measured, and what other plans would make of it.

    Attributes:
        graphs: Those of the graphs that the step ran.
        calls: How often it ran each of them.
    """

    def __init__(self, parts: Parts, graphs: Mapping[str, GraphChoices]) -> None:
        self.calls: Counter[str] = Counter()
        peaks: dict[tuple[Any, ...], int] = {}
        # Graphs whose backward pass is still to come; the one that runs.
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
        names = list(self.graphs)
        self._peaks = np.array(list(peaks.values()), dtype=np.int64)
        # How often what a plan adds is there: held, in the forward pass, in the backward pass.
        self._times = np.zeros((len(peaks), 3, len(names)), dtype=np.int64)
        for row, (held, active) in enumerate(peaks):
            for graph, count in held:
                self._times[row, 0, names.index(graph)] = count
            if active is not None:
                graph, direction = active
                self._times[row, 1 if direction == "forward" else 2, names.index(graph)] = 1

    def peak_bytes(self, choices: Mapping[str, Choice]) -> int:
        """The peak of the step with a plan for each graph."""
        rows = [
            (choice.held_bytes, choice.forward_bytes, choice.backward_bytes)
            for choice in choices.values()
        ]
        added = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        peaks: Ints = self._peaks + (self._times * added).sum((1, 2))
        return int(peaks.max(initial=0))

    @property
    def measured(self) -> dict[str, Choice]:
        """The plans with which the step was measured."""
        return {name: graph.least for name, graph in self.graphs.items()}

    @property
    def default(self) -> dict[str, Choice]:
        """Nothing runs again."""
        return {name: graph.default for name, graph in self.graphs.items()}

    @cached_property
    def lowest(self) -> dict[str, Choice]:
        """The plans with the lowest peak that is found."""
        chosen = self.measured
        while True:
            others = [
                {**chosen, name: choice}
                for name, graph in self.graphs.items()
                for choice in graph.all
            ]
            best = min(others, key=self.peak_bytes, default=chosen)
            if self.peak_bytes(best) >= self.peak_bytes(chosen):
                return chosen
            chosen = best

    def fastest(self, limit: int) -> dict[str, Choice]:
        """Plans within a limit that is not below the lowest, none of which could be faster alone.

        What saves the most time by the byte at the peak comes first.
        """
        if self.peak_bytes(self.default) <= limit:
            return self.default
        chosen = self.lowest
        while True:
            peak, best, most = self.peak_bytes(chosen), None, 0.0
            for name, graph in self.graphs.items():
                for choice in graph.all:
                    saved = chosen[name].plan.seconds - choice.plan.seconds
                    if saved <= 0:
                        continue
                    other = {**chosen, name: choice}
                    grown = self.peak_bytes(other)
                    rate = self.calls[name] * saved / max(grown - peak, 1)
                    if grown <= limit and rate > most:
                        best, most = other, rate
            if best is None:
                return chosen
            chosen = best


class _Tell(nn.Module):
    """A node of a graph that tells where a pass of it begins or ends."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def forward(self) -> None:
        self._tell()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Tell:
        return self


class MeasuredPartitioner(RematPartitioner):
    """Plans the graphs of a step together once one whole step has been measured.

    Until then they have the plans that keep the least, and so has what is captured afterwards and
    is not among what was measured, such as a batch of another size.

    Attributes:
        meter: Is told where graphs begin and end.
        graphs: The plans of what was captured, until one of them is chosen for each.
        reports: What was planned for each graph, with the predicted peak of the step.
        is_planned: Whether the step has been measured, and its graphs have been planned.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        self.meter: PeakMeter | None = None
        self.reports: list[RematReport] = []
        self.is_planned = False
        self.graphs: dict[str, GraphChoices] = {}
        # By the graph, whatever its sizes are.
        self._plans: dict[str, list[RematPlan]] = defaultdict(list)
        self._largest = 0
        self._num_later = 0
        self._name = ""

    def table(self) -> str:
        """The reports as text."""
        if not self.is_planned:
            return (
                self.given_up
                or "Nothing has been planned yet: one of the first steps is measured before."
            )
        text = reports_table(self.reports)
        if self._num_later:
            text += (
                f"\n\n{self._num_later} captured later, for batches of other sizes, keep the least"
            )
        return text

    def __call__(
        self, gm: fx.GraphModule, *args: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph of a joint graph."""
        forward, backward = super().__call__(gm, *args, **kwargs)
        if not self.is_planned:
            self._add_boundaries(forward, "forward")
            self._add_boundaries(backward, "backward")
        return forward, backward

    def choose(self, planner: Planner) -> RematPlan:
        """The plan of one graph."""
        problem = planner.problem
        real = [self.inputs.get(node.name) for node in problem.nodes]
        # A gathered parameter is one as well.
        parameters = np.array([isinstance(value, nn.Parameter) for value in real], dtype=np.bool_)
        graph = _digest(problem, parameters)
        for plan in self._plans[graph]:
            if all(map(int.__le__, problem.sizes, plan.problem.sizes)):
                return planner.in_problem(plan, problem)
        choices = GraphChoices(planner, parameters, min_cut=self.budget == "min_cut")
        if self.is_planned:
            self._note_later(planner)
        else:
            self._name = f"{graph} {problem.sizes}"
            self.graphs.setdefault(self._name, choices)
        return choices.least.plan

    def limit_sizes(self, sizes: Sequence[torch.SymInt], enlarged: Callable[[], RematPlan]) -> None:
        """Let a plan serve no larger sizes: the step was not measured with them."""
        if self.budget != "min_cut":
            limit_reach(sizes, lambda: False)

    def give_up(self, reason: str) -> None:
        """Forget the plans of a step that is not captured."""
        super().give_up(reason)
        self.graphs.clear()

    def plan(self, parts: Parts) -> None:
        """Plan all graphs that were captured, by a measured step."""
        step = MeasuredStep(parts, self.graphs)
        chosen = step.measured if self.budget == "min_cut" else self._chosen(step)
        peak = step.peak_bytes(chosen)
        for name, choice in chosen.items():
            self._plans[name.split()[0]].append(choice.plan)
            self.reports.append(replace(RematReport.of(choice.plan), peak_bytes=peak))
        defaults = (graph.default.plan.peak_bytes for graph in step.graphs.values())
        self._largest = max(defaults, default=0)
        self.graphs.clear()
        self.is_planned = True

    def _chosen(self, step: MeasuredStep) -> dict[str, Choice]:
        default = step.peak_bytes(step.default)
        is_share = isinstance(self.budget, float)
        limit = int(self.budget * default) if is_share else int(self.budget)
        floor = step.peak_bytes(step.lowest)
        if floor > limit:
            reached = "of a step that was measured with the plans that keep the least"
            raise refusal(self.budget, limit, floor, default, reached)
        return step.fastest(limit)

    def _note_later(self, planner: Planner) -> None:
        self._num_later += 1
        if self.budget == "min_cut" or planner.default.peak_bytes <= self._largest:
            return
        self._largest = planner.default.peak_bytes
        warnings.warn(
            f"budget={self.budget!r}: a graph was captured after the step had been measured, and "
            "it is larger than all that were measured. It keeps the least, but that the step stays "
            "within the budget is not checked; expected the largest batch among the first three; "
            "pad the batches, or begin with a large one.",
            stacklevel=2,
        )

    def _add_boundaries(self, module: fx.GraphModule, direction: Direction) -> None:
        graph = module.graph
        first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
        for name, is_end, place in (
            ("boundary_begin", False, first),
            ("boundary_end", True, graph.output_node()),
        ):
            boundary: Boundary = (self._name, direction, is_end)
            module.add_submodule(name, _Tell(partial(self._tell, boundary)))
            with graph.inserting_before(place):
                graph.call_module(name)
        module.recompile()

    def _tell(self, boundary: Boundary) -> None:
        if self.meter is not None:
            self.meter.note(boundary)


def _digest(problem: RematProblem, parameters: Mask) -> str:
    """Equal for graphs that are alike, on all ranks: blocks of a kind have the same plan.

    Of a graph whose sizes change only the parameters' sizes are looked at.
    """
    digest = hashlib.sha256()
    for node, is_parameter in zip(problem.nodes, parameters.tolist(), strict=True):
        size = node.num_bytes if is_parameter or not problem.sizes else 0
        digest.update(f"{node.name} {node.kind} {node.inputs} {size};".encode())
    return digest.hexdigest()[:16]

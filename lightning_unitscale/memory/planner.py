"""Plan a joint graph for a budget: simulate candidates, and return the fastest that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_unitscale.memory.budgets import Budget, check_budget, limit_of, refusal
from lightning_unitscale.memory.chain import EndingRuns, Run, choose_options, ending_runs
from lightning_unitscale.memory.min_cut import (
    Blocks,
    CutNetwork,
    find_blocks,
    non_dominated,
    segment_members,
)
from lightning_unitscale.memory.offload import HostLink, offloads, without_moved
from lightning_unitscale.memory.problem import (
    Floats,
    Mask,
    NodeRegion,
    RematProblem,
    recomputed,
    wanted,
)
from lightning_unitscale.memory.profile_report import format_bytes
from lightning_unitscale.memory.remat_plan import RematPlan
from lightning_unitscale.memory.schedule import backward_order, input_bytes, simulate_plan

# An operator with more operations per element than this is a matmul, which the classic cut keeps.
_MATMUL_FLOPS_PER_ELEMENT = 4.0
_TIGHTENINGS = 6
# Budgets from the floor to the default peak that are planned for any budget between them, and
# those that are planned between two of them.
_NUM_PLANS = 20
_NUM_BETWEEN = 8


@dataclass(frozen=True, eq=False)
class Planner:
    """Planner of one joint graph for any budget.

    Args:
        problem: The joint graph.
        resident_bytes: Bytes alive throughout a step besides the graph's inputs: the optimizer's
            state, gradients of earlier batches.
        forward_bytes: Bytes alive in the forward pass only: gradients of the last step.
        stepping_bytes: Bytes alive in the optimizer's step besides the resident ones and the
            graph's inputs: gradients and temporaries. 0 leaves that step out.
    """

    problem: RematProblem
    resident_bytes: int = 0
    forward_bytes: int = 0
    stepping_bytes: int = 0
    link: HostLink | None = None

    @cached_property
    def blocks(self) -> Blocks:
        """Return the graph as a chain of blocks."""
        return find_blocks(self.problem)

    @cached_property
    def _runs(self) -> list[EndingRuns]:
        """Return the options of all runs of blocks."""
        return ending_runs(self.blocks)

    @cached_property
    def _plans(self) -> dict[object, RematPlan | None]:
        """Return the plans so far. Different budgets often lead to the same plan."""
        return {}

    @cached_property
    def default(self) -> RematPlan:
        """Return the plan that keeps all values of the backward pass, and recomputes views."""
        problem = self.problem
        views = (problem.base != np.arange(len(problem))) | (problem.num_bytes == 0)
        # Tuples are saved item by item. Values that a user's checkpoint tags cannot be saved.
        free = views | problem.is_tuple | problem.tagged | ~problem.in_forward
        seconds = np.where(free, 0.0, math.inf)
        return self.plan_of("default", CutNetwork(problem, seconds).cut(1e-12).saved)

    @cached_property
    def min_cut(self) -> RematPlan:
        """Return the classic cut: the fewest bytes kept without recomputing a matmul."""
        problem = self.problem
        own = np.bincount(problem.owner, problem.num_bytes, len(problem))
        elements = np.maximum(own / 4, 1)
        is_matmul = problem.flops > _MATMUL_FLOPS_PER_ELEMENT * elements
        seconds = np.where(is_matmul & ~problem.tagged, math.inf, problem.seconds)
        return _fewest_bytes(self, "min_cut", seconds, problem.num_bytes.sum())

    @cached_property
    def candidates(self) -> list[RematPlan]:
        """Return plans without a budget: the default, cuts of the graph, checkpoints per block."""
        cuts = CutNetwork(self.problem).hull()
        plans = [self.default, self.min_cut, *(self.plan_of("cut", cut.saved) for cut in cuts)]
        # Keep only tensors that lead from block to block, for blocks of one, two, ... separators.
        for stride in (1, 2, 3, 4):
            again = self.problem.seconds.copy()
            ends = set(self.blocks.separators[stride - 1 :: stride])
            again[[i for i in ends if self.problem.nodes[i].can_save]] = math.inf
            num_bytes = self.default.saved_bytes
            plans.append(_fewest_bytes(self, "checkpoint_blocks", again, num_bytes))
        return plans

    def plan(self, budget: Budget) -> RematPlan:
        """Return the plan with the least estimated time whose peak is within the budget.

        A larger budget never gets a slower plan, and a smaller one never a plan with a higher peak.

        Args:
            budget: Limit on all tensor bytes alive at once: bytes (an int or a string such as
                ``"600MiB"``), or a float from 0 (the floor, also ``"min"``) to 1 (the default
                plan's peak). Or ``"min_cut"``.

        Raises:
            ValueError: If the budget is malformed, or in bytes and below the floor.
        """
        budget = check_budget(budget)
        if budget == "min_cut":
            return self.min_cut
        limit = limit_of(budget, self.default.peak_bytes, lambda: self.floor.peak_bytes)
        if limit >= self.default.peak_bytes:
            return _fastest(self.candidates, limit)
        if limit < self.floor.peak_bytes:
            where = (
                f"in {self.floor.peak_at}; {format_bytes(_fixed_bytes(self))} of it are "
                "parameters, inputs and optimizer state"
            )
            raise refusal(limit, self.floor.peak_bytes, self.default.peak_bytes, where)
        plans = [*self.tried(_NUM_PLANS), *self.offloaded]
        if limit >= self._on_device_floor.peak_bytes:
            plans += _plans_between(self, limit)
        return _fastest(plans, limit)

    @cached_property
    def offloaded(self) -> list[RematPlan]:
        """Return the best plans on the device with some of their saved values in host memory."""
        if self.link is None:
            return []
        tried = self.tried(_NUM_PLANS)
        bases = non_dominated(tried, lambda plan: (plan.seconds, plan.peak_bytes))
        bases += non_dominated(tried, lambda plan: (plan.seconds, plan.saved_bytes))
        return [
            replace(
                base,
                timeline=choice.timeline,
                moves=choice.moves,
                exposed_seconds=choice.exposed_seconds,
            )
            for base in {id(base): base for base in bases}.values()
            for choice in offloads(base.problem, base.saved, base.order, base.timeline, self.link)
        ]

    @cached_property
    def floor(self) -> RematPlan:
        """Return the plan with the lowest peak that the planner finds."""
        plans = [self._on_device_floor, *self.offloaded]
        return min(plans, key=lambda plan: (plan.peak_bytes, plan.seconds))

    @cached_property
    def _on_device_floor(self) -> RematPlan:
        """Return the plan with the lowest peak of those that keep all in the device's memory."""
        best = min(self.candidates, key=lambda plan: plan.peak_bytes)
        low, high = _fixed_bytes(self), best.peak_bytes
        for _ in range(12):
            if high - low < max(high // 200, 1):
                break
            middle = (low + high) // 2
            plan = self._chosen_for(middle)
            if plan is None:
                low = middle
            else:
                high = middle
                best = min(best, plan, key=lambda plan: plan.peak_bytes)
        return best

    def front(self, num_plans: int = 20) -> list[RematPlan]:
        """Return plans from the fastest to the smallest, none beaten in both time and peak.

        Args:
            num_plans: Number of budgets, evenly between the default plan's peak and the floor.
        """
        plans = [*self.tried(num_plans), *self.offloaded]
        return non_dominated(plans, lambda plan: (plan.seconds, plan.peak_bytes))

    def tried(self, num_plans: int) -> list[RematPlan]:
        """Return all plans that :meth:`front` compares. Those that it drops may keep less."""
        limits = _limits(self, num_plans)[-2:0:-1]
        of_blocks = (plan for limit in limits if (plan := _of_blocks(self, limit)))
        return [*self.candidates, self._on_device_floor, *of_blocks]

    def plan_of(self, name: str, saved: Mask, kept: Mask | None = None) -> RematPlan:
        """Return a plan from its kept nodes, without values that would not be read.

        Args:
            name: Origin of the plan.
            saved: Nodes whose values are kept.
            kept: Nodes that are recomputed at most once. The default is all.
        """
        saved = _pruned(self.problem, saved)
        segments = None if kept is None else self.blocks.block.tolist()
        key = (name, saved.tobytes(), None if kept is None else kept.tobytes())
        plan = self._plans.get(key)
        if plan is None:
            order = backward_order(self.problem, saved, segments=segments, kept=kept)
            beside = self.resident_bytes, self.forward_bytes
            timeline = simulate_plan(self.problem, saved, order, *beside)
            plan = RematPlan(
                self.problem,
                name,
                saved,
                kept,
                segments,
                order,
                timeline,
                _least_bytes(self, self.problem),
            )
            self._plans[key] = plan
        return plan

    def in_problem(self, plan: RematPlan, problem: RematProblem) -> RematPlan:
        """Return the same plan for the same graph with other sizes."""
        beside = self.resident_bytes, self.forward_bytes
        timeline = simulate_plan(problem, plan.saved, plan.order, *beside)
        timeline = without_moved(problem, timeline, plan.moves)
        return replace(
            plan, problem=problem, timeline=timeline, least_bytes=_least_bytes(self, problem)
        )

    def _chosen_for(self, aim: int) -> RematPlan | None:
        if aim not in self._plans:
            budget_bytes = aim - _fixed_bytes(self)
            choice = choose_options(self._runs, budget_bytes, forward_bytes=self.forward_bytes)
            self._plans[aim] = None if choice is None else _of_choice(self, choice)
        return self._plans[aim]


def _plans_between(planner: Planner, limit: int) -> list[RematPlan]:
    """Return plans for budgets close to a limit that are no better than those far from it."""
    # A plan that only some limits compare must neither be faster than the plans of all larger
    # limits nor have a lower peak than those of all smaller ones.
    limits = _limits(planner, _NUM_PLANS)
    index = int(np.searchsorted(limits, limit, side="right"))
    low, high = limits[index - 1], limits[index]
    seconds = _fastest(planner.tried(_NUM_PLANS), high).seconds
    steps = range(1, _NUM_BETWEEN)
    aims = sorted({low + (high - low) * step // _NUM_BETWEEN for step in steps})
    plans = (plan for aim in aims if (plan := _of_blocks(planner, aim)))
    return [plan for plan in plans if plan.peak_bytes >= low and plan.seconds >= seconds]


def _of_blocks(planner: Planner, limit: int) -> RematPlan | None:
    """Return the fastest choice of options whose simulated peak is within the limit."""
    aim = limit
    for _ in range(_TIGHTENINGS):
        plan = planner._chosen_for(aim)
        if plan is None or plan.peak_bytes <= limit:
            return plan
        aim -= max(plan.peak_bytes - limit, limit // 200)
    return None


def _fastest(plans: Sequence[RematPlan], limit: int) -> RematPlan:
    """Return the fastest of the plans whose peak is within a limit."""
    # Of equally fast ones it is the one that moves the least, then the one with the lowest peak.
    fitting = (plan for plan in plans if plan.peak_bytes <= limit)
    return min(fitting, key=lambda plan: (plan.seconds, plan.host_bytes, plan.peak_bytes))


def _limits(planner: Planner, num_plans: int) -> list[int]:
    """Return budgets evenly from the floor to the default plan's peak."""
    top, bottom = planner.default.peak_bytes, planner._on_device_floor.peak_bytes
    return [top - (top - bottom) * step // num_plans for step in range(num_plans, -1, -1)]


def _least_bytes(planner: Planner, problem: RematProblem) -> int:
    """Return the bytes during the optimizer's step, 0 without one."""
    if not planner.stepping_bytes:
        return 0
    return planner.stepping_bytes + planner.resident_bytes + input_bytes(problem)


def _fixed_bytes(planner: Planner) -> int:
    return planner.resident_bytes + input_bytes(planner.problem)


def _fewest_bytes(planner: Planner, name: str, seconds: Floats, num_bytes: float) -> RematPlan:
    """Return the plan that keeps the least if only nodes with finite ``seconds`` are recomputed."""
    # All operations together cost as much as a ten-thousandth of ``num_bytes``.
    price = 1e4 * float(planner.problem.seconds.sum() + 1e-9) / max(float(num_bytes), 1.0)
    return planner.plan_of(name, CutNetwork(planner.problem, seconds).cut(price).saved)


def _of_choice(planner: Planner, choice: Sequence[Run]) -> RematPlan:
    saved = planner.problem.region == NodeRegion.INPUT
    kept = np.ones(len(planner.problem), dtype=np.bool_)
    for start, stop, option in choice:
        members = segment_members(planner.blocks, start, stop)
        saved[members[list(option.saved)]] = True
        kept[members[[place for place in option.dropped if place >= 0]]] = False
    return planner.plan_of("blocks", saved, None if kept.all() else kept)


def _pruned(problem: RematProblem, saved: Mask) -> Mask:
    """Return ``saved`` without nodes that neither the backward pass nor recomputation reads."""
    read = wanted(problem)
    producers, users = problem.edges
    reads = recomputed(problem, saved) | (problem.region == NodeRegion.BACKWARD)
    read[producers[reads[users]]] = True
    return saved & read

"""Plan a joint graph for a budget: simulate candidates, and return the fastest that fits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx
import numpy as np

from lightning_unitscale.memory.blocks import Blocks, find_blocks, segment_members
from lightning_unitscale.memory.budgets import Budget, check_budget, limit_of, refusal
from lightning_unitscale.memory.chain import EndingRuns, Run, choose_options, ending_runs
from lightning_unitscale.memory.min_cut import CutNetwork, non_dominated
from lightning_unitscale.memory.problem import (
    Floats,
    Ints,
    Mask,
    NodeRegion,
    RematProblem,
    recomputed,
    wanted,
)
from lightning_unitscale.memory.profile_report import format_bytes
from lightning_unitscale.memory.schedule import (
    BackwardOrder,
    PlanTimeline,
    backward_order,
    input_bytes,
    simulate_plan,
)

# Changes whenever the same problem may get another plan.
PLANNER_VERSION = 4
# An operator with more operations per element than this is a matmul, which the classic cut keeps.
_MATMUL_FLOPS_PER_ELEMENT = 4.0
_TIGHTENINGS = 6
# Budgets from the floor to the default peak that are planned for any budget between them, and
# those that are planned between two of them.
_NUM_PLANS = 20
_NUM_BETWEEN = 8


@dataclass(frozen=True)
class RematPlan:
    """Plan of the values to keep and the operations to recompute, with its costs.

    Attributes:
        problem: The joint graph.
        name: Origin of the plan: ``"default"``, ``"min_cut"``, ``"checkpoint_blocks"``, ``"cut"``
            or ``"blocks"``.
        saved: Nodes whose values are kept.
        kept: Nodes that are recomputed at most once. Others may run once for each block that needs
            them. ``None`` means all nodes.
        segments: Block of each node, if ``kept`` is given.
        order: The order of the backward pass.
        timeline: Bytes alive over the forward and the backward pass.
        least_bytes: Bytes alive in the optimizer's step, which no plan changes.
    """

    problem: RematProblem
    name: str
    saved: Mask
    kept: Mask | None
    segments: Sequence[int] | None
    order: BackwardOrder
    timeline: PlanTimeline
    least_bytes: int = 0

    @cached_property
    def again(self) -> Ints:
        """Return the nodes that run a second time, once for each time."""
        return self.order.again(self.problem)

    @cached_property
    def seconds(self) -> float:
        """Estimate the time of recomputation."""
        return self._again_of(self.problem.seconds)

    @cached_property
    def flops(self) -> float:
        """Count the floating-point operations of the recomputed matmuls."""
        return self._again_of(self.problem.flops)

    def _again_of(self, costs: Floats) -> float:
        # Summed node by node: equal for plans that differ in the order of recomputation only.
        return float(np.bincount(self.again, minlength=len(self.problem)) @ costs)

    @property
    def saved_bytes(self) -> int:
        """Return the bytes kept for the backward pass, each storage once."""
        return self.problem.saved_bytes(self.saved)

    @property
    def peak_bytes(self) -> int:
        """Predict the peak of all bytes alive in a step."""
        return max(self.timeline.peak_bytes, self.least_bytes)

    @property
    def peak_at(self) -> str:
        """Describe where the peak is reached: the pass and the operation."""
        if self.least_bytes > self.timeline.peak_bytes:
            return "the optimizer's step"
        direction, node = self.timeline.peak_at
        return f"the {direction} pass, at {self.problem.nodes[node].name}"

    @cached_property
    def hash(self) -> str:
        """Hash the saved and kept nodes and the order, equal on all ranks with the same plan."""
        digest = hashlib.sha256(f"{PLANNER_VERSION}".encode())
        for node, keeps in zip(self.problem.nodes, self.saved.tolist(), strict=True):
            if keeps:
                digest.update(node.name.encode() + b";")
        digest.update(self.order.nodes.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def to_networkx(self) -> nx.DiGraph:
        """Return the joint graph with the plan's effect on each node.

        Returns:
            A graph of networkx with the totals of the plan. A node has ``op``, ``num_bytes`` (of
            the storage that it allocates), ``flops`` and estimated ``seconds``. Its ``role`` is
            ``"input"``, ``"forward"``, ``"saved"``, ``"recomputed"`` or ``"backward"``. It runs
            ``num_runs`` times, from ``first_run`` to ``last_run`` in the schedule; both are -1 for
            an input. An edge has the ``num_bytes`` of the storage that is read, and ``saved``
            (whether the backward pass reads a saved value).
        """
        totals = ("name", "hash", "peak_bytes", "saved_bytes", "flops", "seconds")
        graph = nx.DiGraph(**{total: getattr(self, total) for total in totals})
        nodes, saved = self.problem.nodes, self.saved.tolist()
        num_forward = self.timeline.num_forward
        runs: list[list[int]] = [[] for _ in nodes]
        for position, index in enumerate(self.timeline.nodes.tolist()):
            runs[index].append(position)
        for node, keeps, at in zip(nodes, saved, runs, strict=True):
            first, last = (at[0], at[-1]) if at else (-1, -1)
            again = "recomputed" if last >= num_forward else "forward"
            role = "backward" if first >= num_forward else "saved" if keeps else again
            graph.add_node(
                node.name,
                op=node.kind,
                role="input" if node.region is NodeRegion.INPUT else role,
                **{name: getattr(node, name) for name in ("num_bytes", "flops", "seconds")},
                **{"num_runs": len(at), "first_run": first, "last_run": last},
            )
            for read in node.inputs:
                size = nodes[nodes[read].base].num_bytes
                is_saved = saved[read] and last >= num_forward
                graph.add_edge(nodes[read].name, node.name, num_bytes=size, saved=is_saved)
        return graph


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
        """Return the plan that keeps all that the backward pass reads and recomputes only views."""
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
        return _fastest([*self.tried(_NUM_PLANS), *self._plans_between(limit)], limit)

    def _plans_between(self, limit: int) -> list[RematPlan]:
        """Return plans for budgets close to a limit that are no better than those far from it.

        A plan that only some limits compare must neither be faster than the plans of all larger
        limits nor have a lower peak than those of all smaller ones.
        """
        limits = _limits(self, _NUM_PLANS)
        index = int(np.searchsorted(limits, limit, side="right"))
        low, high = limits[index - 1], limits[index]
        seconds = _fastest(self.tried(_NUM_PLANS), high).seconds
        steps = range(1, _NUM_BETWEEN)
        aims = sorted({low + (high - low) * step // _NUM_BETWEEN for step in steps})
        plans = (plan for aim in aims if (plan := self._of_blocks(aim)))
        return [plan for plan in plans if plan.peak_bytes >= low and plan.seconds >= seconds]

    @cached_property
    def floor(self) -> RematPlan:
        """Return the plan with the lowest peak that the planner finds."""
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
        return non_dominated(self.tried(num_plans), lambda plan: (plan.seconds, plan.peak_bytes))

    def tried(self, num_plans: int) -> list[RematPlan]:
        """Return all plans that :meth:`front` compares. Those that it drops may keep less."""
        limits = _limits(self, num_plans)[-2:0:-1]
        of_blocks = (plan for limit in limits if (plan := self._of_blocks(limit)))
        return [*self.candidates, self.floor, *of_blocks]

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
        return replace(
            plan, problem=problem, timeline=timeline, least_bytes=_least_bytes(self, problem)
        )

    def _of_blocks(self, limit: int) -> RematPlan | None:
        """Return the fastest choice of options whose simulated peak is within the limit."""
        aim = limit
        for _ in range(_TIGHTENINGS):
            plan = self._chosen_for(aim)
            if plan is None or plan.peak_bytes <= limit:
                return plan
            aim -= max(plan.peak_bytes - limit, limit // 200)
        return None

    def _chosen_for(self, aim: int) -> RematPlan | None:
        if aim not in self._plans:
            budget_bytes = aim - _fixed_bytes(self)
            choice = choose_options(self._runs, budget_bytes, forward_bytes=self.forward_bytes)
            self._plans[aim] = None if choice is None else _of_choice(self, choice)
        return self._plans[aim]


def _fastest(plans: Sequence[RematPlan], limit: int) -> RematPlan:
    """Return the fastest of the plans whose peak is within a limit, of equal ones the smallest."""
    fitting = (plan for plan in plans if plan.peak_bytes <= limit)
    return min(fitting, key=lambda plan: (plan.seconds, plan.peak_bytes))


def _limits(planner: Planner, num_plans: int) -> list[int]:
    """Return budgets evenly from the floor to the default plan's peak."""
    top, bottom = planner.default.peak_bytes, planner.floor.peak_bytes
    return [top - (top - bottom) * step // num_plans for step in range(num_plans, -1, -1)]


def _least_bytes(planner: Planner, problem: RematProblem) -> int:
    """Return the bytes during the optimizer's step, 0 without one."""
    if not planner.stepping_bytes:
        return 0
    return planner.stepping_bytes + planner.resident_bytes + input_bytes(problem)


def _fixed_bytes(planner: Planner) -> int:
    return planner.resident_bytes + input_bytes(planner.problem)


def _fewest_bytes(planner: Planner, name: str, seconds: Floats, num_bytes: float) -> RematPlan:
    """Return the plan that keeps the least if only nodes with finite ``seconds`` are recomputed.

    All operations together cost as much as a ten-thousandth of ``num_bytes``.
    """
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

"""Describe a plan of a joint graph: kept, offloaded and recomputed values, and its costs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import networkx as nx
import numpy as np

from lightning_unitscale.memory.offload import Move
from lightning_unitscale.memory.problem import Floats, Ints, Mask, NodeRegion, RematProblem
from lightning_unitscale.memory.schedule import BackwardOrder, PlanTimeline

# Increased whenever the same problem may get another plan.
PLANNER_VERSION = 4


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
        moves: Saved values that wait in host memory. ``timeline`` then excludes them.
        exposed_seconds: Estimated time in which computing waits for their copies.
    """

    problem: RematProblem
    name: str
    saved: Mask
    kept: Mask | None
    segments: Sequence[int] | None
    order: BackwardOrder
    timeline: PlanTimeline
    least_bytes: int = 0
    moves: tuple[Move, ...] = ()
    exposed_seconds: float = 0.0

    @cached_property
    def again(self) -> Ints:
        """Return the nodes that run again, once for each additional run."""
        return self.order.again(self.problem)

    @cached_property
    def seconds(self) -> float:
        """Estimate the time that the plan adds to a step: recomputation, and waiting for copies."""
        return self.again_seconds + self.exposed_seconds

    @cached_property
    def again_seconds(self) -> float:
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
        """Return the bytes kept for the backward pass, each storage once, also those moved away."""
        return self.problem.saved_bytes(self.saved)

    @property
    def host_bytes(self) -> int:
        """Return the bytes that wait in host memory."""
        return sum(self.problem.nodes[move.node].num_bytes for move in self.moves)

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
        digest.update(repr([astuple(move) for move in self.moves]).encode() if self.moves else b"")
        return digest.hexdigest()[:16]

    def to_networkx(self) -> nx.DiGraph:
        """Return the joint graph with the plan's effect on each node.

        Returns:
            A graph of networkx with the totals of the plan. A node has ``op``, ``num_bytes`` (of
            the storage that it allocates), ``flops`` and estimated ``seconds``. Its ``role`` is
            ``"input"``, ``"forward"``, ``"saved"``, ``"offloaded"``, ``"recomputed"`` or
            ``"backward"``. It runs ``num_runs`` times, from ``first_run`` to ``last_run`` in the
            schedule; both are -1 for an input. An edge has the ``num_bytes`` of the storage that is
            read, and ``saved`` (whether the backward pass reads a saved value).
        """
        totals = ("name", "hash", "peak_bytes", "saved_bytes", "flops", "seconds")
        graph = nx.DiGraph(**{total: getattr(self, total) for total in totals})
        nodes, saved = self.problem.nodes, self.saved.tolist()
        num_forward = self.timeline.num_forward
        runs: list[list[int]] = [[] for _ in nodes]
        for position, index in enumerate(self.timeline.nodes.tolist()):
            runs[index].append(position)
        moved = {move.node for move in self.moves}
        for index, (node, keeps, at) in enumerate(zip(nodes, saved, runs, strict=True)):
            first, last = (at[0], at[-1]) if at else (-1, -1)
            again = "recomputed" if last >= num_forward else "forward"
            kept = "offloaded" if index in moved else "saved"
            role = "backward" if first >= num_forward else kept if keeps else again
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

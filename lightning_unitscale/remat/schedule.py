"""In which order a plan runs: the forward pass, and the backward pass with what runs again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_unitscale.remat.problem import Ints, Mask, Region, RematProblem, recomputed


@dataclass(frozen=True)
class BackwardOrder:
    """The executions of a backward pass, in order; a node may be executed several times.

    Attributes:
        nodes: Node of each execution.
        sources: For each execution, where each of its inputs comes from: the position of an earlier
            execution, or -1 if it is saved or an input.
    """

    nodes: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]

    def again(self, problem: RematProblem) -> Ints:
        """Nodes that run a second time, once for each time."""
        nodes = np.array(self.nodes, dtype=np.int64)
        return nodes[(problem.region[nodes] == Region.FORWARD) & problem.in_forward[nodes]]


def lazy_order(
    inputs: Sequence[Sequence[int]],
    anchors: Iterable[int],
    runs: Sequence[bool],
    *,
    wanted_at_end: Iterable[int] = (),
    segments: Sequence[int] | None = None,
    kept: Sequence[bool] | None = None,
) -> BackwardOrder:
    """Anchors in their order, each preceded by what it needs and is not there yet.

    A value that runs again thus runs as late as it can, and lives as short. With segments, a value
    that is not kept is forgotten at the end of a segment and runs once more where a later one needs
    it.

    Args:
        inputs: For each node, the nodes it reads.
        anchors: Nodes whose order is given: those of the backward pass.
        runs: Whether a node is executed in the backward pass at all; others are there already.
        wanted_at_end: Nodes that the pass returns; executed last if nobody needed them before.
        segments: Segment of each anchor, by node; one segment if it is left out.
        kept: Nodes whose value outlives its segment; all if it is left out. Anchors always do.
    """
    position: list[int] = [-1] * len(inputs)
    order: list[int] = []
    sources: list[tuple[int, ...]] = []
    transient: list[int] = []
    segment: int | None = None

    def execute(node: int) -> None:
        sources.append(tuple([position[i] for i in inputs[node]]))
        position[node] = len(order)
        order.append(node)

    def provide(node: int) -> None:
        missing = [i for i in inputs[node] if runs[i] and position[i] < 0]
        if missing:
            found = set(missing)
            while missing:
                for i in inputs[missing.pop()]:
                    if runs[i] and position[i] < 0 and i not in found:
                        found.add(i)
                        missing.append(i)
            for one in sorted(found):
                execute(one)
                if kept is not None and not kept[one]:
                    transient.append(one)

    for anchor in anchors:
        if segments is not None and segments[anchor] != segment:
            segment = segments[anchor]
            for one in transient:
                position[one] = -1
            transient.clear()
        provide(anchor)
        execute(anchor)
    for node in wanted_at_end:
        if runs[node] and position[node] < 0:
            provide(node)
            execute(node)
    return BackwardOrder(tuple(order), tuple(sources))


def backward_order(
    problem: RematProblem,
    saved: Mask,
    *,
    segments: Sequence[int] | None = None,
    kept: Mask | None = None,
) -> BackwardOrder:
    """The backward pass of a plan.

    Args:
        problem: The joint graph.
        saved: What the plan keeps.
        segments: Segment of each backward node, by node; see :func:`lazy_order`.
        kept: What outlives its segment once it has run again.
    """
    runs = recomputed(problem, saved) | (problem.region == Region.BACKWARD)
    anchors = np.flatnonzero(problem.region == Region.BACKWARD).tolist()
    return lazy_order(
        [node.inputs for node in problem.nodes],
        anchors,
        runs.tolist(),
        wanted_at_end=problem.backward_outputs,
        segments=segments,
        kept=None if kept is None else kept.tolist(),
    )


def forward_nodes(problem: RematProblem, saved: Mask) -> Ints:
    """Nodes of the forward pass in order: what the caller gets, what is saved, what leads there."""
    runs = problem.in_forward & (problem.region == Region.FORWARD)
    extra = saved & (problem.region == Region.FORWARD) & ~runs
    if extra.any():
        runs = runs.copy()
        pending = np.flatnonzero(extra).tolist()
        while pending:
            node = pending.pop()
            if not runs[node] and problem.nodes[node].region is Region.FORWARD:
                runs[node] = True
                pending.extend(problem.nodes[node].inputs)
    return np.flatnonzero(runs)

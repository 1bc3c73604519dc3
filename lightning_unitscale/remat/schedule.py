"""In which order a plan runs: the forward pass, and the backward pass with what runs again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_unitscale.remat.problem import Ints, Mask, Region, RematProblem, recomputed


@dataclass(frozen=True, eq=False)
class BackwardOrder:
    """The executions of a backward pass, in order; a node may be executed several times.

    Attributes:
        nodes: Node of each execution.
        segment: For each execution, which run of anchors of one segment it happens in.
        outlives: For each node, whether its one execution serves all segments; others are executed
            once in each run of anchors that needs them.
    """

    nodes: Ints
    segment: Ints
    outlives: Mask

    def again(self, problem: RematProblem) -> Ints:
        """Nodes that run a second time, once for each time."""
        nodes = self.nodes
        return nodes[(problem.region[nodes] == Region.FORWARD) & problem.in_forward[nodes]]

    def reads(self, problem: RematProblem) -> tuple[Ints, Ints, Ints]:
        """(execution, node that it reads, execution which that comes from or -1) of every input."""
        producers, offsets = problem.inputs
        counts = offsets[self.nodes + 1] - offsets[self.nodes]
        readers = np.repeat(np.arange(len(self.nodes)), counts)
        within = np.arange(len(readers)) - np.repeat(np.cumsum(counts) - counts, counts)
        read = producers[offsets[self.nodes[readers]] + within]
        codes = self._codes(self.nodes, self.segment)
        order = np.argsort(codes)
        wanted = self._codes(read, self.segment[readers])
        place = np.searchsorted(codes, wanted, sorter=order)
        found = order[np.minimum(place, len(order) - 1)] if len(order) else place
        is_there = codes[found] == wanted
        return readers, read, np.where(is_there, found, -1)

    def _codes(self, nodes: Ints, segment: Ints) -> Ints:
        stride = int(self.segment.max(initial=0)) + 1
        return nodes * stride + np.where(self.outlives[nodes], 0, segment)


def lazy_order(
    inputs: Sequence[Sequence[int]],
    anchors: Sequence[int],
    runs: Sequence[bool] | Mask,
    *,
    wanted_at_end: Iterable[int] = (),
    segments: Sequence[int] | None = None,
    kept: Sequence[bool] | Mask | None = None,
    edges: tuple[Ints, Ints] | None = None,
) -> BackwardOrder:
    """Anchors in their order, each preceded by what it needs and is not there yet.

    A value that runs again thus runs as late as it can, and lives as short. With segments, a value
    that is not kept is forgotten at the end of a segment and runs once more where a later one needs
    it.

    Args:
        inputs: For each node, the nodes it reads, all of them smaller.
        anchors: Nodes whose order is given, ascending: those of the backward pass.
        runs: Whether a node is executed in the backward pass at all; others are there already.
        wanted_at_end: Nodes that the pass returns; executed last if nobody needed them before.
        segments: Segment of each anchor, by node; one segment if it is left out.
        kept: Nodes whose value outlives its segment; all if it is left out. Anchors always do.
        edges: (producer, user) of all inputs, sorted by user, if they are known.
    """
    count = len(inputs)
    is_anchor = np.zeros(count, dtype=np.bool_)
    is_anchor[list(anchors)] = True
    outlives = np.ones(count, dtype=np.bool_) if kept is None else np.array(kept, dtype=np.bool_)
    outlives |= is_anchor
    # Moments are the anchors, then what is wanted at the end; each lies in a run of one segment.
    run_of = _runs_of_segments(anchors, segments)
    end, never = len(anchors), len(anchors) + 1
    run_of.append(run_of[-1] if run_of else 0)
    # When a node is needed first. What is there already is "needed" before all moments; what
    # outlives its run is executed once.
    first_of = np.where(np.asarray(runs, dtype=np.bool_), never, -1)
    first_of[list(anchors)] = np.arange(end)
    producers, users = _edges(inputs) if edges is None else edges
    by_anchor = is_anchor[users]
    read, moment_of_read = producers[by_anchor], first_of[users[by_anchor]]
    alone = outlives[read]
    np.minimum.at(first_of, read[alone], moment_of_read[alone])
    first: list[int] = first_of.tolist()
    is_single: list[bool] = outlives.tolist()
    first_in_run: dict[int, dict[int, int]] = {}

    def need(node: int, moment: int) -> None:
        if is_single[node]:
            if first[node] > moment:
                first[node] = moment
        elif first[node] >= 0:
            known = first_in_run.setdefault(node, {})
            run = run_of[moment]
            known[run] = min(moment, known.get(run, never))

    for node, moment in zip(read[~alone].tolist(), moment_of_read[~alone].tolist(), strict=True):
        need(node, moment)
    for node in wanted_at_end:
        need(node, end)
    # From the last node to the first: its users have said when they need it.
    for node in np.flatnonzero((first_of >= 0) & ~is_anchor)[::-1].tolist():
        if not is_single[node]:
            for moment in first_in_run.get(node, {}).values():
                for i in inputs[node]:
                    need(i, moment)
        elif first[node] < never:
            moment = first[node]
            for i in inputs[node]:
                # As ``need`` does, without a call for what is most common.
                if not is_single[i]:
                    need(i, moment)
                elif first[i] > moment:
                    first[i] = moment
    once = np.array(first, dtype=np.int64)
    single = np.flatnonzero(outlives & (once >= 0) & (once < never))
    several = [(i, one) for i, moments in first_in_run.items() for one in moments.values()]
    others, moment_of_others = np.array(several, dtype=np.int64).reshape(-1, 2).T
    nodes = np.concatenate([single, others])
    moment_of = np.concatenate([once[single], moment_of_others])
    # What a moment needs comes before its anchor, whose number is larger.
    order = np.lexsort((nodes, moment_of))
    runs_of_moments = np.array(run_of, dtype=np.int64)
    return BackwardOrder(nodes[order], runs_of_moments[moment_of[order]], outlives)


def _edges(inputs: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """(producer, user) of every edge, sorted by user."""
    producers = [i for one in inputs for i in one]
    users = np.repeat(np.arange(len(inputs)), [len(one) for one in inputs])
    return np.array(producers, dtype=np.int64), users


def _runs_of_segments(anchors: Sequence[int], segments: Sequence[int] | None) -> list[int]:
    """For each anchor how often the segment has changed before it."""
    if segments is None or not len(anchors):
        return [0] * len(anchors)
    segment = np.array(segments, dtype=np.int64)[np.array(anchors, dtype=np.int64)]
    changes: list[int] = np.concatenate([[0], np.cumsum(segment[1:] != segment[:-1])]).tolist()
    return changes


def backward_order(
    problem: RematProblem,
    saved: Mask,
    *,
    segments: Sequence[int] | None = None,
    kept: Mask | None = None,
    again: Mask | None = None,
) -> BackwardOrder:
    """The backward pass of a plan.

    Args:
        problem: The joint graph.
        saved: What the plan keeps.
        segments: Segment of each backward node, by node; see :func:`lazy_order`.
        kept: What outlives its segment once it has run again.
        again: ``recomputed(problem, saved)``, if it is known.
    """
    runs = recomputed(problem, saved) if again is None else again
    is_backward = problem.region == Region.BACKWARD
    return lazy_order(
        problem.inputs_of,
        np.flatnonzero(is_backward).tolist(),
        runs | is_backward,
        wanted_at_end=problem.backward_outputs,
        segments=segments,
        kept=kept,
        edges=problem.edges,
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

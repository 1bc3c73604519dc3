"""In which order a plan runs, and the bytes alive meanwhile.

The forward pass, then the backward pass with what runs again; each storage counts once, from its
allocation to its last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_unitscale.remat.problem import Ints, Mask, NodeRegion, RematProblem, recomputed


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
        return nodes[(problem.region[nodes] == NodeRegion.FORWARD) & problem.in_forward[nodes]]

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
        position = np.searchsorted(codes, wanted, sorter=order)
        sources = order[np.minimum(position, len(order) - 1)] if len(order) else position
        is_there = codes[sources] == wanted
        return readers, read, np.where(is_there, sources, -1)

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
            first_moments = first_in_run.setdefault(node, {})
            run = run_of[moment]
            first_moments[run] = min(moment, first_moments.get(run, never))

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
    several = [(i, moment) for i, moments in first_in_run.items() for moment in moments.values()]
    others, moment_of_others = np.array(several, dtype=np.int64).reshape(-1, 2).T
    nodes = np.concatenate([single, others])
    moment_of = np.concatenate([once[single], moment_of_others])
    # What a moment needs comes before its anchor, whose number is larger.
    order = np.lexsort((nodes, moment_of))
    runs_of_moments = np.array(run_of, dtype=np.int64)
    return BackwardOrder(nodes[order], runs_of_moments[moment_of[order]], outlives)


def _edges(inputs: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """(producer, user) of every edge, sorted by user."""
    producers = [i for read in inputs for i in read]
    users = np.repeat(np.arange(len(inputs)), [len(read) for read in inputs])
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
    is_backward = problem.region == NodeRegion.BACKWARD
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
    runs = problem.in_forward & (problem.region == NodeRegion.FORWARD)
    extra = saved & (problem.region == NodeRegion.FORWARD) & ~runs
    if extra.any():
        runs = runs.copy()
        pending = np.flatnonzero(extra).tolist()
        while pending:
            node = pending.pop()
            if not runs[node] and problem.nodes[node].region is NodeRegion.FORWARD:
                runs[node] = True
                pending.extend(problem.nodes[node].inputs)
    return np.flatnonzero(runs)


@dataclass(frozen=True)
class PlanTimeline:
    """Bytes alive while each operation of a step runs.

    Attributes:
        nodes: The operation's node, forward pass first.
        live_bytes: Bytes alive while it runs: what was there, its outputs and its workspace.
        num_forward: How many of them belong to the forward pass.
    """

    nodes: Ints
    live_bytes: Ints
    num_forward: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return int(self.live_bytes.max()) if len(self.live_bytes) else 0

    @property
    def peak_at(self) -> tuple[Literal["forward", "backward"], int]:
        """The pass and the node at which the peak is reached first."""
        when = int(self.live_bytes.argmax())
        return ("forward" if when < self.num_forward else "backward", int(self.nodes[when]))


def input_bytes(problem: RematProblem) -> int:
    """Bytes of the inputs of the joint graph, each storage once."""
    return int(problem.num_bytes[problem.region == NodeRegion.INPUT].sum())


def simulate_plan(
    problem: RematProblem,
    saved: Mask,
    *,
    order: BackwardOrder,
    resident_bytes: int = 0,
    forward_bytes: int = 0,
    again: Mask | None = None,
) -> PlanTimeline:
    """Follow every storage of a plan through the forward and the backward pass.

    The inputs stay alive throughout, what the forward pass returns from there on, gradients to the
    end of the step. A view keeps the whole storage that it lies in. The state of a generator is
    kept from a random operation to its replay.

    Args:
        problem: The joint graph.
        saved: What the plan keeps.
        order: The order of the backward pass.
        resident_bytes: Bytes beside the graph's inputs that are alive all the time, such as the
            optimizer's state.
        forward_bytes: Bytes alive during the forward pass only.
        again: ``recomputed(problem, saved)``, if it is known.
    """
    base_bytes = resident_bytes + input_bytes(problem)
    replayed = problem.replayed(saved, again)
    forward, kept_bytes = _forward(problem, saved, replayed)
    backward = _backward(problem, saved, replayed, order)
    live = np.concatenate([forward[1] + forward_bytes, kept_bytes + backward]) + base_bytes
    nodes = np.concatenate([forward[0], order.nodes])
    return PlanTimeline(nodes, live, len(forward[0]))


def _forward(problem: RematProblem, saved: Mask, replayed: Ints) -> tuple[tuple[Ints, Ints], int]:
    """((nodes, bytes alive at each), bytes alive at the end)."""
    nodes = forward_nodes(problem, saved)
    count = len(nodes)
    time = np.full(len(problem), -1, dtype=np.int64)
    time[nodes] = np.arange(count)
    sizes = problem.num_bytes
    # A storage is there from its owner's execution to the last reader of any view of it.
    bases = nodes[(problem.base[nodes] == nodes) & (sizes[nodes] > 0)]
    last = np.full(len(problem), -1, dtype=np.int64)
    last[bases] = np.maximum(time[bases], time[problem.owner[bases]])
    producers, users = problem.edges
    runs = time[users] >= 0
    np.maximum.at(last, problem.base[producers[runs]], time[users[runs]])
    stays = np.zeros(len(problem), dtype=np.bool_)
    stays[problem.base[saved]] = True
    stays[problem.base[list(problem.forward_outputs)]] = True
    changes = np.zeros(count + 1, dtype=np.int64)
    np.add.at(changes, time[problem.owner[bases]], sizes[bases])
    freed = bases[~stays[bases]]
    np.add.at(changes, last[freed] + 1, -sizes[freed])
    np.add.at(changes, time[replayed], problem.replay_bytes[replayed])
    live = np.cumsum(changes)
    return (nodes, live[:count] + problem.workspace_bytes[nodes]), int(live[count])


def _backward(problem: RematProblem, saved: Mask, replayed: Ints, order: BackwardOrder) -> Ints:
    """Bytes alive at each execution, beyond those alive when the pass starts."""
    nodes = order.nodes
    count = len(nodes)
    base, sizes = problem.base, problem.num_bytes
    readers, read, sources = order.reads(problem)
    is_made = sources >= 0
    storage = _storages(problem, nodes, readers, read, sources)
    # A storage is there from its owner's execution to the last reader of any view of it.
    allocated_at = np.arange(count)
    items = is_made & (problem.owner[nodes[readers]] == read)
    allocated_at[readers[items]] = sources[items]
    lies_in = np.where(is_made, storage[sources], -1 - base[read])
    last = np.arange(count)
    own = lies_in >= 0
    np.maximum.at(last, lies_in[own], readers[own])
    last_of_saved = np.full(len(problem), -1, dtype=np.int64)
    np.maximum.at(last_of_saved, -1 - lies_in[~own], readers[~own])

    changes = np.zeros(count + 1, dtype=np.int64)
    allocated = np.flatnonzero((storage == np.arange(count)) & (sizes[nodes] > 0))
    np.add.at(changes, allocated_at[allocated], sizes[nodes[allocated]])
    stays = np.zeros(count, dtype=np.bool_)
    final = np.full(len(problem), -1, dtype=np.int64)
    final[nodes] = np.arange(count)  # of several executions the last
    returned = final[list(problem.backward_outputs)]
    returned = storage[returned[returned >= 0]]
    stays[returned[returned >= 0]] = True
    freed = allocated[~stays[allocated]]
    np.add.at(changes, last[freed] + 1, -sizes[nodes[freed]])
    held = np.zeros(len(problem), dtype=np.bool_)
    held[base[saved]] = True
    held[base[[*problem.forward_outputs, *problem.backward_outputs]]] = False
    given_up = np.flatnonzero(held & (problem.region == NodeRegion.FORWARD))
    np.add.at(changes, last_of_saved[given_up] + 1, -sizes[given_up])
    # While it replays, an operation puts the generator's present state aside.
    state = np.zeros(len(problem), dtype=np.int64)
    state[replayed] = problem.replay_bytes[replayed]
    np.add.at(changes, 1 + np.arange(count), -state[nodes])
    # Of an operation with several outputs all are made, also those that nobody takes here.
    taken = np.zeros(count, dtype=np.int64)
    np.add.at(taken, sources[items], sizes[nodes[readers[items]]])
    untaken = problem.item_bytes[nodes] - taken
    return np.cumsum(changes[:count]) + problem.workspace_bytes[nodes] + state[nodes] + untaken


def _storages(problem: RematProblem, nodes: Ints, readers: Ints, read: Ints, sources: Ints) -> Ints:
    """The execution in whose storage each value lies, or -1 - its base if that was there before."""
    base = problem.base[nodes]
    parent = np.arange(len(nodes))
    views = (sources >= 0) & (base != nodes)[readers] & (problem.base[read] == base[readers])
    parent[readers[views]] = sources[views]
    while True:
        further = parent[parent]
        if (further == parent).all():
            break
        parent = further
    return np.where(base[parent] == nodes[parent], parent, -1 - base)

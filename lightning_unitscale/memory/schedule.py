"""Order the operations of a plan, and simulate the bytes that are alive while they run.

The order is the forward pass, then the backward pass with its recomputation. Each storage counts
once, from its allocation to its last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_unitscale.memory.problem import (
    Ints,
    Mask,
    NodeRegion,
    RematProblem,
    leading_to,
    recomputed,
)


@dataclass(frozen=True, eq=False)
class BackwardOrder:
    """Executions of a backward pass, in order. A node may be executed several times."""

    nodes: Ints  # of each execution
    # For each input of each execution in turn, the execution that it comes from, or -1 if it is
    # already there.
    sources: Ints

    def again(self, problem: RematProblem) -> Ints:
        """Return the nodes that run again, once for each additional run."""
        nodes = self.nodes
        return nodes[(problem.region[nodes] == NodeRegion.FORWARD) & problem.in_forward[nodes]]


def lazy_order(
    inputs: Sequence[Sequence[int]],
    anchors: Sequence[int],
    runs: Sequence[bool],
    *,
    wanted_at_end: Iterable[int] = (),
    segments: Sequence[int] | None = None,
    kept: Sequence[bool] | None = None,
) -> list[int]:
    """Order the anchors as given, each after the missing nodes that it needs."""
    # So a recomputed value is computed as late as possible, and lives as short as possible. With
    # ``segments``, a value that is not in ``kept`` is dropped where the segment of the anchors
    # changes. It is recomputed where a later anchor needs it.
    is_there = [not executed for executed in runs]
    nodes: list[int] = []

    def execute(wanted: list[int]) -> list[int]:
        """Execute nodes and their missing ancestors, in topological order, and return all."""
        needed: list[int] = []
        while wanted:
            node = wanted.pop()
            if not is_there[node]:
                is_there[node] = True
                needed.append(node)
                wanted.extend(inputs[node])
        needed.sort()
        nodes.extend(needed)
        return needed

    dropped: list[int] = []
    before = None
    for anchor in anchors:
        if segments is not None and segments[anchor] != before:
            for node in dropped:
                is_there[node] = False
            dropped.clear()
            before = segments[anchor]
        for read in inputs[anchor]:
            if not is_there[read]:
                needed = execute([anchor])
                if kept is not None:
                    dropped += [node for node in needed if node != anchor and not kept[node]]
                break
        else:  # most anchors need no other node, and this loop runs for each plan
            if not is_there[anchor]:
                is_there[anchor] = True
                nodes.append(anchor)
    execute(list(wanted_at_end))
    return nodes


def backward_order(
    problem: RematProblem,
    saved: Mask,
    *,
    segments: Sequence[int] | None = None,
    kept: Mask | None = None,
) -> BackwardOrder:
    """Return the order of a plan's backward pass."""
    is_backward = problem.region == NodeRegion.BACKWARD
    order = lazy_order(
        problem.inputs_of,
        np.flatnonzero(is_backward).tolist(),
        (recomputed(problem, saved) | is_backward).tolist(),
        wanted_at_end=problem.backward_outputs,
        segments=segments,
        kept=None if kept is None else kept.tolist(),
    )
    nodes = np.array(order, dtype=np.int64)
    # Each input comes from the last execution of its node before the reader's. Executions are
    # found by one number that orders them by node, then by place.
    readers, read = problem.reads(nodes)
    by_node = np.argsort(nodes, kind="stable")
    ordered = np.append(-1, by_node)
    keys = nodes[by_node] * len(nodes) + by_node
    found = ordered[np.searchsorted(keys, read * len(nodes) + readers)]
    is_made = (found >= 0) & (nodes[found] == read)
    return BackwardOrder(nodes, np.where(is_made, found, -1))


def forward_nodes(problem: RematProblem, saved: Mask) -> Ints:
    """Return the forward pass in order: returned and saved nodes, and their ancestors."""
    is_forward = problem.region == NodeRegion.FORWARD
    runs = problem.in_forward & is_forward
    extra = np.flatnonzero(saved & is_forward & ~runs)
    if len(extra):
        runs = runs | leading_to(extra.tolist(), problem.inputs_of, runs | ~is_forward)
    return np.flatnonzero(runs)


@dataclass(frozen=True)
class PlanTimeline:
    """Bytes alive while each operation of a step runs."""

    nodes: Ints  # of each operation, forward pass first
    live_bytes: Ints  # while it runs: earlier storages, its outputs and its workspace
    num_forward: int  # operations of the forward pass

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes alive at once."""
        return int(self.live_bytes.max(initial=0))

    @property
    def peak_at(self) -> tuple[Literal["forward", "backward"], int]:
        """Return the pass and the node at which the peak is reached first."""
        when = int(self.live_bytes.argmax())
        return ("forward" if when < self.num_forward else "backward", int(self.nodes[when]))


def input_bytes(problem: RematProblem) -> int:
    """Return the bytes of the inputs of the joint graph, each storage once."""
    return int(problem.num_bytes[problem.region == NodeRegion.INPUT].sum())


def simulate_plan(
    problem: RematProblem,
    saved: Mask,
    order: BackwardOrder,
    resident_bytes: int = 0,
    forward_bytes: int = 0,
) -> PlanTimeline:
    """Follow every storage of a plan through the forward and the backward pass."""
    # Inputs, returned values of the forward pass, and gradients live to the end of the step. A view
    # keeps its whole storage. A generator's state is kept from a random operation to its replay.
    forward = forward_nodes(problem, saved)
    num_forward = len(forward)
    nodes = np.concatenate([forward, order.nodes])
    executions = np.arange(len(nodes))
    sizes, base = problem.num_bytes, problem.base
    # Execution of each node in the forward pass. The inputs have none.
    made = np.full(len(problem), -1, dtype=np.int64)
    made[forward] = executions[:num_forward]
    readers, read = problem.reads(nodes)
    sources = made[read]
    in_backward = np.flatnonzero(readers >= num_forward)
    again = order.sources >= 0
    sources[in_backward[again]] = order.sources[again] + num_forward

    is_made = sources >= 0
    views = is_made & (base[nodes] != nodes)[readers] & (base[read] == base[nodes[readers]])
    storage = executions.copy()
    storage[readers[views]] = sources[views]
    while ((further := storage[storage]) != storage).any():
        storage = further
    # A storage lives from its owner's execution to the last reader of any view of it.
    last = executions.copy()
    np.maximum.at(last, storage[sources[is_made]], readers[is_made])
    kept = storage[made[saved & (made >= 0)]]
    last[kept] = np.maximum(last[kept], num_forward - 1)
    final = made.copy()
    final[order.nodes] = executions[num_forward:]  # the last of several executions
    returned = np.concatenate(
        [made[list(problem.forward_outputs)], final[list(problem.backward_outputs)]]
    )
    last[storage[returned[returned >= 0]]] = len(nodes)

    items = is_made & (problem.owner[nodes[readers]] == read)
    allocated_at = executions.copy()
    allocated_at[readers[items]] = sources[items]
    # A view of an input allocates nothing.
    allocated = np.where(base[nodes] == nodes, sizes[nodes], 0)
    changes = np.zeros(len(nodes) + 2, dtype=np.int64)
    np.add.at(changes, allocated_at, allocated)
    np.add.at(changes, last + 1, -allocated)
    # A replayed operation saves the generator's current state while it runs.
    state = np.zeros(len(problem), dtype=np.int64)
    replayed = problem.replayed(saved)
    state[replayed] = problem.replay_bytes[replayed]
    changes[made[replayed]] += state[replayed]
    aside = state[nodes]
    aside[:num_forward] = 0
    changes[1:-1] -= aside
    # An operation with several outputs makes all of them, also the unread ones.
    taken = np.zeros(len(nodes), dtype=np.int64)
    np.add.at(taken, sources[items], sizes[nodes[readers[items]]])
    untaken = problem.item_bytes[nodes] - taken
    live = np.cumsum(changes[:-2]) + problem.workspace_bytes[nodes] + aside + untaken
    live[:num_forward] += forward_bytes
    return PlanTimeline(nodes, live + (resident_bytes + input_bytes(problem)), num_forward)

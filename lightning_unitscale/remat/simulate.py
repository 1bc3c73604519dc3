"""Bytes alive over a step of a plan: each storage once, from its allocation to its last use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_unitscale.remat.problem import Ints, Mask, Region, RematProblem
from lightning_unitscale.remat.schedule import BackwardOrder, backward_order, forward_nodes


@dataclass(frozen=True)
class Timeline:
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
    return int(problem.num_bytes[problem.region == Region.INPUT].sum())


def simulate(
    problem: RematProblem,
    saved: Mask,
    *,
    resident_bytes: int = 0,
    forward_bytes: int = 0,
    order: BackwardOrder | None = None,
) -> Timeline:
    """Follow every storage of a plan through the forward and the backward pass.

    The inputs stay alive throughout, what the forward pass returns from there on, gradients to the
    end of the step. A view keeps the whole storage that it lies in.

    Args:
        problem: The joint graph.
        saved: What the plan keeps.
        resident_bytes: Bytes beside the graph's inputs that are alive all the time, such as the
            optimizer's state.
        forward_bytes: Bytes alive during the forward pass only.
        order: The order of the backward pass; by default the plan's own.
    """
    base_bytes = resident_bytes + input_bytes(problem)
    forward, kept_bytes = _forward(problem, saved)
    order = backward_order(problem, saved) if order is None else order
    backward = _backward(problem, saved, order)
    # States of generators are kept from the moment of drawing; counted from the start.
    base_bytes += problem.replayed_bytes(saved)
    live = np.concatenate([forward[1] + forward_bytes, kept_bytes + backward]) + base_bytes
    nodes = np.concatenate([forward[0], np.array(order.nodes, dtype=np.int64)])
    return Timeline(nodes, live, len(forward[0]))


def _forward(problem: RematProblem, saved: Mask) -> tuple[tuple[Ints, Ints], int]:
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
    live = np.cumsum(changes)
    return (nodes, live[:count] + problem.workspace[nodes]), int(live[count])


def _backward(problem: RematProblem, saved: Mask, order: BackwardOrder) -> Ints:
    """Bytes alive at each execution, beyond those alive when the pass starts."""
    count = len(order.nodes)
    bases, owners = problem.base.tolist(), problem.owner.tolist()
    sizes = problem.num_bytes.tolist()
    inputs = [node.inputs for node in problem.nodes]
    # Which storage an execution's value lies in: that of an execution, or -1 - base for one that
    # was there when the pass started.
    storage: list[int] = [0] * count
    last: list[int] = list(range(count))
    last_of_saved: dict[int, int] = {}
    allocated_at: list[int] = list(range(count))
    for now, (node, sources) in enumerate(zip(order.nodes, order.sources, strict=True)):
        base = bases[node]
        where = now if base == node else -1 - base
        for producer, source in zip(inputs[node], sources, strict=True):
            if source < 0:
                last_of_saved[bases[producer]] = now
                continue
            lies_in = storage[source]
            if base != node and bases[producer] == base:
                where = lies_in
            if owners[node] == producer:
                allocated_at[now] = source
            if lies_in >= 0:
                last[lies_in] = now
            else:
                last_of_saved[-1 - lies_in] = now
        storage[now] = where
    stays = {storage[now] for now in _last_executions(order.nodes, problem.backward_outputs)}
    changes = [0] * (count + 1)
    for now, node in enumerate(order.nodes):
        if storage[now] == now and sizes[node]:
            changes[allocated_at[now]] += sizes[node]
            if now not in stays:
                changes[last[now] + 1] -= sizes[node]
    returned = {bases[index] for index in problem.forward_outputs}
    for index in problem.backward_outputs:
        returned.add(bases[index])
    region = problem.region
    for base in {bases[int(index)] for index in np.flatnonzero(saved)}:
        if region[base] == Region.FORWARD and base not in returned:
            changes[last_of_saved.get(base, -1) + 1] -= sizes[base]
    live = np.cumsum(np.array(changes[:count], dtype=np.int64))
    return live + problem.workspace[np.array(order.nodes, dtype=np.int64)]


def _last_executions(nodes: Sequence[int], wanted: Sequence[int]) -> list[int]:
    missing = set(wanted)
    found = []
    for now in range(len(nodes) - 1, -1, -1):
        if nodes[now] in missing:
            missing.discard(nodes[now])
            found.append(now)
    return found

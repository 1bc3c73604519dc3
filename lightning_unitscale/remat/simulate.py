"""Bytes alive over a step of a plan: each storage once, from its allocation to its last use."""

from __future__ import annotations

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
    again: Mask | None = None,
) -> Timeline:
    """Follow every storage of a plan through the forward and the backward pass.

    The inputs stay alive throughout, what the forward pass returns from there on, gradients to the
    end of the step. A view keeps the whole storage that it lies in. The state of a generator is
    kept from a random operation to its replay.

    Args:
        problem: The joint graph.
        saved: What the plan keeps.
        resident_bytes: Bytes beside the graph's inputs that are alive all the time, such as the
            optimizer's state.
        forward_bytes: Bytes alive during the forward pass only.
        order: The order of the backward pass; by default the plan's own.
        again: ``recomputed(problem, saved)``, if it is known.
    """
    base_bytes = resident_bytes + input_bytes(problem)
    replayed = problem.replayed(saved, again)
    forward, kept_bytes = _forward(problem, saved, replayed)
    order = backward_order(problem, saved, again=again) if order is None else order
    backward = _backward(problem, saved, replayed, order)
    live = np.concatenate([forward[1] + forward_bytes, kept_bytes + backward]) + base_bytes
    nodes = np.concatenate([forward[0], order.nodes])
    return Timeline(nodes, live, len(forward[0]))


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
    return (nodes, live[:count] + problem.workspace[nodes]), int(live[count])


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
    made = np.flatnonzero((storage == np.arange(count)) & (sizes[nodes] > 0))
    np.add.at(changes, allocated_at[made], sizes[nodes[made]])
    stays = np.zeros(count, dtype=np.bool_)
    final = np.full(len(problem), -1, dtype=np.int64)
    final[nodes] = np.arange(count)  # of several executions the last
    returned = final[list(problem.backward_outputs)]
    returned = storage[returned[returned >= 0]]
    stays[returned[returned >= 0]] = True
    freed = made[~stays[made]]
    np.add.at(changes, last[freed] + 1, -sizes[nodes[freed]])
    held = np.zeros(len(problem), dtype=np.bool_)
    held[base[saved]] = True
    held[base[[*problem.forward_outputs, *problem.backward_outputs]]] = False
    given_up = np.flatnonzero(held & (problem.region == Region.FORWARD))
    np.add.at(changes, last_of_saved[given_up] + 1, -sizes[given_up])
    # While it replays, an operation puts the generator's present state aside.
    state = np.zeros(len(problem), dtype=np.int64)
    state[replayed] = problem.replay_bytes[replayed]
    np.add.at(changes, 1 + np.arange(count), -state[nodes])
    # Of an operation with several outputs all are made, also those that nobody takes here.
    taken = np.zeros(count, dtype=np.int64)
    np.add.at(taken, sources[items], sizes[nodes[readers[items]]])
    untaken = problem.item_bytes[nodes] - taken
    return np.cumsum(changes[:count]) + problem.workspace[nodes] + state[nodes] + untaken


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

"""Describe a joint forward and backward graph to the planner by numbers, without tensors."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class NodeRegion(enum.IntEnum):
    """Region in which a node of the joint graph can be computed."""

    INPUT = 0  # always alive: parameters, buffers, batch, tangents
    FORWARD = 1  # from the inputs alone, so in the forward and again in the backward pass
    BACKWARD = 2  # depends on a tangent, or must run in the backward pass


@dataclass(frozen=True)
class RematNode:
    """One node of the joint graph."""

    name: str
    kind: str  # its operator, for reports and for comparing blocks
    inputs: tuple[int, ...]  # the nodes it reads, each before its own index
    region: NodeRegion
    base: int  # the node whose storage its tensor lies in: itself unless it is a view
    # The node that allocates that storage: ``base``, or the operator of which ``base`` is one of
    # several outputs.
    owner: int
    num_bytes: int = 0  # of the storage if ``base`` is the node itself, else 0
    workspace_bytes: int = 0  # allocated and freed while it runs
    seconds: float = 0.0  # estimated
    flops: float = 0.0  # of its matmuls, where a multiply-add counts as two
    can_save: bool = True  # from the forward for the backward pass
    can_recompute: bool = True  # in the backward pass
    in_forward: bool = True  # the forward pass computes it in every plan
    replay_bytes: int = 0  # generator's state, kept instead of its value if it is recomputed
    can_offload: bool = False  # a dense tensor that may wait in host memory between the passes

    def moved(self, inputs: tuple[int, ...], base: int, owner: int) -> RematNode:
        """Return the same operation in another graph, faster than ``dataclasses.replace``."""
        node: RematNode = object.__new__(RematNode)
        node.__dict__.update(self.__dict__, inputs=inputs, base=base, owner=owner)
        return node


Number = TypeVar("Number", bound=np.generic)


def _column(attribute: str, dtype: type[Number]) -> cached_property[npt.NDArray[Number]]:
    """Return an attribute of all nodes as one array, made at the first access."""
    return cached_property(
        lambda problem: np.array([getattr(node, attribute) for node in problem.nodes], dtype)
    )


@dataclass(frozen=True)
class RematProblem:
    """Joint graph in topological order, forward nodes before the backward nodes they feed."""

    nodes: tuple[RematNode, ...]
    forward_outputs: tuple[int, ...] = ()  # returned to the caller
    backward_outputs: tuple[int, ...] = ()  # the gradients
    sizes: tuple[int, ...] = ()  # assumed for sizes that change from call to call

    # The attributes of the nodes as arrays.
    region = _column("region", np.int64)
    base = _column("base", np.int64)
    owner = _column("owner", np.int64)
    num_bytes = _column("num_bytes", np.int64)
    workspace_bytes = _column("workspace_bytes", np.int64)
    replay_bytes = _column("replay_bytes", np.int64)
    seconds = _column("seconds", np.float64)
    flops = _column("flops", np.float64)
    in_forward = _column("in_forward", np.bool_)
    can_save = _column("can_save", np.bool_)
    can_recompute = _column("can_recompute", np.bool_)
    can_offload = _column("can_offload", np.bool_)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def edges(self) -> tuple[Ints, Ints]:
        """Return (producer, user) of every edge, sorted by user."""
        producers = [i for node in self.nodes for i in node.inputs]
        users = [u for u, node in enumerate(self.nodes) for _ in node.inputs]
        return np.array(producers, dtype=np.int64), np.array(users, dtype=np.int64)

    @cached_property
    def _first_edge(self) -> Ints:
        """Return the first edge of each user, and the number of edges."""
        return np.searchsorted(self.edges[1], np.arange(len(self) + 1))

    @cached_property
    def inputs_of(self) -> tuple[tuple[int, ...], ...]:
        """Return the inputs of each node."""
        return tuple(node.inputs for node in self.nodes)

    def reads(self, executed: Ints) -> tuple[Ints, Ints]:
        """Return (execution, node that it reads) of every input of executed nodes."""
        producers, _ = self.edges
        starts = self._first_edge
        first, counts = starts[executed], np.diff(starts)[executed]
        readers = np.repeat(np.arange(len(executed)), counts)
        within = np.arange(len(readers)) - np.repeat(np.cumsum(counts) - counts, counts)
        return readers, producers[first[readers] + within]

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Return the users of each node, ascending."""
        users: list[list[int]] = [[] for _ in self.nodes]
        for user, node in enumerate(self.nodes):
            for producer in node.inputs:
                users[producer].append(user)
        return tuple(tuple(readers) for readers in users)

    @cached_property
    def needed(self) -> Mask:
        """Mark nodes that the backward pass may need: backward nodes and their ancestors."""
        backward = np.flatnonzero(self.region == NodeRegion.BACKWARD).tolist()
        roots = [*backward, *self.backward_outputs]
        return leading_to(roots, self.inputs_of, np.zeros(len(self), dtype=np.bool_))

    @cached_property
    def read_in_backward(self) -> Mask:
        """Mark nodes that the backward pass reads itself, in every plan."""
        producers, users = self.edges
        is_read = np.zeros(len(self), dtype=np.bool_)
        is_read[producers[self.region[users] == NodeRegion.BACKWARD]] = True
        is_read[list(self.backward_outputs)] = True
        return is_read

    @cached_property
    def _is_item(self) -> Mask:
        """Mark nodes that are one of several outputs of an operator, which owns them."""
        indices = np.arange(len(self))
        return (self.owner != indices) & (self.base == indices)

    @cached_property
    def is_tuple(self) -> Mask:
        """Mark operators with several outputs."""
        return np.bincount(self.owner[self._is_item], minlength=len(self)) > 0

    @cached_property
    def item_bytes(self) -> Ints:
        """Return the bytes of the outputs of each operator that has several, or 0."""
        num_bytes = np.zeros(len(self), dtype=np.int64)
        np.add.at(num_bytes, self.owner[self._is_item], self.num_bytes[self._is_item])
        return num_bytes

    @cached_property
    def tagged(self) -> Mask:
        """Mark nodes that a user's checkpoint recomputes, so that they cannot be saved."""
        own = (self.base == np.arange(len(self))) & (self.num_bytes > 0)
        tagged = own & ~self.can_save & self.can_recompute
        tagged[self.owner[tagged]] = True
        return tagged

    def saved_bytes(self, saved: Mask) -> int:
        """Return the bytes that a plan keeps for the backward pass besides those alive anyway."""
        kept = np.zeros(len(self), dtype=np.bool_)
        kept[self.base[saved]] = True
        kept[self.base[list(self.forward_outputs)]] = False
        kept &= self.region != NodeRegion.INPUT
        states = self.replay_bytes[self.replayed(saved)]
        return int(self.num_bytes[kept].sum()) + int(states.sum())

    def replayed(self, saved: Mask) -> Ints:
        """Return the random operations that a plan replays from the saved generator's state."""
        random = np.flatnonzero(self.replay_bytes)
        return random[recomputed(self, saved)[random]] if len(random) else random

    @cached_property
    def _recomputed(self) -> dict[bytes, Mask]:
        """Cache recomputed nodes by saved nodes, since planning asks several times."""
        return {}


def wanted(problem: RematProblem) -> Mask:
    """Mark forward nodes that the backward pass reads itself, in every plan."""
    return problem.read_in_backward & (problem.region == NodeRegion.FORWARD)


def leading_to(roots: Iterable[int], inputs: Sequence[Sequence[int]], stops: Mask) -> Mask:
    """Return the roots and their ancestors. The search ends before ``stops``."""
    # This loop uses lists, because each step is too small for numpy.
    is_seen: list[bool] = stops.tolist()
    found: list[int] = []
    pending = list(roots)
    while pending:
        index = pending.pop()
        if not is_seen[index]:
            is_seen[index] = True
            found.append(index)
            pending.extend(inputs[index])
    reached = np.zeros(len(stops), dtype=np.bool_)
    reached[found] = True
    return reached


def recomputed(problem: RematProblem, saved: Mask) -> Mask:
    """Return the forward nodes that run in the backward pass when ``saved`` is kept."""
    known = problem._recomputed.get(saved.tobytes())
    if known is not None:
        return known
    ends = saved | (problem.region != NodeRegion.FORWARD)
    runs = leading_to(np.flatnonzero(wanted(problem) & ~ends).tolist(), problem.inputs_of, ends)
    wrong = np.flatnonzero(runs & ~problem.can_recompute)
    if len(wrong):
        node = problem.nodes[wrong[-1]]
        raise ValueError(
            f"saved: {node.name} ({node.kind}) is not saved. It must not run again in the backward "
            "pass. Save it, or every value that is computed from it and read by the backward pass."
        )
    problem._recomputed[saved.tobytes()] = runs
    return runs

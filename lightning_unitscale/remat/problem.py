"""What a planner has to know of a joint forward and backward graph: numbers, and no tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class NodeRegion(enum.IntEnum):
    """Where a node of the joint graph can be computed."""

    INPUT = 0  # there all the time: parameters, buffers, batch, tangents
    FORWARD = 1  # from the inputs alone, so in the forward and again in the backward pass
    BACKWARD = 2  # needs a tangent, or has to run in the backward pass


@dataclass(frozen=True)
class RematNode:
    """One node of the joint graph.

    Attributes:
        name: Name in the joint graph.
        kind: Its operation, for reports and for telling equal blocks.
        inputs: Indices of the nodes it reads, each smaller than its own.
        region: Where it can be computed.
        base: The node whose storage this one's tensor lies in: itself unless it is a view.
        owner: The node whose execution allocates that storage: ``base``, or the operation of which
            ``base`` is one of several outputs.
        num_bytes: Size of the storage in bytes if ``base`` is the node itself, else 0.
        workspace_bytes: What the operation allocates and frees while it runs.
        seconds: Estimated time of running it once.
        flops: Floating-point operations of its products; a multiply-add counts as two.
        can_save: Whether its value may be kept from the forward for the backward pass.
        can_recompute: Whether it may run again in the backward pass.
        in_forward: Whether the forward pass computes it whatever the backward pass needs.
        replay_bytes: What is kept instead of its value if it runs again: its generator's state.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    region: NodeRegion
    base: int
    owner: int
    num_bytes: int = 0
    workspace_bytes: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    can_save: bool = True
    can_recompute: bool = True
    in_forward: bool = True
    replay_bytes: int = 0

    def moved(self, inputs: tuple[int, ...], base: int, owner: int) -> RematNode:
        """The same operation in another graph; ``dataclasses.replace`` is many times slower."""
        node: RematNode = object.__new__(RematNode)
        node.__dict__.update(self.__dict__, inputs=inputs, base=base, owner=owner)
        return node


Number = TypeVar("Number", bound=np.generic)


def _column(attribute: str, dtype: type[Number]) -> cached_property[npt.NDArray[Number]]:
    """An attribute of all nodes as one array, made when it is first asked for."""
    return cached_property(
        lambda problem: np.array([getattr(node, attribute) for node in problem.nodes], dtype)
    )


@dataclass(frozen=True)
class RematProblem:
    """A joint graph in topological order, forward nodes before the backward nodes that need them.

    Attributes:
        nodes: The nodes.
        forward_outputs: Indices of what the forward pass returns to the caller.
        backward_outputs: Indices of what the backward pass returns: the gradients.
        sizes: The numbers assumed for sizes that change from call to call.
    """

    nodes: tuple[RematNode, ...]
    forward_outputs: tuple[int, ...] = ()
    backward_outputs: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

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

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def edges(self) -> tuple[Ints, Ints]:
        """(producer, user) of every edge, sorted by user."""
        producers = [i for node in self.nodes for i in node.inputs]
        users = [u for u, node in enumerate(self.nodes) for _ in node.inputs]
        return np.array(producers, dtype=np.int64), np.array(users, dtype=np.int64)

    @cached_property
    def inputs_of(self) -> tuple[tuple[int, ...], ...]:
        """Inputs of each node."""
        return tuple(node.inputs for node in self.nodes)

    def reads(self, executed: Ints) -> tuple[Ints, Ints]:
        """(execution, node that it reads) of every input of nodes that are executed in turn."""
        producers, users = self.edges
        starts = np.searchsorted(users, np.arange(len(self) + 1))
        first, counts = starts[executed], np.diff(starts)[executed]
        readers = np.repeat(np.arange(len(executed)), counts)
        within = np.arange(len(readers)) - np.repeat(np.cumsum(counts) - counts, counts)
        return readers, producers[first[readers] + within]

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Users of each node, ascending."""
        users: list[list[int]] = [[] for _ in self.nodes]
        for user, node in enumerate(self.nodes):
            for producer in node.inputs:
                users[producer].append(user)
        return tuple(tuple(readers) for readers in users)

    @cached_property
    def needed(self) -> Mask:
        """Nodes that the backward pass needs in some plan: backward nodes and what leads there."""
        needed = np.zeros(len(self), dtype=np.bool_)
        for index in self.backward_outputs:
            needed[index] = True
        for index in range(len(self) - 1, -1, -1):
            node = self.nodes[index]
            if node.region is NodeRegion.BACKWARD:
                # The joint graph holds no dead nodes: what is in the backward pass is needed.
                needed[index] = True
            if needed[index]:
                needed[list(node.inputs)] = True
        return needed

    @cached_property
    def wanted(self) -> Mask:
        """Forward nodes that the backward pass reads itself, in every plan."""
        wanted = np.zeros(len(self), dtype=np.bool_)
        for node in self.nodes:
            if node.region is NodeRegion.BACKWARD:
                wanted[list(node.inputs)] = True
        wanted[list(self.backward_outputs)] = True
        return wanted & (self.region == NodeRegion.FORWARD)

    @cached_property
    def is_tuple(self) -> Mask:
        """Operations with several outputs; each of these is a node that they own."""
        indices = np.arange(len(self))
        items = (self.owner != indices) & (self.base == indices)
        is_tuple = np.zeros(len(self), dtype=np.bool_)
        is_tuple[self.owner[items]] = True
        return is_tuple

    @cached_property
    def item_bytes(self) -> Ints:
        """Bytes of the outputs of each operation that has several, 0 for the others."""
        num_bytes = np.zeros(len(self), dtype=np.int64)
        items = np.flatnonzero((self.owner != np.arange(len(self))) & (self.num_bytes > 0))
        np.add.at(num_bytes, self.owner[items], self.num_bytes[items])
        return num_bytes

    @cached_property
    def tagged(self) -> Mask:
        """What a user's checkpoint wants to run again, so that it cannot be saved."""
        tagged = np.array(
            [
                node.base == i and not node.can_save and node.can_recompute and node.num_bytes > 0
                for i, node in enumerate(self.nodes)
            ],
            dtype=np.bool_,
        )
        tagged[self.owner[tagged]] = True
        return tagged

    def saved_bytes(self, saved: Mask) -> int:
        """Bytes that a plan keeps for the backward pass beyond what is there anyway."""
        kept = np.zeros(len(self), dtype=np.bool_)
        kept[self.base[saved]] = True
        kept[self.base[list(self.forward_outputs)]] = False
        kept &= self.region != NodeRegion.INPUT
        states = self.replay_bytes[self.replayed(saved)]
        return int(self.num_bytes[kept].sum()) + int(states.sum())

    def replayed(self, saved: Mask) -> Ints:
        """Random operations that a plan runs again, from the generator's state that it keeps."""
        random = self._random
        return random[recomputed(self, saved)[random]] if len(random) else random

    @cached_property
    def _random(self) -> Ints:
        return np.flatnonzero(self.replay_bytes)

    @cached_property
    def _recomputed(self) -> dict[bytes, Mask]:
        """What runs again, by what is saved; planning asks for the same several times."""
        return {}


def recomputed(problem: RematProblem, saved: Mask) -> Mask:
    """Forward nodes that run in the backward pass when ``saved`` is kept."""
    known = problem._recomputed.get(saved.tobytes())
    if known is not None:
        return known
    # Lists: a step of this loop is too small for numpy.
    ends = saved | (problem.region != NodeRegion.FORWARD)
    reached = problem.wanted & ~ends
    pending: list[int] = np.flatnonzero(reached).tolist()
    seen: list[bool] = (reached | ends).tolist()
    inputs = problem.inputs_of
    for index in pending:  # which grows
        for producer in inputs[index]:
            if not seen[producer]:
                seen[producer] = True
                pending.append(producer)
    runs = np.zeros(len(problem), dtype=np.bool_)
    runs[pending] = True
    wrong = np.flatnonzero(runs & ~problem.can_recompute)
    if len(wrong):
        node = problem.nodes[wrong[-1]]
        raise ValueError(
            f"saved: {node.name} ({node.kind}) must not run again in the backward pass and is not "
            "saved; expected it, or all that leads from it to the backward pass, among the saved "
            "values."
        )
    problem._recomputed[saved.tobytes()] = runs
    return runs

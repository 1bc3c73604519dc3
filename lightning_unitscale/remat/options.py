"""What can be done with a run of blocks: for each way, bytes kept, time, and what it needs at most.

References:
    Feng, Huang, "Optimal Gradient Checkpoint Search" (2021), and Beaumont et al., "Rotor" (2019),
    on chains of blocks; here each block's own ways come from cuts of its graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_unitscale.remat.blocks import Blocks, segment_members
from lightning_unitscale.remat.min_cut import CutNetwork
from lightning_unitscale.remat.problem import (
    Floats,
    Ints,
    Mask,
    NodeRegion,
    RematNode,
    RematProblem,
    recomputed,
)
from lightning_unitscale.remat.schedule import backward_order, simulate_plan

# Cuts of one run of blocks, numbers of blocks in a run, and those that any blocks may form.
_MAX_CUTS = 10
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_ANY_BLOCKS = 3


@dataclass(frozen=True)
class Option:
    """One way to run a run of blocks; places are those among the run's nodes.

    Attributes:
        saved: Places of the nodes whose values are kept, the last block's output among them.
        dropped: Places of what runs again more than once, because it is not kept from one block of
            the run to the next.
        seconds: Time of what runs again.
        saved_bytes: Bytes kept.
        forward_bytes: The most that is alive during its forward pass, beyond what was before.
        backward_bytes: The most that is alive during its backward pass, its kept bytes included.
    """

    saved: tuple[int, ...]
    dropped: tuple[int, ...]
    seconds: float
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class EndingRuns:
    """The options of all runs of blocks that end at one boundary, and their numbers as arrays.

    Attributes:
        options: The options, run after run, those of one run the fastest first.
        starts: First block of the run of each option.
        seconds: Time of each option.
        saved_bytes: Bytes that each keeps.
        forward_bytes: The most that is alive in its forward pass, beyond what was before.
        backward_bytes: The most that is alive in its backward pass, with the gradients of all later
            blocks.
    """

    options: tuple[Option, ...]
    starts: Ints
    seconds: Floats
    saved_bytes: Ints
    forward_bytes: Ints
    backward_bytes: Ints


class BlockOptions:
    """The options of all runs of blocks; equal runs share them.

    Args:
        blocks: The joint graph as a chain.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self._found: dict[tuple[int, ...], tuple[Option, ...]] = {}
        self._multiplicity = Counter(blocks.classes)

    @cached_property
    def ending(self) -> list[EndingRuns]:
        """The runs that end after the first, the second, ... and the last block."""
        # Bytes of the gradients of all blocks after each.
        after = np.append(np.cumsum(self.blocks.gradient_bytes()[::-1])[::-1], 0)
        return [self._ending(stop, int(after[stop])) for stop in range(1, len(self.blocks) + 1)]

    def _ending(self, stop: int, gradient_bytes: int) -> EndingRuns:
        lengths = [n for n in _LENGTHS if n <= stop and self._may_join(stop - n, stop)]
        runs = [self.of(stop - length, stop) for length in lengths]
        options = tuple(option for run in runs for option in run)
        firsts = np.array([stop - length for length in lengths])
        sizes = [(o.saved_bytes, o.forward_bytes, o.backward_bytes) for o in options]
        saved_bytes, forward_bytes, backward_bytes = np.array(sizes, dtype=np.int64).T
        return EndingRuns(
            options,
            np.repeat(firsts, [len(run) for run in runs]),
            np.array([option.seconds for option in options]),
            saved_bytes,
            forward_bytes,
            backward_bytes + gradient_bytes,
        )

    def _may_join(self, start: int, stop: int) -> bool:
        if stop - start <= _ANY_BLOCKS:
            return True
        # Long runs are worth their planning time where they are met again.
        classes = self.blocks.classes
        return all(self._multiplicity[kind] > 1 for kind in classes[start:stop])

    def of(self, start: int, stop: int) -> tuple[Option, ...]:
        """The options of blocks ``start`` to ``stop - 1``."""
        key = self.blocks.classes[start:stop]
        if key not in self._found:
            self._found[key] = self._options(start, stop)
        return self._found[key]

    def _options(self, start: int, stop: int) -> tuple[Option, ...]:
        local = _local_problem(self.blocks, start, stop)
        cuts = CutNetwork(local.problem).hull(_MAX_CUTS)
        options = [_option(local, cut.saved, None) for cut in cuts]
        if stop - start > 1:
            options += [_option(local, cut.saved, local.kept) for cut in cuts[-2:]]
        return _non_dominated(options)


@dataclass(frozen=True)
class _Local:
    """A run of blocks as a problem of its own.

    Attributes:
        problem: The run's nodes between what it reads and, for what others read, readers.
        places: For each node of the problem its place among the run's nodes, -1 for the others.
        segments: Block of each node.
        kept: What outlives its block where the rest is dropped.
    """

    problem: RematProblem
    positions: Ints
    segments: list[int]
    kept: Mask


def _option(local: _Local, saved: Mask, kept: Mask | None) -> Option:
    problem = local.problem
    segments = None if kept is None else local.segments
    again = recomputed(problem, saved)
    order = backward_order(problem, saved, segments=segments, kept=kept, again=again)
    timeline = simulate_plan(problem, saved, order=order, again=again)
    chosen = saved & (local.positions >= 0) & (problem.region == NodeRegion.FORWARD)
    dropped = np.zeros(0, dtype=np.int64) if kept is None else local.positions[~kept]
    return Option(
        tuple(local.positions[chosen].tolist()),
        tuple(dropped.tolist()),
        float(problem.seconds[order.again(problem)].sum()),
        problem.saved_bytes(chosen, again),
        int(timeline.live_bytes[: timeline.num_forward].max(initial=0)),
        int(timeline.live_bytes[timeline.num_forward :].max(initial=0)),
    )


def _local_problem(blocks: Blocks, start: int, stop: int) -> _Local:
    """Blocks ``start`` to ``stop - 1`` alone.

    Values from before are inputs (and counted where they are made), gradients from after arrive at
    the start of the backward pass, and the tensor that leads to the next block is kept. What later
    blocks read of it has been read when the run's own backward pass begins.
    """
    problem = blocks.problem
    members: list[int] = segment_members(blocks, start, stop).tolist()
    inside = set(members)
    outside: dict[int, None] = {}
    for member in members:
        for i in problem.nodes[member].inputs:
            if i not in inside:
                outside[int(problem.base[i])] = None
                outside[i] = None
    number: dict[int, int] = {}
    nodes: list[RematNode] = []
    positions: list[int] = []
    segments: list[int] = []
    gradients: list[int] = []

    def add(node: RematNode, position: int, segment: int) -> int:
        nodes.append(node)
        positions.append(position)
        segments.append(segment)
        return len(nodes) - 1

    for index in outside:
        if index not in inside:
            number[index] = len(nodes)
            add(_from_outside(problem, index, number), -1, stop)
    end = blocks.separators[stop - 1] if stop - 1 < len(blocks.separators) else -1
    unread: list[int] = []
    in_backward = False
    for position, member in enumerate(members):
        node = problem.nodes[member]
        is_backward = node.region is NodeRegion.BACKWARD
        read_after = [user for user in problem.users[member] if user not in inside]
        if is_backward or in_backward:
            for read in unread:
                add(_reader(read, len(nodes)), -1, stop)
            unread.clear()
        in_backward |= is_backward
        number[member] = len(nodes)
        copy = node.moved(
            tuple(sorted([number[i] for i in node.inputs])),
            number.get(node.base, len(nodes)),
            number.get(node.owner, len(nodes)),
        )
        if member == end:
            copy = replace(copy, can_save=True, can_recompute=False)
        add(copy, position, int(blocks.block[member]))
        if is_backward and (read_after or member in problem.backward_outputs):
            gradients.append(number[member])
        elif not is_backward and (read_after or member == end):
            unread.append(number[member])
    for read in unread:
        add(_reader(read, len(nodes)), -1, stop)
    inner = {
        number[separator]
        for separator in blocks.separators[start : stop - 1]
        if separator in number
    }
    kept = [
        node.region is not NodeRegion.FORWARD or i in inner or bool(node.replay_bytes)
        for i, node in enumerate(nodes)
    ]
    return _Local(
        RematProblem(tuple(nodes), (), tuple(gradients)),
        np.array(positions, dtype=np.int64),
        segments,
        np.array(kept, dtype=np.bool_),
    )


def _from_outside(problem: RematProblem, index: int, number: dict[int, int]) -> RematNode:
    node = problem.nodes[index]
    is_gradient = node.region is NodeRegion.BACKWARD
    base = number.get(node.base, number[index])
    is_base = base == number[index]
    return replace(
        node,
        inputs=() if is_base or not is_gradient else (base,),
        region=NodeRegion.BACKWARD if is_gradient else NodeRegion.INPUT,
        base=base,
        owner=base,
        num_bytes=int(problem.num_bytes[node.base]) if is_gradient and is_base else 0,
        workspace_bytes=0,
        seconds=0.0,
        flops=0.0,
        replay_bytes=0,
    )


def _reader(read: int, index: int) -> RematNode:
    return RematNode(f"read_{read}", "read", (read,), NodeRegion.BACKWARD, index, index)


def _non_dominated(options: Sequence[Option]) -> tuple[Option, ...]:
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.seconds, o.saved_bytes, o.backward_bytes)):
        if not any(
            other.saved_bytes <= option.saved_bytes
            and other.backward_bytes <= option.backward_bytes
            and other.forward_bytes <= option.forward_bytes
            for other in kept
        ):
            kept.append(option)
    return tuple(kept)

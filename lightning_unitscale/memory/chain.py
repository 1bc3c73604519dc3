"""List the options of each run of blocks, and choose the fastest combination under a peak.

References:
    Feng, Huang, "Optimal Gradient Checkpoint Search" (2021), and Beaumont et al., "Optimal
    checkpointing for heterogeneous chains" (2019), on chains of blocks under a peak. Here the
    options of each block come from cuts of its graph. Bellman (1957) on dynamic programming.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_unitscale.memory.min_cut import Blocks, CutNetwork, segment_members
from lightning_unitscale.memory.problem import (
    Floats,
    Ints,
    Mask,
    NodeRegion,
    RematNode,
    RematProblem,
)
from lightning_unitscale.memory.schedule import backward_order, simulate_plan

# Cuts of one run of blocks, numbers of blocks in a run, and numbers for any blocks.
_MAX_CUTS = 10
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_ANY_BLOCKS = 3
# Number of states per block boundary. They differ in the bytes saved so far.
_MAX_STATES = 64
# Larger than all bytes that can be saved: offset of each boundary's states among all keys.
_BOUNDARY = 2**52


@dataclass(frozen=True)
class Option:
    """One option of a run of blocks. Places are indices among the run's nodes."""

    saved: tuple[int, ...]  # places of the kept values, the last block's output among them
    dropped: tuple[int, ...]  # places of values kept for one block only, which may run repeatedly
    seconds: float  # of the recomputation
    saved_bytes: int
    forward_bytes: int  # peak of its forward pass, beyond the bytes before it
    backward_bytes: int  # peak of its backward pass, with its kept bytes


@dataclass(frozen=True)
class EndingRuns:
    """Options of all runs of blocks that end at one boundary, and their numbers as arrays."""

    options: tuple[Option, ...]  # run by run, the fastest option of each run first
    starts: Ints  # first block of the run of each option
    seconds: Floats
    saved_bytes: Ints
    forward_bytes: Ints
    backward_bytes: Ints  # including the gradients of all later blocks


def ending_runs(blocks: Blocks) -> list[EndingRuns]:
    """Return the runs that end after the first, the second, ... and the last block."""
    counts = Counter(blocks.classes)
    found: dict[tuple[int, ...], tuple[Option, ...]] = {}  # equal runs share their options
    # Bytes of the gradients of all blocks after each.
    after = np.append(np.cumsum(blocks.gradient_bytes()[::-1])[::-1], 0)
    ending = []
    for stop in range(1, len(blocks) + 1):
        runs: list[tuple[int, Option]] = []
        for start in (stop - length for length in _LENGTHS if length <= stop):
            classes = blocks.classes[start:stop]
            # Long runs are worth their planning time only if they occur again.
            if len(classes) > _ANY_BLOCKS and min(counts[kind] for kind in classes) == 1:
                continue
            if classes not in found:
                found[classes] = _options(blocks, start, stop)
            runs += [(start, option) for option in found[classes]]
        starts, options = zip(*runs, strict=True)
        sizes = [(o.saved_bytes, o.forward_bytes, o.backward_bytes) for o in options]
        saved_bytes, forward_bytes, backward_bytes = np.array(sizes, dtype=np.int64).T
        seconds = np.array([option.seconds for option in options])
        backward_bytes = backward_bytes + after[stop]
        ending.append(
            EndingRuns(
                options, np.array(starts), seconds, saved_bytes, forward_bytes, backward_bytes
            )
        )
    return ending


def _options(blocks: Blocks, start: int, stop: int) -> tuple[Option, ...]:
    """Return the options of blocks ``start`` to ``stop - 1``."""
    local = _local_problem(blocks, start, stop)
    cuts = CutNetwork(local.problem).hull(_MAX_CUTS)
    options = [_option(local, cut.saved, None) for cut in cuts]
    if stop - start > 1:
        options += [_option(local, cut.saved, local.kept) for cut in cuts[-2:]]
    return _non_dominated(options)


Run = tuple[int, int, Option]
"""First block, block after the last, and their option."""


def choose_options(
    runs_by_end: Sequence[EndingRuns], budget_bytes: int, *, forward_bytes: int = 0
) -> list[Run] | None:
    """Return the fastest choice whose peak, run by run, is within the budget, if there is one."""
    # In every run these are alive together: the bytes saved before it, its own peak, and the
    # gradients of the runs after it.
    # States: paths to a boundary by the bytes saved on the way. Fewer bytes take more time. The
    # states of all boundaries are concatenated, those of one boundary by ascending bytes.
    saved, seconds = np.zeros(1, dtype=np.int64), np.zeros(1)
    # The state before each, and the boundary's option that led from there.
    before, option = np.zeros((2, 1), dtype=np.int64)
    # Ascending over all boundaries, to search several of them at once.
    keys = np.zeros(1, dtype=np.int64)
    starts = np.array([0, 1])
    for boundary, ending in enumerate(runs_by_end, start=1):
        need = np.maximum(ending.backward_bytes, ending.forward_bytes + forward_bytes)
        # For each option, the number of states at the start of its run that it can follow.
        limits = (budget_bytes - need).clip(-1, _BOUNDARY - 1) + ending.starts * _BOUNDARY
        first = starts[ending.starts]
        counts = keys.searchsorted(limits, "right") - first
        taken = np.repeat(np.arange(len(counts)), counts)
        origin = np.arange(len(taken)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        reached = saved[origin] + ending.saved_bytes[taken]
        after = seconds[origin] + ending.seconds[taken]
        kept = _improving(reached, after)
        saved, seconds = np.append(saved, reached[kept]), np.append(seconds, after[kept])
        before, option = np.append(before, origin[kept]), np.append(option, taken[kept])
        keys = np.append(keys, reached[kept] + boundary * _BOUNDARY)
        starts = np.append(starts, len(saved))
    boundary = len(runs_by_end)
    state = int(starts[boundary + 1]) - 1  # the last one saves the most, and so is the fastest
    if state < starts[boundary]:
        return None
    runs: list[Run] = []
    while boundary:
        ending = runs_by_end[boundary - 1]
        start = int(ending.starts[option[state]])
        runs.append((start, boundary, ending.options[option[state]]))
        state, boundary = int(before[state]), start
    return runs[::-1]


def _improving(saved: Ints, seconds: Floats) -> Ints:
    """Return the states, by ascending bytes, that are faster than all states with fewer bytes."""
    order = np.argsort(saved, kind="stable")
    best = np.minimum.accumulate(seconds[order])
    kept = order[np.concatenate([[True], best[1:] < best[:-1] - 1e-12])[: len(order)]]
    if len(kept) > _MAX_STATES:
        # Among states with nearly equal bytes, keep the fastest, which is the one that saves the
        # most.
        bins = saved[kept] * _MAX_STATES // max(int(saved[kept[-1]]), 1)
        last = np.concatenate([bins[1:] != bins[:-1], [True]])
        last[0] = True  # no state saves less
        kept = kept[last]
    return kept


@dataclass(frozen=True)
class _RunProblem:
    """A run of blocks as a separate problem."""

    problem: RematProblem  # the run's nodes, its inputs, and readers of values that others read
    positions: Ints  # place of each node among the run's nodes, -1 for the others
    segments: tuple[int, ...]  # block of each node
    kept: Mask  # values that outlive their block when the rest is dropped


def _option(local: _RunProblem, saved: Mask, kept: Mask | None) -> Option:
    problem = local.problem
    segments = None if kept is None else local.segments
    order = backward_order(problem, saved, segments=segments, kept=kept)
    timeline = simulate_plan(problem, saved, order)
    chosen = saved & (local.positions >= 0) & (problem.region == NodeRegion.FORWARD)
    dropped = np.zeros(0, dtype=np.int64) if kept is None else local.positions[~kept]
    return Option(
        tuple(local.positions[chosen].tolist()),
        tuple(dropped.tolist()),
        float(problem.seconds[order.again(problem)].sum()),
        problem.saved_bytes(chosen),
        int(timeline.live_bytes[: timeline.num_forward].max(initial=0)),
        int(timeline.live_bytes[timeline.num_forward :].max(initial=0)),
    )


def _local_problem(blocks: Blocks, start: int, stop: int) -> _RunProblem:
    """Return blocks ``start`` to ``stop - 1`` alone."""
    # Earlier values are inputs, and counted in the block that made them. Later gradients arrive at
    # the start of the backward pass. The tensor that leads to the next block is kept. Later blocks
    # have read their inputs when the run's own backward pass begins.
    problem, outputs = blocks.problem, set(blocks.problem.backward_outputs)
    members: list[int] = segment_members(blocks, start, stop).tolist()
    inside = set(members)
    end = blocks.separators[stop - 1] if stop - 1 < len(blocks.separators) else -1
    read = [i for member in members for i in problem.nodes[member].inputs if i not in inside]
    number: dict[int, int] = {}
    # The nodes, their places among the run's nodes, and their blocks.
    rows: list[tuple[RematNode, int, int]] = []

    def add(position: int) -> None:
        member = members[position]
        node = problem.nodes[member]
        number[member] = len(rows)
        copy = node.moved(
            tuple(sorted([number[i] for i in node.inputs])),
            number.get(node.base, len(rows)),
            number.get(node.owner, len(rows)),
        )
        if member == end:
            copy = replace(copy, can_save=True, can_recompute=False)
        rows.append((copy, position, int(blocks.block[member])))

    def is_read_after(member: int) -> bool:
        return any(user not in inside for user in problem.users[member])

    for index in dict.fromkeys(j for i in read for j in (int(problem.base[i]), i)):
        if index not in inside:
            number[index] = len(rows)
            rows.append((_from_outside(problem, index, number), -1, stop))
    is_backward = problem.region[members] == NodeRegion.BACKWARD
    for position in np.flatnonzero(~is_backward).tolist():
        add(position)
    for member in list(number):
        if member in inside and (is_read_after(member) or member == end):
            name, index = f"read_{number[member]}", len(rows)
            reader = RematNode(name, "read", (number[member],), NodeRegion.BACKWARD, index, index)
            rows.append((reader, -1, stop))
    backward = np.flatnonzero(is_backward).tolist()
    for position in backward:
        add(position)
    gradients = [
        number[member]
        for member in (members[position] for position in backward)
        if is_read_after(member) or member in outputs
    ]
    inner = {number.get(separator) for separator in blocks.separators[start : stop - 1]}
    nodes, positions, segments = zip(*rows, strict=True)
    kept = [
        node.region is not NodeRegion.FORWARD or i in inner or bool(node.replay_bytes)
        for i, node in enumerate(nodes)
    ]
    return _RunProblem(
        RematProblem(nodes, (), tuple(gradients)),
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

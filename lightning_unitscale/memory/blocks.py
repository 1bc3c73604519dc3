"""Cut a joint graph into blocks where the forward pass has only one tensor alive."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_unitscale.memory.problem import Ints, Mask, NodeRegion, RematProblem

# Share of a separator's bytes that may be alive besides its tensor: statistics, scalars.
_BESIDE = 1 / 16
# Values alive for more of the forward pass than this are tables and masks that blocks share.
_SHARED = 1 / 4
# Operations of a block. A chain that can be cut everywhere is left to cuts within its blocks.
_LEAST_OPERATIONS = 4
# Fields that are equal for the nodes of structurally identical blocks.
_ALIKE = ("kind", "num_bytes", "workspace_bytes", "flops", "region", "can_save", "can_recompute",
          "in_forward")  # fmt: skip
_MAX_BLOCKS = 100  # small blocks are joined to their successors until there are fewer


@dataclass(frozen=True)
class Blocks:
    """Joint graph as a chain of blocks."""

    problem: RematProblem
    separators: tuple[int, ...]  # base of the tensor that leads from each block to the next
    block: Ints  # block of each node; -1 for inputs

    def __len__(self) -> int:
        return len(self.separators) + 1

    @cached_property
    def members(self) -> tuple[Ints, ...]:
        """Return the nodes of each block, forward and backward, in ascending order."""
        by_block = np.argsort(self.block, kind="stable")
        ends = np.searchsorted(self.block[by_block], np.arange(len(self) + 1))
        return tuple(np.split(by_block, ends)[1:-1])

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Number the blocks so that blocks that differ only in their place get the same number."""
        numbers: dict[object, int] = {}
        return tuple(numbers.setdefault(self._signature(i), len(numbers)) for i in range(len(self)))

    @cached_property
    def read_later(self) -> Mask:
        """Mark the forward values that a later block or another block's backward pass reads."""
        problem, block = self.problem, self.block
        producers, users = problem.edges
        crosses = (block[producers] >= 0) & (block[producers] != block[users])
        is_read = np.zeros(len(problem), dtype=np.bool_)
        is_read[producers[crosses & (problem.region[producers] == NodeRegion.FORWARD)]] = True
        return is_read

    def gradient_bytes(self) -> Ints:
        """Return the bytes of the gradients that the backward pass of each block returns."""
        bases = np.unique(self.problem.base[list(self.problem.backward_outputs)])
        bases = bases[self.block[bases] >= 0]
        num_bytes = np.zeros(len(self), dtype=np.int64)
        np.add.at(num_bytes, self.block[bases], self.problem.num_bytes[bases])
        return num_bytes

    def _signature(self, index: int) -> object:
        nodes = self.problem.nodes
        members: list[int] = self.members[index].tolist()
        position = {node: i for i, node in enumerate(members)}
        boundary = self.separators[index - 1] if index else -1
        end = self.separators[index] if index < len(self.separators) else -1
        returned = set(self.problem.backward_outputs)
        rows: list[object] = [index == 0, index == len(self) - 1, position.get(end, -1)]
        for member in members:
            node = nodes[member]
            reads = tuple(
                (position[i], 0)
                if i in position
                else (-2 if i == boundary else -1, nodes[i].num_bytes, int(nodes[i].region))
                for i in node.inputs
            )
            alike = tuple(getattr(node, name) for name in _ALIKE)
            seconds, is_read = round(node.seconds, 9), bool(self.read_later[member])
            rows.append((alike, seconds, member in returned, is_read, reads))
        return tuple(rows)


def find_blocks(problem: RematProblem) -> Blocks:
    """Cut at every tensor that is alone between the operations before and after it."""
    forward = np.flatnonzero((problem.region == NodeRegion.FORWARD) & problem.in_forward)
    time = np.full(len(problem), -1, dtype=np.int64)
    time[forward] = np.arange(len(forward))
    work = np.cumsum((problem.seconds[forward] > 0).astype(np.int64))
    separators = _thinned(_separators(problem, forward, time), work)
    block = np.full(len(problem), -1, dtype=np.int64)
    ends = [end for end, _ in separators]
    block[forward] = np.searchsorted(np.array(ends, dtype=np.int64), time[forward], side="left")
    _place_others(problem, block, len(separators))
    return Blocks(problem, tuple(base for _, base in separators), block)


def _separators(problem: RematProblem, forward: Ints, time: Ints) -> list[tuple[int, int]]:
    """Return (last operation before the cut, the tensor alive there) of every possible cut."""
    count = len(forward)
    first = np.full(len(problem), -1, dtype=np.int64)
    last = np.full(len(problem), -1, dtype=np.int64)
    bases = np.unique(problem.base[forward])
    bases = bases[(problem.region[bases] == NodeRegion.FORWARD) & (problem.num_bytes[bases] > 0)]
    first[bases] = time[problem.owner[bases]]
    producers, users = problem.edges
    runs = (time[users] >= 0) & (time[producers] >= 0)
    np.maximum.at(last, problem.base[producers[runs]], time[users[runs]])
    spans = last[bases] - first[bases]
    alive = bases[(spans > 0) & (spans <= max(8, _SHARED * count))]
    starting: list[list[int]] = [[] for _ in range(count)]
    for base in alive.tolist():
        starting[first[base]].append(base)
    sizes, ends = problem.num_bytes.tolist(), last.tolist()
    live: list[int] = []
    separators: list[tuple[int, int]] = []
    # An operation with several outputs stays together with these.
    is_whole = np.ones(count, dtype=np.bool_)
    of_tuple = runs & problem.is_tuple[producers]
    for producer, user in zip(producers[of_tuple], users[of_tuple], strict=True):
        is_whole[time[producer] : time[user]] = False
    seen: set[int] = set()
    for now in range(count - 1):
        live = [base for base in live if ends[base] > now] + starting[now]
        if not live:
            continue
        largest = max(live, key=lambda base: sizes[base])
        beside = sum(sizes[base] for base in live) - sizes[largest]
        allowed = problem.nodes[largest].can_save and time[largest] <= now and is_whole[now]
        if beside <= _BESIDE * sizes[largest] and allowed and largest not in seen:
            seen.add(largest)
            separators.append((now, largest))
    return separators


def _thinned(separators: list[tuple[int, int]], work: Ints) -> list[tuple[int, int]]:
    """Return separators with enough operations between them, which ``work`` counts."""
    least = _LEAST_OPERATIONS
    while True:
        kept: list[tuple[int, int]] = []
        done = 0
        for end, base in separators:
            if work[end] - done >= least and work[-1] - work[end] >= least:
                kept.append((end, base))
                done = int(work[end])
        if len(kept) < _MAX_BLOCKS:
            return kept
        least *= 2


def _place_others(problem: RematProblem, block: Ints, last_block: int) -> None:
    """Assign blocks to the nodes that run only in the backward pass."""
    # These loops use lists, because each step is too small for numpy.
    inputs = problem.inputs_of
    placed: list[int] = block.tolist()
    is_forward: list[bool] = (problem.region == NodeRegion.FORWARD).tolist()
    others = np.flatnonzero((problem.region == NodeRegion.FORWARD) & (block < 0)).tolist()
    for i in others:
        # Constants of the backward pass are placed with their readers, below.
        placed[i] = max((placed[j] for j in inputs[i]), default=-1)
    shared = _shared(problem, np.array(placed, dtype=np.int64)).tolist()
    highest = -1
    # The backward pass goes through the blocks in reverse. A predecessor of a block's operation
    # belongs to the block or to a later one.
    for i in np.flatnonzero(problem.region == NodeRegion.BACKWARD)[::-1].tolist():
        for j in inputs[i]:
            if is_forward[j] and not shared[j] and placed[j] > highest:
                highest = placed[j]
        placed[i] = max(highest, 0)
    for i in reversed(others):
        if placed[i] < 0:
            placed[i] = max((placed[j] for j in problem.users[i]), default=last_block)
    block[:] = placed


def _shared(problem: RematProblem, block: Ints) -> Mask:
    """Mark the forward values that more than two blocks read."""
    producers, users = problem.edges
    counts = problem.in_forward & (problem.region == NodeRegion.FORWARD)
    reads = (block[users] >= 0) & counts[producers]
    pairs = np.unique(np.stack([producers[reads], block[users[reads]]]), axis=1)
    return np.bincount(pairs[0], minlength=len(problem)) > 2


def segment_members(blocks: Blocks, start: int, stop: int) -> Ints:
    """Return the nodes of a segment of blocks, ascending."""
    return np.sort(np.concatenate(blocks.members[start:stop]))

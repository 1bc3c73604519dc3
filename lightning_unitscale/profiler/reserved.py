"""What CUDA's caching allocator takes from the device for a step: segments, cut into blocks. Pure.

``torch.cuda.memory_reserved()`` counts segments, which the allocator keeps, and
``memory_allocated()`` the blocks in use: a block that is not worth cutting is handed out whole, so
that both exceed the bytes of the tensors. The rules are those of torch 2.13's
``c10/cuda/CUDACachingAllocator.cpp`` for one stream and without ``PYTORCH_ALLOC_CONF``.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field

from lightning_unitscale.profiler.record import StepRecord, allocated_bytes, sizes_before

_MIB = 2**20
# The least that is left of a small block; sizes are multiples of it.
_BLOCK_BYTES = 512
# Up to it a block comes from the pool of small ones, whose segments have a size of their own.
_SMALL_BYTES = _MIB
_SMALL_SEGMENT_BYTES = 2 * _MIB
# Below it a segment is larger than what is asked for; above, it is rounded up.
_OWN_SEGMENT_BYTES = 10 * _MIB
_LARGE_SEGMENT_BYTES = 20 * _MIB
_SEGMENT_ROUNDING = 2 * _MIB
CUBLAS_WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
"""What torch allocates before the first product of a stream; 32 MiB on Hopper and later."""


@dataclass(eq=False)
class Block:
    """A part of a segment.

    Attributes:
        size: Its bytes.
        is_small: Of which pool it is.
        order: Where it lies: later segments have larger numbers, as later parts have.
        before: The part before it in its segment.
        after: The part after it.
        is_free: Whether it can be handed out.
    """

    size: int
    is_small: bool
    order: tuple[int, int]
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)
    is_free: bool = True

    @property
    def key(self) -> tuple[int, tuple[int, int]]:
        """Blocks are looked for by size, and of one size the first is taken."""
        return self.size, self.order


class CachingAllocator:
    """Hands out blocks as torch does.

    Attributes:
        reserved_bytes: Segments.
        allocated_bytes: Blocks in use.
    """

    def __init__(self) -> None:
        self.reserved_bytes = self.allocated_bytes = 0
        self._num_segments = 0
        # Free blocks of the large and of the small pool, ascending.
        self._free: tuple[list[Block], list[Block]] = ([], [])

    def allocate(self, num_bytes: int) -> Block:
        """The smallest free block that is large enough, or one of a new segment."""
        size = allocated_bytes(max(num_bytes, 1), "cuda")
        is_small = size <= _SMALL_BYTES
        pool = self._free[is_small]
        at = bisect.bisect_left(pool, (size, (0, 0)), key=lambda block: block.key)
        block = pool.pop(at) if at < len(pool) else self._new_segment(size, is_small)
        rest = block.size - size
        if rest >= _BLOCK_BYTES if is_small else rest > _SMALL_BYTES:
            self._cut(block, size)
        block.is_free = False
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """Take a block back; it is one with the free parts beside it."""
        self.allocated_bytes -= block.size
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._pool_of(other).remove(other)
                block.size += other.size
                if other is block.before:
                    block.order, block.before = other.order, other.before
                else:
                    block.after = other.after
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        self._put(block)

    def _new_segment(self, size: int, is_small: bool) -> Block:
        if is_small:
            total = _SMALL_SEGMENT_BYTES
        elif size < _OWN_SEGMENT_BYTES:
            total = _LARGE_SEGMENT_BYTES
        else:
            total = -(-size // _SEGMENT_ROUNDING) * _SEGMENT_ROUNDING
        self.reserved_bytes += total
        self._num_segments += 1
        return Block(total, is_small, (self._num_segments, 0))

    def _cut(self, block: Block, size: int) -> None:
        segment, place = block.order
        rest = Block(block.size - size, block.is_small, (segment, place + size), block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._put(rest)

    def _pool_of(self, block: Block) -> list[Block]:
        return self._free[block.is_small]

    def _put(self, block: Block) -> None:
        bisect.insort(self._pool_of(block), block, key=lambda other: other.key)


@dataclass(frozen=True)
class AllocatorPeak:
    """The most that a step takes of a GPU, in an allocator that has nothing else.

    Attributes:
        reserved_bytes: Segments, as ``torch.cuda.max_memory_reserved()`` counts them.
        allocated_bytes: Blocks, as ``torch.cuda.max_memory_allocated()`` counts them.
    """

    reserved_bytes: int
    allocated_bytes: int


def allocator_peak(record: StepRecord) -> AllocatorPeak:
    """Let the caching allocator serve a step: what was there before it, and then each operator.

    cuBLAS's workspace is there from the first product on, a kernel's own memory while it runs.
    """
    memory = _Memory()
    for index, size in sizes_before(record).items():
        memory.resize(index, size)
    events = list(record.events)[::-1]
    is_first_product = True
    for position, operator in enumerate(record.operators):
        if operator.costs.flops and is_first_product:
            is_first_product = False
            memory.allocator.allocate(CUBLAS_WORKSPACE_BYTES)
        memory.resize(_WORKSPACE, operator.costs.workspace_bytes)
        while events and events[-1].operator <= position:
            event = events.pop()
            memory.resize(event.storage, event.change)
        memory.resize(_WORKSPACE, -operator.costs.workspace_bytes)
    return AllocatorPeak(memory.allocator.reserved_bytes, memory.allocated_bytes)


_WORKSPACE = -1  # in place of the index of a storage


class _Memory:
    """The blocks of storages.

    Attributes:
        allocator: Where they come from.
        allocated_bytes: The most that was in use at once.
    """

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.allocated_bytes = 0
        self._blocks: dict[int, Block] = {}
        self._sizes: Counter[int] = Counter()

    def resize(self, storage: int, change: int) -> None:
        """Allocate, release or resize a storage."""
        if not change:
            return
        if storage in self._blocks:
            self.allocator.free(self._blocks.pop(storage))
        self._sizes[storage] += change
        if self._sizes[storage]:
            self._blocks[storage] = self.allocator.allocate(self._sizes[storage])
        self.allocated_bytes = max(self.allocated_bytes, self.allocator.allocated_bytes)

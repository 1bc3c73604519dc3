"""Simulate the memory that CUDA's caching allocator takes: segments, cut into blocks.

The rules are those of torch 2.13's ``c10/cuda/CUDACachingAllocator.cpp``. Only
``expandable_segments:True`` of ``PYTORCH_ALLOC_CONF`` is supported. A free block serves only the
stream that it was allocated in.

NVIDIA's libraries keep memory as well. Torch gives each thread's cuBLAS handle a workspace before
its first matmul (``aten/src/ATen/cuda/CublasHandlePool.cpp``). The forward pass and the optimizer
run in the main thread, the backward pass in a thread of autograd's engine. A matmul with a bias
goes through cublasLt (``native/cuda/Blas.cpp``), whose workspace is separate. cuDNN's dropout
between recurrent layers keeps the states of its random numbers (``native/cudnn/RNN.cpp``).
"""

from __future__ import annotations

import bisect
import os
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from lightning_unitscale.memory.gpus import GPU
from lightning_unitscale.memory.operator_bytes import by_operator
from lightning_unitscale.memory.step_record import (
    BLOCK_BYTES,
    OUTSIDE,
    BlockSizes,
    Event,
    StepRecord,
    StorageLife,
    allocated_bytes,
)

_MIB = 2**20
# Blocks up to this size come from the pool of small ones, whose segments have their own size.
_SMALL_BYTES = _MIB
_SMALL_SEGMENT_BYTES = 2 * _MIB
# From this size on a block gets its own segment, rounded up.
_OWN_SEGMENT_BYTES = 10 * _MIB
_LARGE_SEGMENT_BYTES = 20 * _MIB
_SEGMENT_ROUNDING = 2 * _MIB
# Distance between the addresses of segments, so that the parts of two never touch.
_SEGMENT_DISTANCE = 2**50


class Block(NamedTuple):
    """Part of a segment of the small or the large pool of a stream."""

    size: int
    address: int
    is_small: bool
    stream: int = 0

    @property
    def pool(self) -> tuple[int, bool]:
        """Return the key of its pool."""
        return self.stream, self.is_small


class CachingAllocator:
    """Allocator that hands out blocks as torch does on a GPU.

    Segments, which it keeps, count as reserved, blocks in use as allocated. A block that is not
    worth cutting is handed out whole, so both exceed the bytes of the tensors.

    Args:
        expandable: Each pool has one segment that grows, and every block is cut to its size.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self._ends: dict[tuple[int, bool], int] = {}  # of the segments that grow, by pool
        self.reserved_bytes = self.allocated_bytes = self.max_allocated_bytes = 0
        self._num_segments = 0
        # Free blocks of each pool, by size and then by address.
        self._free: dict[tuple[int, bool], list[Block]] = defaultdict(list)
        self._free_from: dict[int, Block] = {}
        self._free_up_to: dict[int, Block] = {}

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Return the stream's smallest free block that is large enough, or a new segment's."""
        size = allocated_bytes(max(num_bytes, 1), "cuda")
        is_small = size <= _SMALL_BYTES
        pool = self._free[stream, is_small]
        at = bisect.bisect_left(pool, (size, 0))
        if at < len(pool):
            block = self._take(pool[at])
        else:
            block = (self._grown if self.expandable else self._new_segment)(size, is_small, stream)
        rest = block.size - size
        if rest >= BLOCK_BYTES if is_small or self.expandable else rest > _SMALL_BYTES:
            self._put(block._replace(size=rest, address=block.address + size))
            block = block._replace(size=size)
        self.allocated_bytes += block.size
        self.max_allocated_bytes = max(self.max_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it with the free parts next to it."""
        self.allocated_bytes -= block.size
        size, address, *_ = block
        if after := self._free_from.get(address + size):
            size += self._take(after).size
        if before := self._free_up_to.get(address):
            size, address = size + self._take(before).size, before.address
        self._put(block._replace(size=size, address=address))

    def _new_segment(self, size: int, is_small: bool, stream: int) -> Block:
        if is_small:
            total = _SMALL_SEGMENT_BYTES
        elif size < _OWN_SEGMENT_BYTES:
            total = _LARGE_SEGMENT_BYTES
        else:
            total = -(-size // _SEGMENT_ROUNDING) * _SEGMENT_ROUNDING
        self.reserved_bytes += total
        self._num_segments += 1
        return Block(total, self._num_segments * _SEGMENT_DISTANCE, is_small, stream)

    def _grown(self, size: int, is_small: bool, stream: int) -> Block:
        """Return the free end of the pool's segment with as many pages as it lacks."""
        pool = (stream, is_small)
        end = self._ends.setdefault(pool, len(self._ends) * _SEGMENT_DISTANCE)
        tail = self._free_up_to.get(end)
        free = self._take(tail) if tail else Block(0, end, is_small, stream)
        page = _SMALL_SEGMENT_BYTES if is_small else _LARGE_SEGMENT_BYTES
        grown = -(-(size - free.size) // page) * page
        self.reserved_bytes += grown
        self._ends[pool] = end + grown
        return free._replace(size=free.size + grown)

    def _put(self, block: Block) -> None:
        bisect.insort(self._free[block.pool], block)
        self._free_from[block.address] = self._free_up_to[block.address + block.size] = block

    def _take(self, block: Block) -> Block:
        pool = self._free[block.pool]
        del pool[bisect.bisect_left(pool, block)]
        del self._free_from[block.address], self._free_up_to[block.address + block.size]
        return block


@dataclass(frozen=True)
class AllocatorPeak:
    """Peak memory of a step on a GPU, in an otherwise empty allocator.

    Attributes:
        reserved_bytes: Segments, as ``torch.cuda.max_memory_reserved()`` counts them.
        allocated_bytes: Blocks, as ``torch.cuda.max_memory_allocated()`` counts them.
    """

    reserved_bytes: int
    allocated_bytes: int


def has_expandable_segments() -> bool:
    """Check whether the environment asks torch for segments that grow."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = ",".join(os.environ.get(name, "") for name in names)
    return re.search(r"expandable_segments\s*:\s*True", settings) is not None


def serve_steps(record: StepRecord, num_steps: int = 3) -> tuple[AllocatorPeak, BlockSizes]:
    """Let the caching allocator serve some steps, which fragment it.

    Parameters, buffers and inputs exist before the first step. The first step creates the
    optimizer's state and the workspaces of libraries. Tensors that a step leaves, such as
    gradients, are freed before the next one. An operator allocates its results before a kernel's
    workspace, and frees that before its operands go.

    Returns:
        The peak, and the sizes of the last step's blocks.
    """
    ends = record.event_ends()
    existing: list[int] = []
    made_at: dict[int, list[int]] = defaultdict(list)
    for position, event in enumerate(record.events[: ends[0]]):
        operator = record.made_at.get(event.storage)
        (existing if operator is None else made_at[operator]).append(position)
    blocks = _StorageBlocks(record)
    blocks.serve(existing)
    kept = {event.storage for event in record.events[: ends[0]]}
    for _ in range(num_steps):
        blocks.free_all_but(kept)
        for index, (start, end) in enumerate(pairwise(ends)):
            blocks.serve(made_at.pop(index, ()))
            born = [place for place in range(start, end) if record.events[place].change > 0]
            freed = born[-1] + 1 if born else start
            blocks.serve(range(start, freed))
            blocks.use_workspace(index)
            blocks.serve(range(freed, end))
    allocator = blocks.allocator
    peak = AllocatorPeak(allocator.reserved_bytes, allocator.max_allocated_bytes)
    return peak, BlockSizes(tuple(blocks.changes), tuple(blocks.workspaces))


class _StorageBlocks:
    """The blocks of storages."""

    def __init__(self, record: StepRecord) -> None:
        self.allocator = CachingAllocator(expandable=has_expandable_segments())
        self.changes = [0] * len(record.events)  # bytes of blocks, by the position of the event
        self.workspaces = [0] * len(record.operators)
        self._record = record
        self._held: dict[int, Block] = {}
        self._sizes: Counter[int] = Counter()

    def serve(self, positions: Iterable[int]) -> None:
        """Allocate and free blocks for events."""
        for position in positions:
            storage, change, _ = self._record.events[position]
            before = self.allocator.allocated_bytes
            if change and storage in self._held:
                self.allocator.free(self._held.pop(storage))
            self._sizes[storage] += change
            if change and self._sizes[storage] > 0:
                stream = self._record.storages[storage].stream
                self._held[storage] = self.allocator.allocate(self._sizes[storage], stream)
            self.changes[position] = self.allocator.allocated_bytes - before

    def use_workspace(self, operator: int) -> None:
        """Allocate and free an operator's workspace."""
        size = self._record.operators[operator].costs.workspace_bytes
        if size:
            block = self.allocator.allocate(size)
            self.workspaces[operator] = block.size
            self.allocator.free(block)

    def free_all_but(self, kept: Container[int]) -> None:
        """Free the tensors that a step has left."""
        for storage in [storage for storage in self._held if storage not in kept]:
            self.allocator.free(self._held.pop(storage))
            self._sizes[storage] = 0


aten = torch.ops.aten
Thread = Literal["main", "backward"]
Library = Literal["cublas", "cublaslt", "cudnn"]
# Operators of torch that call cuBLAS.
_CUBLAS = by_operator(
    dict.fromkeys(
        ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot",
         "_scaled_mm"),
        True,
    )
)  # fmt: skip
_LT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Each thread that the GPU can hold has a generator, XORWOW by the documentation of cuRAND, with six
# words of 32 bits (Marsaglia 2003, "Xorshift RNGs", section 3.1).
_GENERATOR_BYTES = 6 * 4


class Workspace(NamedTuple):
    """A workspace that a library keeps for a thread."""

    thread: Thread
    library: Library

    def num_bytes(self, gpu: GPU) -> int:
        """Return its size, which the environment may change as it does in torch."""
        if self.library == "cublas":
            return _configured() or gpu.cublas_workspace_bytes
        if self.library == "cudnn":
            num_threads = gpu.num_multiprocessors * gpu.threads_per_multiprocessor
            return num_threads * _GENERATOR_BYTES
        kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
        return int(kib) * 1024 if kib.isdigit() else gpu.cublaslt_workspace_bytes


class KeptWorkspaces:
    """The workspaces that a step needs, each with the operator that needs it first."""

    def __init__(self, gpu: GPU | None) -> None:
        self._gpu = gpu
        self._first_uses: dict[Workspace, int] = {}

    def note(self, function: Any, args: Sequence[Any], record: StepRecord) -> None:
        """Note the workspaces of the last operator of a record."""
        packet = getattr(function, "overloadpacket", function)
        index = len(record.operators) - 1
        if self._gpu is not None and packet is aten._cudnn_rnn and args[12] and args[11] > 0:
            self._first_uses.setdefault(Workspace("main", "cudnn"), index)
        if self._gpu is None or packet not in _CUBLAS:
            return
        in_backward = record.operators[index].phase == "backward"
        thread: Thread = "backward" if in_backward else "main"
        self._first_uses.setdefault(Workspace(thread, "cublas"), index)
        if _goes_through_lt(packet, args):
            self._first_uses.setdefault(Workspace(thread, "cublaslt"), index)

    def add_to(self, record: StepRecord) -> None:
        """Add them to a record as storages that an earlier step has made."""
        for workspace, operator in self._first_uses.items():
            assert self._gpu is not None
            index, num_bytes = len(record.storages), workspace.num_bytes(self._gpu)
            record.storages.append(StorageLife(num_bytes, "library"))
            record.events.append(Event(index, num_bytes, OUTSIDE))
            record.made_at[index] = operator


def _goes_through_lt(packet: Any, args: Sequence[Any]) -> bool:
    """Check ``isInputCompliesAddmmCudaLt``: a bias of one dimension, no vectors."""
    name = packet.__name__
    if name == "_scaled_mm":
        return True
    if name not in ("addmm", "_addmm_activation"):
        return False
    bias, first, second = args[:3]
    return (
        bias.dim() == 1
        and bias.is_contiguous()
        and bias.dtype == first.dtype
        and first.dtype in _LT_TYPES
        and min(*first.shape, *second.shape) > 1
    )


def _configured() -> int:
    """Return the bytes that ``CUBLAS_WORKSPACE_CONFIG`` asks for, such as ``":4096:8"``."""
    pools = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(1024 * int(size) * int(count) for size, count in pools)

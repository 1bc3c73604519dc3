"""The simulated caching allocator against known sizes and a simpler model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_unitscale.memory.gpus import GPUS
from lightning_unitscale.memory.graph_profile import GraphProfile
from lightning_unitscale.memory.reserved import CachingAllocator
from lightning_unitscale.profiler import fake_process_group, profile_graph

KIB, MIB = 2**10, 2**20


def test_allocator_matches_snapshot_from_gpu() -> None:
    """A matrix, two vectors, their matmul and cuBLAS's workspace, as torch's forum has them."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for size in (40000, 40, 4000, 40)]
    assert [block.size for block in blocks] == [40448, 512, 4096, 512]
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (2097152, 45568)
    workspace = allocator.allocate(GPUS["a100"].cublas_workspace_bytes)
    assert workspace.size == 8519680
    assert allocator.reserved_bytes == 2097152 + 20971520
    assert allocator.allocate(12451840).size == 12451840  # what was left of the segment
    assert allocator.reserved_bytes == 2097152 + 20971520


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # The rest would be too small for a block.
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_block_and_segment_sizes(size: int, block: int, segment: int) -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(size).size == block
    assert allocator.reserved_bytes == segment
    assert allocator.allocated_bytes == block


def test_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = CachingAllocator(expandable=True)
    first = allocator.allocate(3 * MIB // 2)
    assert (first.size, allocator.reserved_bytes) == (3 * MIB // 2, 20 * MIB)
    second = allocator.allocate(30 * MIB)  # 18.5 MiB were left
    assert (second.size, allocator.reserved_bytes) == (30 * MIB, 40 * MIB)
    assert second.address == first.address + first.size
    assert allocator.allocate(100).size == 512
    assert allocator.reserved_bytes == 42 * MIB
    allocator.free(first)
    assert allocator.allocate(MIB + 1).address == first.address
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    profile = _profile("cuda")
    assert profile.allocator is not None
    assert profile.peak_bytes == profile.allocator.allocated_bytes
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert _profile("cuda").peak_bytes >= profile.peak_bytes


@pytest.mark.parametrize("expandable", [False, True])
def test_free_blocks_are_reused_only_on_their_stream(expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    block = allocator.allocate(20 * MIB, 1)
    allocator.free(block)
    assert allocator.allocate(20 * MIB).address != block.address
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.allocate(20 * MIB, 1).address == block.address
    assert allocator.reserved_bytes == 40 * MIB


def test_fsdp_uses_separate_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    width, ranks = 2048, 2
    layer = 4 * width**2

    def reserved() -> int:
        with fake_process_group(ranks, device="cuda"):
            with torch.device("meta"):
                model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
            mesh = init_device_mesh("cuda", (ranks,))
            for part in (*model, model):
                fully_shard(part, mesh=mesh)
            given = torch.empty(8, width, device="meta")
            profile = profile_graph(model, given, device="cuda:h100")
        assert profile.allocator is not None
        return profile.allocator.reserved_bytes

    several = reserved()
    only = torch.cpu.current_stream()
    monkeypatch.setattr(torch.cpu, "current_stream", lambda: only)
    # In one stream, two buffers for gathering and the reduced gradients would use other's blocks.
    assert several - reserved() == 2 * layer + 3 * layer // ranks


class Plain:
    """Segments as lists of ``[size, name]``, a free part without a name; all are looked through."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[int]]]] = []

    def allocate(self, name: int, size: int) -> None:
        size = max(1, (size + 511) // 512) * 512
        is_small = size <= MIB
        places = [
            (part[0], index, place)
            for index, (kind, parts) in enumerate(self.segments)
            for place, part in enumerate(parts)
            if kind == is_small and not part[1] and part[0] >= size
        ]
        if not places:
            if is_small:
                total = 2 * MIB
            else:
                total = 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            self.segments.append((is_small, [[total, 0]]))
            places = [(total, len(self.segments) - 1, 0)]
        _, index, place = min(places)
        parts = self.segments[index][1]
        rest = parts[place][0] - size
        if rest >= 512 if is_small else rest > MIB:
            parts[place : place + 1] = [[size, name], [rest, 0]]
        else:
            parts[place][1] = name

    def free(self, name: int) -> None:
        for _, parts in self.segments:
            for part in parts:
                if part[1] == name:
                    part[1] = 0
            for place in reversed(range(len(parts) - 1)):
                if not parts[place][1] and not parts[place + 1][1]:
                    parts[place][0] += parts.pop(place + 1)[0]

    def bytes(self) -> tuple[int, int]:
        every = [part for _, parts in self.segments for part in parts]
        return sum(size for size, _ in every), sum(size for size, name in every if name)


_SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(MIB, 40 * MIB))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), _SIZES), max_size=60))
def test_allocator_matches_simpler_model(steps: list[tuple[int, int]]) -> None:
    allocator, plain = CachingAllocator(), Plain()
    blocks = {}
    for index, (name, size) in enumerate(steps, start=1):
        if name in blocks:
            number, block = blocks.pop(name)
            allocator.free(block)
            plain.free(number)
        else:
            blocks[name] = index, allocator.allocate(size)
            plain.allocate(index, size)
        assert (allocator.reserved_bytes, allocator.allocated_bytes) == plain.bytes()


def _profile(device: str) -> GraphProfile:
    layers = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    return profile_graph(layers, torch.ones(64, 256), device=device, optimizer=torch.optim.AdamW)


def test_profile_includes_reserved_bytes() -> None:
    profile = _profile("cuda")
    assert profile.allocator is not None
    # Parameters, gradients and moments of 1 MiB each, and what is left over of their segments.
    assert profile.peak_bytes <= profile.allocator.allocated_bytes
    assert profile.allocator.allocated_bytes <= profile.allocator.reserved_bytes
    assert profile.allocator.reserved_bytes < 2 * profile.allocator.allocated_bytes
    assert profile.allocator.reserved_bytes % (2 * MIB) == 0
    assert "The caching allocator reserves" in profile.summary()
    assert GraphProfile.from_json(profile.to_json()).allocator == profile.allocator
    on_cpu = _profile("cpu")
    assert on_cpu.allocator is None
    assert "caching allocator" not in on_cpu.summary()


def test_peak_counts_whole_blocks() -> None:
    given = torch.empty(11 * MIB // 4, device="meta")
    assert profile_graph(nn.ReLU(), given, device="cuda:h100").peak_bytes == 2 * 12 * MIB
    assert profile_graph(nn.ReLU(), given, device="cpu").peak_bytes == 2 * 11 * MIB

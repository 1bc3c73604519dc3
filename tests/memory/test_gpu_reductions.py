"""The buffer of a CUDA reduction: sizes measured on an H100 and counted from the source."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_unitscale.memory.cuda_workspace import reduction_bytes
from lightning_unitscale.memory.gpus import GPUS
from lightning_unitscale.profiler import profile_graph

FLOAT, HALF = torch.float32, torch.bfloat16
H100 = GPUS["h100"]


@pytest.mark.parametrize(
    ("shape", "dtype", "seen"),
    [
        # In the backward pass of a ViT-B/16, nn.Transformer, a Swin-T and a ConvNeXt.
        ((6304, 768), FLOAT, 38928384),
        ((6304, 3072), HALF, 138412032),
        ((4096, 512), FLOAT, 16777216),
        ((1568, 3072), HALF, 39321600),
    ],
)
def test_buffer_of_bias_gradient(shape: tuple[int, int], dtype: torch.dtype, seen: int) -> None:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    assert reduction_bytes(H100, tensor, [0]) == seen
    # Batch and positions are one dimension to the kernel.
    assert reduction_bytes(H100, tensor.view(2, -1, shape[1]), [0, 1]) == seen
    assert reduction_bytes(H100, tensor.t(), [1]) == seen


def test_split_of_sums() -> None:
    def size(*shape: int, dims: tuple[int, ...] = (0,), gpu: str = "h100") -> int:
        return reduction_bytes(GPUS[gpu], torch.empty(shape, device="meta"), dims)

    # 4 rows of threads: fewer than 256 values for each.
    assert size(1020, 512) == 0
    # 257 values in 17 parts; each has 32 threads that sum four columns.
    assert size(1025, 512) == 4 * 512 * 17 * 128
    # Blocks of 512 threads, 528 on an H100 and 240 on an A10G, are shared among 15 rows.
    assert size(15, 2**20, dims=(1,)) == 4 * 15 * 36
    assert size(15, 2**20, dims=(1,), gpu="a10g") == 4 * 15 * 16
    assert size(0, 512) == size(4, dims=()) == 0
    # More results than blocks that run at once are not split.
    assert size(2**12, 2**19) == 0


def test_tensors_beyond_32_bits_are_reduced_in_halves() -> None:
    whole, half = (torch.empty(rows, 2**14, device="meta") for rows in (2**16, 2**15))
    assert reduction_bytes(H100, whole, [0]) == reduction_bytes(H100, half, [0]) > 0


def test_buffer_of_variance_is_larger() -> None:
    tensor = torch.empty(4096, 512, device="meta")
    assert reduction_bytes(H100, tensor, [0], 16) == 4 * reduction_bytes(H100, tensor, [0])


def test_profile_includes_reduction_buffer() -> None:
    module, given = nn.Linear(64, 512), torch.empty(4096, 64, device="meta")
    (node,) = profile_graph(module, given, device="cuda:h100").nodes
    assert node.bwd_mem_tmp == 16 * 2**20
    (node,) = profile_graph(module, given).nodes
    assert node.bwd_mem_tmp == 0

"""Workspaces of CUDA kernels, counted by hand from their sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_unitscale.memory.cuda_workspace import cuda_workspace_bytes
from lightning_unitscale.memory.gpus import GPUS
from lightning_unitscale.profiler import profile_graph

aten = torch.ops.aten
_REST: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], False, [0, 0])


def _convolution(gpu: str, images: torch.Tensor, channels: int = 8, groups: int = 1) -> int:
    weight = images.new_empty(channels, images.shape[1] // groups, 3, 3)
    result = images.new_empty(images.shape[0], channels, *images.shape[2:])
    args = (images, weight, None, *_REST, groups)
    return cuda_workspace_bytes(GPUS[gpu], aten.convolution.default, args, result)


def test_convolution_copies_images_weights_and_result_to_channels_last() -> None:
    images = torch.empty(2, 4, 16, 16, device="meta")
    copies = 4 * (2 * 4 * 256 + 8 * 4 * 9 + 2 * 8 * 256)
    assert _convolution("h100", images) == copies
    # Three channels are filled up to 16 bytes.
    assert _convolution("h100", torch.empty(2, 3, 16, 16, device="meta")) == copies
    half = torch.empty(2, 8, 16, 16, device="meta", dtype=torch.float16)
    assert _convolution("t4", half) == 2 * (2 * 8 * 256 + 8 * 8 * 9 + 2 * 8 * 256)


def test_convolutions_without_copies_need_no_workspace() -> None:
    images = torch.empty(2, 4, 16, 16, device="meta")
    assert _convolution("h100", images.to(memory_format=torch.channels_last)) == 0
    # One filter per channel is torch's own kernel, and a T4 has no TF32.
    assert _convolution("h100", images, 4, groups=4) == 0
    assert _convolution("t4", images) == 0


@pytest.mark.parametrize("masks", [[True, True], [True, False], [False, True]])
def test_backward_pass_of_a_convolution(masks: list[bool]) -> None:
    images, weight = (torch.empty(size, device="meta") for size in ((2, 4, 16, 16), (8, 4, 3, 3)))
    grad = torch.empty(2, 8, 16, 16, device="meta")
    args = (grad, images, weight, None, *_REST, 1, [*masks, False])
    copies = 4 * (2 * 4 * 256 + 8 * 4 * 9 + 2 * 8 * 256)
    operator = aten.convolution_backward.default
    assert cuda_workspace_bytes(GPUS["h100"], operator, args, None) == copies
    turned = (grad.transpose(2, 3), *args[1:])
    more = cuda_workspace_bytes(GPUS["h100"], operator, turned, None)
    assert more == copies + 4 * 2 * 8 * 256


def test_embedding_backward_sorts_many_indices() -> None:
    operator = aten.embedding_dense_backward.default
    for count, expected in ((3072, 0), (4000, 32 * 4000 + 4 * (50 + 400) * 16)):
        grad = torch.empty(count, 16, device="meta")
        indices = torch.empty(count, device="meta", dtype=torch.long)
        assert (
            cuda_workspace_bytes(GPUS["h100"], operator, (grad, indices, 50, -1), None) == expected
        )


def test_silu_backward_is_one_kernel() -> None:
    """Torch takes it apart under a dispatch mode, unlike in a real step."""
    given = torch.ones(1000, requires_grad=True)
    for layer in (torch.nn.SiLU(), torch.nn.Mish()):
        for device in ("cpu", "cuda"):
            (node,) = profile_graph(layer, given, device=device).nodes  # type: ignore[arg-type]
            assert (node.saved_bytes, node.bwd_mem_tmp) == (4000, 0)
    # In place, autograd saves a copy of the input.
    layers = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.SiLU(inplace=True))
    silu = profile_graph(layers, torch.ones(4, 10)).nodes[-1]
    assert silu.saved_bytes == 160


def test_accumulating_index_put_sorts_indices() -> None:
    table, rows = torch.empty(50, 8, device="meta"), torch.zeros(6, 7, dtype=torch.long)
    values = torch.empty(6, 7, 8, device="meta")

    def workspace(*args: object) -> int:
        return cuda_workspace_bytes(GPUS["h100"], aten.index_put.default, args, table)

    assert workspace(table, [rows], values, True) == 6 * 8 * 42
    turned = torch.empty(7, 6, 8, device="meta").transpose(0, 1)
    assert workspace(table, [rows], turned, True) == 6 * 8 * 42 + 4 * turned.numel()
    assert workspace(table, [rows], values) == 0
    numbers = torch.empty(6, 7, device="meta")
    assert workspace(table, [rows[:, :1], rows[:1]], numbers, True) == 6 * 8 * 42

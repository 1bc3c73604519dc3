"""The attention kernel that torch chooses on a GPU, and what it saves and allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.fake_device import simulating
from lightning_unitscale.memory.cuda_workspace import cuda_workspace_bytes
from lightning_unitscale.memory.fake_step import FakeStep
from lightning_unitscale.memory.gpus import GPUS, parse_device
from lightning_unitscale.memory.record_operators import ModuleTrace
from lightning_unitscale.profiler import profile_graph

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, *qkv: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*qkv, **self.options)


def _operators(module: nn.Module, *given: Tensor, gpu: str = "h100") -> list[str]:
    """Names of the step's operators."""
    device, described = parse_device(f"cuda:{gpu}")
    step = FakeStep(module, (given, {}), device, None, described)
    record = step.run(ModuleTrace(step.module, step.recorder), step.module)
    return [call.name.split(".")[1] for call in record.operators]


def _kernel(module: nn.Module, *given: Tensor, gpu: str = "h100") -> str:
    names = _operators(module, *given, gpu=gpu)
    kernels = ("flash", "efficient", "cudnn")
    found = [each for each in kernels if f"_scaled_dot_product_{each}_attention" in names]
    for each in found:
        assert f"_scaled_dot_product_{each}_attention_backward" in names
    return found[0] if found else "math"


def _qkv(
    dtype: torch.dtype, depth: int = 64, heads: int = 4, shared: int = 4, length: int = 32
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, heads, length, depth), *[(2, shared, 32, depth)] * 2)
    query, key, value = (torch.ones(shape, dtype=dtype).requires_grad_() for shape in shapes)
    return query, key, value


@pytest.mark.parametrize(
    ("gpu", "dtype", "kernel"),
    [
        ("h100", BF16, "cudnn"), ("h200", FP16, "cudnn"), ("b200", BF16, "cudnn"),
        ("a100", BF16, "flash"), ("l40s", FP16, "flash"), ("a10g", BF16, "flash"),
        ("rtx4090", BF16, "flash"), ("h100", FP32, "efficient"), ("a100", FP32, "efficient"),
        ("t4", FP16, "efficient"), ("t4", FP32, "efficient"), ("t4", BF16, "math"),
        ("h100", torch.float64, "math"),
    ],
)  # fmt: skip
def test_kernel_by_gpu_and_dtype(gpu: str, dtype: torch.dtype, kernel: str) -> None:
    assert _kernel(Attention(), *_qkv(dtype), gpu=gpu) == kernel


@pytest.mark.parametrize(
    ("gpu", "depth", "dtype", "kernel"),
    [
        ("h100", 136, BF16, "flash"), ("h100", 256, BF16, "flash"),
        ("h100", 264, BF16, "efficient"), ("h100", 60, BF16, "flash"),
        ("h100", 6, FP32, "math"), ("h100", 12, FP32, "efficient"),
        ("a10g", 200, BF16, "efficient"), ("a10g", 256, BF16, "flash"),
    ],
)  # fmt: skip
def test_kernel_by_head_size(gpu: str, depth: int, dtype: torch.dtype, kernel: str) -> None:
    assert _kernel(Attention(), *_qkv(dtype, depth), gpu=gpu) == kernel


def test_kernel_by_dropout() -> None:
    # cuDNN draws in sixteenths.
    assert _kernel(Attention(dropout_p=0.125), *_qkv(BF16)) == "cudnn"
    assert _kernel(Attention(dropout_p=0.1), *_qkv(BF16)) == "flash"
    assert _kernel(Attention(dropout_p=0.1), *_qkv(BF16, 256), gpu="a10g") == "efficient"


@pytest.mark.parametrize(
    ("gpu", "shape", "dtype", "kernel"),
    [
        ("h100", (32, 32), torch.bool, "cudnn"), ("h100", (2, 1, 32, 32), BF16, "cudnn"),
        ("h100", (1, 4, 1, 32), torch.bool, "cudnn"), ("a100", (32, 32), torch.bool, "efficient"),
    ],
)  # fmt: skip
def test_kernel_by_mask(gpu: str, shape: tuple[int, ...], dtype: torch.dtype, kernel: str) -> None:
    mask = torch.ones(shape, dtype=dtype)
    assert _kernel(Attention(), *_qkv(BF16), mask, gpu=gpu) == kernel


def test_mask_with_strided_rows_uses_math_kernel() -> None:
    mask = torch.ones(1, 32, 32, 4).permute(0, 3, 1, 2)
    assert _kernel(Attention(), *_qkv(FP32), mask) == "math"
    assert _kernel(Attention(), *_qkv(FP32), mask.contiguous()) == "efficient"


def test_bias_with_gradient_uses_efficient_kernel() -> None:
    bias = torch.ones(1, 4, 32, 32, requires_grad=True)
    assert _kernel(Attention(), *_qkv(FP32), bias) == "efficient"
    # cuDNN has no gradient of the bias.
    half = torch.ones(1, 4, 32, 32, dtype=BF16, requires_grad=True)
    assert _kernel(Attention(), *_qkv(BF16), half) == "efficient"


@pytest.mark.parametrize(
    ("gpu", "dtype", "kernel"),
    [("h100", BF16, "cudnn"), ("a100", BF16, "flash"), ("h100", FP32, "math")],
)
def test_kernel_by_grouped_query_heads(gpu: str, dtype: torch.dtype, kernel: str) -> None:
    assert _kernel(Attention(enable_gqa=True), *_qkv(dtype, shared=2), gpu=gpu) == kernel


def test_kernel_for_causal_mask_of_other_length() -> None:
    module = Attention(is_causal=True)
    assert _kernel(module, *_qkv(BF16, length=16), gpu="a100") == "efficient"
    assert _kernel(module, *_qkv(BF16), gpu="a100") == "flash"


def test_kernel_is_chosen_after_autocast() -> None:
    """Rotary positions leave query and key in FP32 beside a value in BF16."""
    query, key, _ = _qkv(FP32, shared=2)
    value = _qkv(BF16, shared=2)[2]

    class Autocast(Attention):
        def forward(self, *qkv: Tensor) -> Tensor:
            with torch.autocast("cuda", BF16):
                return super().forward(*qkv)

    assert _kernel(Autocast(enable_gqa=True), query, key, value) == "cudnn"


def test_kernels_save_one_number_per_row() -> None:
    for gpu in ("h100", "a100"):
        profile = profile_graph(Attention(), *_qkv(BF16), device=f"cuda:{gpu}")
        (node,) = profile.nodes
        qkv = 3 * 2 * 4 * 32 * 64 * 2
        rows = 4 * 2 * 4 * 32
        random_state = node.saved_bytes - (qkv + node.fwd_mem_out + rows)
        assert 0 <= random_state <= 24


def _workspace(kernel: str, gpu: str, dtype: torch.dtype, depth: int, shared: int = 4) -> int:
    query, key, value = _qkv(dtype, depth, shared=shared)
    operator = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward")
    args = (query.transpose(1, 2).contiguous().transpose(1, 2), query, key, value)
    return cuda_workspace_bytes(GPUS[gpu], operator, args, None)


def test_workspace_of_backward_kernels() -> None:
    rows = 2 * 4 * 32
    assert _workspace("cudnn", "h100", BF16, 64) == 4 * rows * 65
    # Flash rounds the length to 128, and has copies for shared heads.
    assert _workspace("flash", "a100", BF16, 64) == 4 * 2 * 4 * 128 * 65
    copies = 2 * 2 * 4 * 32 * 64 * 2
    assert _workspace("flash", "a100", BF16, 64, shared=2) == 4 * 2 * 4 * 128 * 65 + copies
    # A tile of 64 by 64 for each head with 16 bytes of locks, and a sum for each row.
    tile = 4 * 64 * 64 + 16
    assert _workspace("efficient", "h100", FP32, 64) == 2 * 4 * tile + 4 * rows
    assert _workspace("efficient", "h100", BF16, 64) == 2 * 4 * tile + 4 * rows
    wide = 2 * (4 * 128 * 64 + 16)
    assert _workspace("efficient", "h100", FP32, 128) == 2 * 4 * wide + 4 * rows
    assert _workspace("efficient", "a10g", FP32, 128) == 2 * 4 * 2 * tile + 4 * rows


def test_simulated_capability_is_reported_by_torch() -> None:
    with simulating(torch.device("cuda"), (7, 5)):
        assert torch.cuda.get_device_capability() == (7, 5)

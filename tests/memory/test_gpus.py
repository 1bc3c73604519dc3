"""Descriptions and names of GPUs, and their titles in reports."""

from __future__ import annotations

import types
from typing import get_args

import pytest
import torch
from torch import nn

from lightning_unitscale.memory import gpus
from lightning_unitscale.memory.gpus import DEVICE_NAMES, GPUS, describe_gpu, parse_device
from lightning_unitscale.profiler import DeviceType, GraphProfile, MetaInfoProp, profile_graph

MIB, GIB = 2**20, 2**30


def test_device_type_lists_every_gpu() -> None:
    assert get_args(DeviceType) == ("cpu", "cuda", *(f"cuda:{name}" for name in GPUS))
    assert get_args(DeviceType) == DEVICE_NAMES


@pytest.mark.parametrize("name", GPUS)
def test_gpu_is_parsed_by_name(name: str) -> None:
    device, gpu = parse_device(f"cuda:{name}")
    assert device == torch.device("cuda")
    assert gpu is GPUS[name] and gpu.name == name
    assert 15 * GIB < gpu.memory_bytes < 192 * GIB
    # 32 MiB on Hopper, ":4096:2:16:8" elsewhere.
    expected = 32 * MIB if gpu.capability == (9, 0) else 8 * MIB + 128 * 1024
    assert gpu.cublas_workspace_bytes == expected
    assert gpu.cublaslt_workspace_bytes == MIB
    # A matmul needs hundreds of operations for each byte that it reads.
    assert 30 < gpu.flops_per_second / gpu.bytes_per_second < 450


def test_unnamed_cuda_is_present_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parse_device("cuda") == (torch.device("cuda"), GPUS["h100"])
    assert parse_device("cpu") == (torch.device("cpu"), None)
    found = types.SimpleNamespace(
        name="NVIDIA A10G", major=8, minor=6, total_memory=22 * GIB, multi_processor_count=80
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    gpu = gpus.present_gpu()
    assert (gpu.name, gpu.title, gpu.memory_bytes) == ("a10g", "NVIDIA A10G", 22 * GIB)
    assert parse_device(torch.device("cuda"))[1] == gpu


@pytest.mark.parametrize(
    ("title", "capability", "listed"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "rtx4090"),
        ("Tesla T4", (7, 5), "t4"),
    ],
)
def test_described_gpu_is_matched_to_listed_gpu(
    title: str, capability: tuple[int, int], listed: str
) -> None:
    gpu = describe_gpu(title, capability, 10 * GIB, 7)
    assert gpu.name == listed and gpu.title == title
    assert gpu.num_multiprocessors == GPUS[listed].num_multiprocessors


def test_unlisted_gpu_uses_its_own_capability() -> None:
    gpu = describe_gpu("NVIDIA GeForce RTX 5090", (12, 0), 32 * GIB, 170)
    assert (gpu.title, gpu.capability, gpu.num_multiprocessors) == (
        "NVIDIA GeForce RTX 5090", (12, 0), 170,
    )  # fmt: skip
    assert gpu.flops_per_second == GPUS["b200"].flops_per_second
    gh200 = describe_gpu("NVIDIA GH200 480GB", (9, 0), 96 * GIB, 132)
    assert gh200.cublas_workspace_bytes == 32 * MIB


@pytest.mark.parametrize("device", ["cuda:h1000", "cuda:0", "h100", "mps", 3])
def test_unknown_device_is_an_error(device: object) -> None:
    with pytest.raises(ValueError, match="its kernels are not known"):
        parse_device(device)  # type: ignore[arg-type]


def test_report_has_gpu_name() -> None:
    layers, given = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(4, 8)
    profile = profile_graph(layers, given, device="cuda:l40s")
    assert (profile.device, profile.gpu) == ("cuda", "L40S 48GB")
    assert " on cuda (L40S 48GB) in the " in profile.totals()
    assert GraphProfile.from_json(profile.to_json()) == profile
    graph = MetaInfoProp(torch.fx.symbolic_trace(layers), device="cuda:t4").run(given)
    assert graph.gpu == "T4 16GB"
    on_cpu = profile_graph(layers, given)
    assert on_cpu.gpu == "" and on_cpu.library_bytes == 0
    assert "library" not in on_cpu.totals()

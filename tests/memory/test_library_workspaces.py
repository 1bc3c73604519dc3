"""Workspaces that cuBLAS and cublasLt keep for each thread."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.memory.gpus import GPUS
from lightning_unitscale.profiler import DeviceType, profile_graph

MIB = 2**20
HOPPER, AMPERE = 32 * MIB, 8 * MIB + 128 * 1024


@pytest.fixture(autouse=True)
def _default_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Deterministic runs on a GPU set one of them for the whole process.
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)


def _kept(module: nn.Module, *given: Tensor, device: DeviceType = "cuda:h100") -> int:
    profile = profile_graph(module, *given, device=device)
    assert profile.peak.by_kind["library"] == profile.library_bytes
    return profile.library_bytes


@pytest.mark.parametrize(("device", "size"), [("cuda:h100", HOPPER), ("cuda:a100", AMPERE)])
def test_one_workspace_per_thread_and_one_for_cublaslt(device: DeviceType, size: int) -> None:
    given = torch.ones(4, 8)
    plain, biased = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
    assert _kept(plain, given, device=device) == 2 * size
    assert _kept(biased, given, device=device) == 2 * size + MIB
    assert _kept(nn.ReLU(), given.requires_grad_(), device=device) == 0
    # Without a gradient there is no backward pass.
    frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
    assert _kept(frozen, torch.ones(4, 8), device=device) == size


def test_recurrent_dropout_keeps_generator_states() -> None:
    """One of 24 bytes per thread that the GPU can hold, as seen on an H100."""
    given = torch.ones(4, 8, 16)
    plain, dropped = (nn.LSTM(16, 16, 2, dropout=rate) for rate in (0.0, 0.1))
    assert _kept(dropped, given) - _kept(plain, given) == 6488064
    assert _kept(dropped, given, device="cuda:t4") == 40 * 1024 * 24
    assert _kept(dropped.eval().requires_grad_(False), given) == 0


def test_workspaces_exist_throughout_step() -> None:
    profile = profile_graph(nn.Linear(8, 8), torch.ones(4, 8), device="cuda:h100")
    library = profile.timeline.live_by_kind["library"]
    assert set(library) == {profile.library_bytes}
    assert profile.timeline.before_bytes > profile.library_bytes
    assert "library" in profile.totals()


def test_one_feature_bias_does_not_use_cublaslt() -> None:
    assert _kept(nn.Linear(8, 1), torch.ones(4, 8)) == 2 * HOPPER
    assert _kept(nn.Linear(8, 8), torch.ones(4, 8)) == 2 * HOPPER + MIB


def test_environment_variables_set_workspace_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "2048")
    assert _kept(nn.Linear(8, 8), torch.ones(4, 8)) == 2 * AMPERE + 2 * MIB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "none")
    assert GPUS["h100"].cublas_workspace_bytes == HOPPER
    assert _kept(nn.Linear(8, 8), torch.ones(4, 8)) == 2 * HOPPER + 2 * MIB

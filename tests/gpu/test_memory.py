"""Predictions on fake tensors against the device's allocator."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional as F

from examples.gpt import GPT
from lightning_unitscale import RematCallback
from lightning_unitscale.memory.real_memory import PeakMeter
from lightning_unitscale.profiler import profile_graph
from tests.gpu.models import BUDGET, train


def _step(module, tokens, targets, optimizer) -> None:
    logits = module(tokens)  # alive until the backward pass is over, as in most loops
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    del logits
    optimizer.step()
    optimizer.zero_grad()


def _others(device: torch.device) -> int:
    """Bytes on the device that other tests have left.

    What cuBLAS keeps for each thread that has multiplied is freed.
    """
    gc.collect()
    if device.type == "cpu":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def _without_workspaces(peak: int, device: torch.device) -> int:
    """A peak without cuBLAS's workspaces, which predictions of tensors leave out."""
    if device.type == "cpu":
        return peak
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return peak - (before - torch.cuda.memory_allocated())


@pytest.fixture
def _not_accurate_yet(device: torch.device, request: pytest.FixtureRequest) -> None:
    if device.type == "cuda":
        why = (
            "peaks on a GPU are not predicted within 5 % yet: 398.5 MB for a step on an H100, "
            "where 483.4 MB were allocated, with cuBLAS's workspaces"
        )
        request.applymarker(pytest.mark.xfail(strict=False, reason=why))


@pytest.mark.usefixtures("_not_accurate_yet")
def test_predicted_peak_of_step(device: torch.device) -> None:
    width, context, batch = (512, 256, 16) if device.type == "cuda" else (64, 64, 8)
    others = _others(device)
    torch.manual_seed(0)
    module = GPT(width=width, depth=2, num_heads=4, context=context).to(device)
    tokens, targets = torch.randint(256, (2, batch, context), device=device)
    optimizer = torch.optim.AdamW(module.parameters())
    profile = profile_graph(
        module,
        tokens,
        device=device.type,
        optimizer=torch.optim.AdamW,
        loss=lambda logits: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    )
    # A step before that makes the optimizer's state, and the library's workspaces.
    for _ in range(2):
        _step(module, tokens, targets, optimizer)
    gc.collect()
    meter = PeakMeter(device)
    meter.start()
    _step(module, tokens, targets, optimizer)
    state = [dict(values) for values in optimizer.state.values()]
    meter.mark([*module.parameters(), *module.buffers(), state, tokens, targets])
    _step(module, tokens, targets, optimizer)
    measured = meter.stop()
    assert measured is not None
    if device.type == "cuda":
        assert profile.allocator.reserved_bytes >= profile.peak_bytes
    measured = _without_workspaces(measured, device) - others
    assert profile.peak_bytes == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("_not_accurate_yet")
def test_predicted_peak_within_budget(device: torch.device) -> None:
    others = _others(device)
    callback = RematCallback(BUDGET)
    train(device, [callback])
    measured = callback.measured_peak_bytes
    assert measured is not None
    measured = _without_workspaces(measured, device) - others
    assert callback.predicted_peak_bytes == pytest.approx(measured, rel=0.05)

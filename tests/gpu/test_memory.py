"""What a profile on fake tensors predicts, beside what the allocator of the device counts."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional as F

from examples.gpt import GPT
from lightning_unitscale.profiler import profile_graph
from lightning_unitscale.profiler.measure import PeakMeter


def _step(module, tokens, targets, optimizer) -> None:
    logits = module(tokens)  # alive until the backward pass is over, as in most loops
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    del logits
    optimizer.step()
    optimizer.zero_grad()


def test_the_peak_of_a_step(device: torch.device, request: pytest.FixtureRequest) -> None:
    if device.type == "cuda":
        why = "predicted 398.5 MB, measured 483.4 MB on an H100; docs/measurements/gpu.md"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    width, context, batch = (512, 256, 16) if device.type == "cuda" else (64, 64, 8)
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
    assert profile.peak_bytes == pytest.approx(measured, rel=0.05)
    if device.type == "cuda":
        assert profile.allocator.reserved_bytes >= profile.peak_bytes

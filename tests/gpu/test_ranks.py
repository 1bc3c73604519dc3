"""Two GPUs under NCCL share their units, and have the bits of the run without callbacks."""

from __future__ import annotations

import pytest
import torch

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from tests.gpu.models import train
from tests.helpers import assert_same_bits


def test_ddp_is_bit_identical(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU at most; tests/distributed has two processes on a CPU")
    options = {"devices": 2, "strategy": "ddp_spawn"}
    plain = train(device, **options)
    scaled = train(device, [UnitScaleCallback(), ScaleMonitor(every_n_steps=2)], **options)
    assert_same_bits(scaled.weights, plain.weights)

"""FP8 matmuls on an accelerator equal their simulation."""

from __future__ import annotations

import pytest
import torch

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.callbacks import FP8, Simulate
from lightning_unitscale.functional.low_precision import why_no_fp8
from tests.gpu.models import losses, train


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fp8_matches_its_simulation(precision: str, device: torch.device) -> None:
    if (reason := why_no_fp8(device)) is not None:
        pytest.skip(reason)
    fp8 = UnitScaleCallback(precision=FP8(exclude=None, grid="fixed"))
    real = losses(train(device, [fp8], precision=precision, steps=6))
    simulated = UnitScaleCallback(simulate=Simulate(("E4M3FN", "E4M3FN")))
    expected = losses(train(device, [simulated], precision=precision, steps=6))
    # The simulation also rounds what attention multiplies.
    assert real == pytest.approx(expected, rel=0.01)
    assert real != losses(train(device, precision=precision, steps=6))
    assert fp8.coverage.fraction_of_flops("format") > 0.5


def test_stochastic_rounding_is_reproducible(device: torch.device) -> None:
    first, second = (
        train(device, [UnitScaleCallback(simulate=Simulate("fp8", rounding="stochastic"))])
        for _ in range(2)
    )
    assert losses(first) == losses(second)

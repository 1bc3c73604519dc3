"""Measuring does not change anything."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.matmuls.measurement import (
    FORWARD,
    Extent,
    MeasuredMatmul,
    Measurement,
    Site,
    root_mean_square,
)
from lightning_unitscale.matmuls.module_matmuls import find_loss
from lightning_unitscale.transforms import lossless_unit_scale
from tests.helpers import assert_same_bits, run


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_root_mean_square_neither_overflows_nor_underflows(dtype: torch.dtype) -> None:
    for exponent in (-14, 0, 14) if dtype == torch.float16 else (-100, 0, 100):
        tensor = (torch.randn(50).clamp(-1.5, 1.5) * 2.0**exponent).to(dtype)
        expected = np.sqrt(np.mean(tensor.double().numpy() ** 2))
        assert float(root_mean_square(tensor)) == pytest.approx(expected, rel=1e-9)
    assert float(root_mean_square(torch.empty(0, 3, dtype=dtype))) == 0
    assert float(root_mean_square(torch.tensor(-3.0, dtype=dtype))) == 3
    assert math.isnan(root_mean_square(torch.tensor([1.0, math.nan], dtype=dtype)))


def test_tensor_measured_twice_has_combined_rms() -> None:
    site = Site("linear", "", ("input",))
    calls = [
        MeasuredMatmul(site, FORWARD, site.operand_names, (extent,), (), torch.float64, (None,))
        for extent in (Extent(3e100), Extent(4e100))
    ]
    measured = Measurement.of_matmuls(calls)
    assert measured.forward == pytest.approx({"linear:input": math.sqrt(12.5) * 1e100})
    assert measured.backward == {}


def test_find_loss_in_every_output_structure() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    for output in (loss, {"loss": loss}, (loss, 1), [loss], {"loss": loss, "x": torch.ones(3)}):
        assert find_loss(output) is loss
    for output in (None, 3.0, torch.ones(3, requires_grad=True), torch.ones(()), {}, (), "loss"):
        assert find_loss(output) is None


def test_failed_rehearsal_keeps_module_usable() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.calls = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls.append(1)
            if x.shape[0] == 3:
                raise ValueError("three rows are too few")
            return self.linear(x).sum()

    module = Moody()
    with pytest.raises(ValueError, match="three rows are too few"):
        lossless_unit_scale(module, torch.ones(3, 4))
    scaled = lossless_unit_scale(module, torch.ones(5, 4))
    assert scaled.calls == []
    assert_same_bits(scaled(torch.ones(5, 4)), module(torch.ones(5, 4)))


def test_example_inputs_are_not_changed() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            batch["seen"] = True
            batch["x"].mul_(2.0)
            return self.linear(batch["x"]).sum()

    x = torch.randn(3, 4)
    batch = {"x": x}
    scaled = lossless_unit_scale(Loss(), batch)
    assert batch == {"x": x} and scaled.linear.weight.grad is None
    assert_same_bits(run(scaled, {"x": x})["output"], run(scaled, {"x": x})["output"])

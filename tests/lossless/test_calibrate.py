"""Measuring does not change anything."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.attach import captured_forward
from lightning_unitscale.lossless.calibrate import Calibrator, Measured, root_mean_square
from lightning_unitscale.lossless.rehearsal import calibrate, find_loss
from lightning_unitscale.lossless.rewrite import LosslessUnitScale
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


def test_the_calibrator_measures_values_and_gradients_of_a_product() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    inputs = torch.randn(5, 6)
    _, step = captured_forward(module, "test")
    calibrator = LosslessUnitScale().calibrator()
    assert not calibrator.saw_gradients
    output = step.rehearse(calibrator, inputs)
    seed = torch.randn_like(output)
    output.backward(seed)
    assert calibrator.saw_gradients
    measured = calibrator.measured()
    forward, backward = measured.forward, measured.backward
    hidden = module[0](inputs)
    expected_forward = {
        "0.linear:input": inputs,
        "0.linear:weight": module[0].weight,
        "1.linear:input": hidden,
        "1.linear:weight": module[1].weight,
    }
    assert forward == pytest.approx(
        {name: float(one.detach().double().square().mean().sqrt())
         for name, one in expected_forward.items()}
    )  # fmt: skip
    arriving = {"1.linear": seed, "0.linear": seed @ module[1].weight}
    assert backward == pytest.approx(
        {
            name: float(one.detach().double().square().mean().sqrt())
            for name, one in arriving.items()
        }
    )
    calibrator.clear()
    assert calibrator.measured() == Measured()


def test_a_tensor_measured_twice_gets_the_rms_of_both() -> None:
    calibrator = Calibrator()
    calibrator.measure("x", torch.full((4,), 3e100, dtype=torch.float64))
    calibrator.measure("x", torch.full((4,), 4e100, dtype=torch.float64))
    for ignored in (
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.complex64),
        None,
        3,
    ):
        calibrator.measure("ignored", ignored)
    calibrator.watch("constant", torch.ones(3))
    measured = calibrator.measured()
    assert measured.forward == pytest.approx({"x": math.sqrt(12.5) * 1e100})
    assert measured.backward == {}


def test_find_loss() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    for output in (loss, {"loss": loss}, (loss, 1), [loss], {"loss": loss, "x": torch.ones(3)}):
        assert find_loss(output) is loss
    for output in (None, 3.0, torch.ones(3, requires_grad=True), torch.ones(()), {}, (), "loss"):
        assert find_loss(output) is None


def test_a_rehearsal_that_raises_leaves_the_module_usable() -> None:
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


def test_which_of_several_results_is_the_loss_is_told_without_a_second_call() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.rows = iter([1])  # a second call would warn of it

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = self.linear(x)
            return {"logits": logits, "other": logits.square().mean(), "loss": logits.sum()}

    _, step = captured_forward(Several(), "test")
    rewrite = LosslessUnitScale()
    x = torch.randn(5, 4)
    measured = calibrate(step, rewrite, (x,), {})
    assert measured is not None
    assert measured["linear.bias"] == pytest.approx(5)
    assert measured["linear.weight"] == pytest.approx(float(x.sum(0).square().mean().sqrt()))
    assert rewrite.gauge["linear.linear"].log2_gamma == 0


def test_calibrate_seeds_the_backward_pass_and_touches_no_gradient() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            batch["seen"] = True
            return self.linear(batch["x"]).sum()

    module, batch = Loss(), {"x": torch.randn(3, 4)}
    rewrite = LosslessUnitScale()
    scaled, step = captured_forward(module, "test", rewrite)
    scaled.linear.weight.grad = torch.full((4, 4), 7.0)
    for exponent in (16, -4):
        assert calibrate(step, rewrite, (batch,), {}, seed_gradient=2.0**exponent)
        assert rewrite.gauge["linear.linear"].log2_gamma == exponent
    assert batch.keys() == {"x"}
    assert torch.equal(scaled.linear.weight.grad, torch.full((4, 4), 7.0))


def test_an_example_is_left_as_it_is() -> None:
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


def test_calibrate_takes_the_results_that_the_ranks_agreed_on() -> None:
    rewrite = LosslessUnitScale()
    _, step = captured_forward(nn.Linear(4, 4), "test", rewrite)

    def agreed(measured: Measured) -> Measured:
        return Measured({name: 1024.0 for name in measured.forward})

    calibrate(step, rewrite, (torch.randn(3, 4),), {}, results=agreed)
    assert {pair.log2_sigma for pair in rewrite.gauge.values()} == {10}

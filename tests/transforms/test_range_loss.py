"""What FP8 would lose of a tensor, against counting on the tensor itself."""

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.formats import E4M3FN, E5M2, NumberFormat
from lightning_unitscale.quantize import quantize
from lightning_unitscale.transforms.attach import captured_forward
from lightning_unitscale.transforms.calibration import root_mean_square
from lightning_unitscale.transforms.lossless import LosslessUnitScale
from lightning_unitscale.transforms.lossless_unit_scale import calibrate
from lightning_unitscale.transforms.range_loss import RangeCalibrator, lost_shares


@pytest.mark.parametrize("format", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
def test_shares_are_those_of_a_rounding(format: NumberFormat, size: float) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(200_000) ** 9 * size
    tensor[:1000] = 0.0
    rms = root_mean_square(tensor)
    stored = tensor / 2.0 ** round(math.log2(rms.item()))
    beyond = (stored.abs() > format.max).double().mean()
    nonzero = stored[stored != 0]
    flushed = (quantize(nonzero, format) == 0).double().mean()
    found = lost_shares(tensor, rms, format)
    assert found.tolist() == pytest.approx([beyond.item(), flushed.item()], rel=1e-6)
    assert flushed > 0.01


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4), torch.ones(0), torch.tensor([1.0, math.inf]), torch.tensor([math.nan])],
    ids=["zeros", "empty", "inf", "nan"],
)
def test_nothing_is_said_of_tensors_without_a_unit(tensor: Tensor) -> None:
    assert lost_shares(tensor, root_mean_square(tensor), E4M3FN).tolist() == [0.0, 0.0]


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.massive, self.flat = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor, outlier: Tensor, sparse: Tensor) -> Tensor:
        made = self.fine(x) + self.massive(x + outlier) + self.flat(x * sparse)
        return made.square().mean()


@pytest.mark.parametrize("depth", ["products", "all"])
def test_products_that_fp8_does_not_fit(depth: str) -> None:
    torch.manual_seed(0)
    x, outlier, sparse = torch.randn(8192, 64), torch.zeros(8192, 64), torch.full((8192, 64), 1e-5)
    outlier[5, 7] = 1e6
    sparse[0] = 1.0
    rewrite = LosslessUnitScale(depth, measures_range=True)  # type: ignore[arg-type]
    _, step = captured_forward(_Tower(), "test", rewrite)
    seen: list[dict[str, str]] = []

    def results(calibrator: object) -> tuple[dict[str, float], dict[str, float]]:
        assert isinstance(calibrator, RangeCalibrator)
        seen.append(calibrator.unfit())
        return {}, {}

    calibrate(step, rewrite, (x, outlier, sparse), {}, results=results)
    (unfit,) = seen
    assert set(unfit) >= {"massive.linear", "flat.linear"} and "fine.linear" not in unfit
    assert unfit["massive.linear"].endswith("of its input is beyond E4M3FN's range")
    assert unfit["flat.linear"].endswith("of its input would be zero in E4M3FN")

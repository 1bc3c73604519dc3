"""Predicted losses of a tensor to FP8, against counts on the tensor itself."""

import math
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.formats import E4M3FN, E5M2, NumberFormat
from lightning_unitscale.matmuls.fp8_linear import FP8Matmuls
from lightning_unitscale.matmuls.matmul_formats import FP8Linears
from lightning_unitscale.matmuls.measurement import (
    FORMATS,
    NUM_SHARES,
    Unrepresentable,
    root_mean_square,
    stored_row,
    stored_shares,
    unrepresentable_among,
)
from lightning_unitscale.matmuls.scaled_methods import AttachedSession
from lightning_unitscale.quantize import quantize
from lightning_unitscale.scales.layout import Direction


@pytest.mark.parametrize("format", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
def test_predicted_loss_fractions_match_rounding(format: NumberFormat, size: float) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(200_000) ** 9 * size
    tensor[:1000] = 0.0
    stored = tensor / 2.0 ** round(math.log2(root_mean_square(tensor).item()))
    beyond = (stored.abs() > format.max).double().mean()
    nonzero = stored[stored != 0]
    flushed = (quantize(nonzero, format) == 0).double().mean()
    direction: Direction = "forward" if format == E4M3FN else "backward"
    found = stored_shares(stored, direction).tolist()
    # A gradient may be cast to either.
    assert FORMATS[direction][-1] == format and len(found) == NUM_SHARES
    pair = found[:2] if direction == "forward" else found[2:]
    assert pair == pytest.approx([beyond.item(), flushed.item()], rel=1e-6)
    if direction == "backward":
        assert found[:2] == pytest.approx(stored_shares(stored, "forward")[:2].tolist())
    assert flushed > 0.01


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4), torch.ones(0), torch.tensor([1.0, math.inf]), torch.tensor([math.nan])],
    ids=["zeros", "empty", "inf", "nan"],
)
def test_tensors_without_unit_are_not_judged(tensor: Tensor) -> None:
    row = ("backward", "linear", stored_row(tensor, "backward").tolist())
    assert unrepresentable_among([row]) == Unrepresentable()


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.massive, self.flat, self.uneven = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, outlier: Tensor, sparse: Tensor) -> Tensor:
        made = self.fine(x) + self.massive(x + outlier) + self.flat(x * sparse)
        # Its gradient is a ten-thousandth of the others' in nine rows of ten.
        uneven = self.uneven(x) * torch.where(torch.arange(len(x)) % 10 == 0, 1.0, 0.01)[:, None]
        # Bounded: what one outlier makes is no outlier among the gradients.
        return made.sin().mean() + uneven.square().mean()


def test_matmuls_that_do_not_fit_fp8() -> None:
    torch.manual_seed(0)
    x, outlier, sparse = torch.randn(8192, 64), torch.zeros(8192, 64), torch.full((8192, 64), 1e-5)
    outlier[5, 7] = 1e6
    sparse[0] = 1.0
    config = FP8Linears()
    module = _Tower()
    attached = AttachedSession(
        module, ["forward"], numerics=[FP8Matmuls(config, measures_range=True)]
    )
    with ExitStack() as stack:
        stack.callback(attached.detach)
        module(x, outlier, sparse).backward()
    matmuls, gradients = config.unfit.matmuls, config.unfit.gradients
    assert set(matmuls) == {"massive.linear", "flat.linear"}, matmuls
    assert matmuls["massive.linear"].endswith("of its input is beyond E4M3FN's range")
    assert matmuls["flat.linear"].endswith("of its input would be zero in E4M3FN")
    assert set(gradients) == {"uneven.linear"}, gradients
    assert gradients["uneven.linear"].endswith("of its gradient would be zero in E4M3FN")


def test_without_removes_known_misfits() -> None:
    known = Unrepresentable({"a": "too wide"}, {"b": "uneven"})
    found = Unrepresentable({"a": "wider", "c": "too wide"}, {"b": "uneven", "a": "uneven"})
    assert found.without(known) == Unrepresentable({"c": "too wide"}, {"a": "uneven"})
    assert known.without(known) == Unrepresentable()

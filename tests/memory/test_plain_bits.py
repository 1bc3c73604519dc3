"""Planned graphs run the kernels of an ordinary step, with the same bits."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.aot_backend import plain_kernels
from lightning_unitscale.transforms import remat
from tests.helpers import assert_same_bits

RESIZED = {
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "aligned corners": nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "bicubic": nn.Upsample(size=(9, 7), mode="bicubic"),
    "nearest": nn.Upsample(scale_factor=3),
}


def _network(resize: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), resize, nn.Conv2d(8, 3, 3), nn.GELU())


@pytest.mark.slow_cases
@pytest.mark.parametrize("resize", RESIZED.values(), ids=RESIZED)
def test_resized_images_are_bit_identical(resize: nn.Module) -> None:
    plain = _network(resize)
    planned = remat(copy.deepcopy(plain), "min_cut")
    for size in (8, 10, 12):  # the later ones share a graph with a symbolic size
        image = torch.randn(2, 3, size, size)
        results = []
        for module in (plain, planned):
            module.zero_grad()
            loss = module(image).square().mean()
            loss.backward()
            results.append([loss.detach(), *[param.grad.clone() for param in module.parameters()]])
        for expected, got in zip(*results, strict=True):
            assert torch.equal(expected, got)
    assert len(planned.remat_reports()) == 2


class Updates(nn.Module):
    """Updates whose ``value`` is rounded in another place if they are taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 16), nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        x = torch.addcdiv(x, x, self.scale, value=0.3) + torch.addcmul(x, x, x, value=0.7)
        return x.float().square().mean()


class Inverse(nn.Module):
    """Inverts a matrix, whose gradient is made of matmuls that no autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.matrix = nn.Linear(16, 16), nn.Parameter(torch.eye(16) + torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) @ torch.linalg.inv(self.matrix)).float().square().mean()


class Bilinear(nn.Module):
    """Multiplies by a kernel whose inner matmuls autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.layer = nn.Bilinear(16, 16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            first = self.pairs(x, x.flip(1))
        return self.layer(first + self.pairs(x, x * x)).float().square().mean()


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("kind", [Updates, Inverse, Bilinear])
def test_backward_pass_outside_autocast_is_bit_identical(
    kind: type[nn.Module], is_autocast: bool
) -> None:
    torch.manual_seed(0)
    plain = kind()
    planned = remat(plain, "min_cut")
    x, results = torch.randn(64, 16), []
    for module in (plain, planned):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = module(x)
        loss.backward()
        results.append([loss.detach(), *[param.grad for param in module.parameters()]])
    assert_same_bits(*results)
    assert len(planned.remat_reports()) == 1


def test_plain_kernels_restores_operators() -> None:
    operator = torch.ops.aten.upsample_bilinear2d.default
    before = dict(operator.py_kernels)
    with pytest.raises(RuntimeError, match="within"), plain_kernels():
        assert operator.py_kernels != before
        raise RuntimeError("within")
    assert operator.py_kernels == before


class OtherLayout(nn.Module):
    """Gives softplus a gradient whose layout its backward kernel keeps, unlike its meta function.

    A view of the result then needs a copy (Doge, PVT and PatchTST of transformers).
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        turned = nn.functional.softplus(self.layer(x)).transpose(1, 2)
        return turned.exp().cumsum(-1).mean()


def test_view_of_other_layout_is_copied() -> None:
    torch.manual_seed(0)
    plain = OtherLayout()
    planned = remat(copy.deepcopy(plain), "min_cut")
    x = torch.randn(4, 16, 8)
    for module in (plain, planned):
        module(x).backward()
    for expected, got in zip(plain.parameters(), planned.parameters(), strict=True):
        assert_same_bits(expected.grad, got.grad)
    assert len(planned.remat_reports()) == 1

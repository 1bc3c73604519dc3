"""Graphs that are planned have the kernels, and so the bits, of a plain step."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.dynamo.backend import plain_kernels
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


@pytest.mark.parametrize("resize", RESIZED.values(), ids=RESIZED)
def test_resized_images_have_the_bits_of_a_plain_step(resize: nn.Module) -> None:
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


def _quotients(x: Tensor, y: Tensor) -> Tensor:
    """An update whose ``value`` is rounded in another place if it is taken apart."""
    return torch.addcdiv(x, x, y, value=0.3) + torch.addcmul(x, x, y, value=0.7)


@pytest.mark.parametrize("is_autocast", [False, True])
def test_updates_have_the_bits_of_a_plain_step(is_autocast: bool) -> None:
    torch.manual_seed(0)

    class Updates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(16, 16), nn.Parameter(torch.rand(16) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return _quotients(self.layer(x), self.scale).float().square().mean()

    plain = Updates()
    planned = remat(plain, "min_cut")
    x, results = torch.randn(64, 16), []
    for module in (plain, planned):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = module(x)
        loss.backward()
        results.append([loss.detach(), *[param.grad for param in module.parameters()]])
    assert_same_bits(*results)
    assert len(planned.remat_reports()) == 1


def test_afterwards_the_operators_are_what_they_were() -> None:
    operator = torch.ops.aten.upsample_bilinear2d.default
    before = dict(operator.py_kernels)
    with pytest.raises(RuntimeError, match="within"), plain_kernels():
        assert operator.py_kernels != before
        raise RuntimeError("within")
    assert operator.py_kernels == before

"""A captured step that deletes an attribute of a module and sets it again leaves it in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.rules.transform import unit_scale
from lightning_unitscale.transforms import remat
from tests.helpers import assert_same_bits, run

X = torch.randn(3, 4)


class Masked(nn.Module):
    """Computes with a masked weight in place of the parameter, and puts the parameter back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layers[1]
        weight = layer.weight
        del layer.weight
        layer.weight = weight * (weight.abs() > 0.1)  # type: ignore[operator]
        result = self.layers(x).square().sum()
        del layer.weight
        layer.weight = weight
        return result


class Scratch:
    """An object of the user's with an attribute that its class has as well."""

    scale = 2.0


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scratch = Scratch()

    def forward(self, x: Tensor) -> Tensor:
        self.scratch.scale = 3.0
        result = self.linear(x * self.scratch.scale)
        del self.scratch.scale
        return (result * self.scratch.scale).sum()


@pytest.mark.parametrize("kind", [Masked, Remembers])
def test_attributes_set_and_deleted_match_plain_module(kind: type[nn.Module]) -> None:
    plain = kind()
    planned = remat(copy.deepcopy(plain), "min_cut")
    for _ in range(3):
        assert_same_bits(run(planned, X), run(plain, X))
    assert [*dict(planned.named_parameters())] == [*dict(plain.named_parameters())]


def test_replaced_weight_under_rules_repeats_exactly() -> None:
    scaled = unit_scale(Masked())
    run(scaled, X)  # the parameter goes to the end of the layer's dictionary, as it does uncaptured
    assert_same_bits(run(scaled, X), run(scaled, X))

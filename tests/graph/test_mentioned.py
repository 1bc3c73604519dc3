"""What the code of a module's methods mentions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lightning_unitscale.graph.mentioned import mentioned

DIRECT = [1]
BY_A_FUNCTION = [2]
IN_A_LAMBDA = [3]
BY_A_PROPERTY = [4]
NOT_MENTIONED = [5]
SCALE = 0.5


def _helper(x: Tensor) -> Tensor:
    _again(x, 0)
    return x + len(BY_A_FUNCTION)


def _again(x: Tensor, depth: int) -> Tensor:
    return _helper(x) if depth else x


class Base(nn.Module):
    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE * math.pi


class Mentioning(Base):
    @property
    def listed(self) -> list[int]:
        return BY_A_PROPERTY

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return torch.relu(_helper(x))

    def forward(self, x: Tensor) -> Tensor:
        pick = lambda: [len(IN_A_LAMBDA) for _ in range(2)]  # noqa: E731
        return self.static(self.scaled(x)) + DIRECT[0] + pick()[0]


def test_globals_are_found_through_functions_properties_and_bases() -> None:
    module = nn.Sequential(Mentioning())
    found = {one.name: one.value for one in mentioned(module)}
    assert found == {
        "DIRECT": DIRECT,
        "BY_A_FUNCTION": BY_A_FUNCTION,
        "IN_A_LAMBDA": IN_A_LAMBDA,
        "BY_A_PROPERTY": BY_A_PROPERTY,
        "SCALE": SCALE,
    }


def test_a_name_gets_its_value_back() -> None:
    (scale,) = (one for one in mentioned(Base()) if one.name == "SCALE")
    globals()["SCALE"] = 7.0
    scale.restore()
    assert SCALE == 0.5


def test_installed_packages_mention_nothing() -> None:
    assert mentioned(nn.TransformerEncoderLayer(8, 2)) == []


def test_free_variables() -> None:
    inner = [1]
    if not inner:
        unbound = None

    class Free(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + inner[0] + (unbound or 0)

    assert [(one.name, one.value) for one in mentioned(Free())] == [("", inner)]

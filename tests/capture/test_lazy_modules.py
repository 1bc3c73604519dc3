"""Lazy modules get their shapes in a first call that a transform rehearses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_unitscale.capture.rollback import restoring
from lightning_unitscale.rules.transform import unit_scale
from lightning_unitscale.transforms import lossless_unit_scale, remat, simulate_fp8
from tests.helpers import assert_same_bits


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LazyLinear(5)
        self.outer = nn.LazyLinear(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu()).square().mean()


X = torch.randn(6, 4)


def test_rehearsal_leaves_lazy_module_uninitialized() -> None:
    module = Lazy()
    module.norm = nn.LazyBatchNorm1d()
    kinds = [type(one) for one in module.modules()]
    with restoring(module):
        module.norm(module.inner(X))
        assert not any(map(is_lazy, (*module.inner.parameters(), *module.norm.buffers())))
    assert all(map(is_lazy, (*module.parameters(), module.norm.running_mean)))
    assert [type(one) for one in module.modules()] == kinds
    torch.manual_seed(1)
    expected = Lazy()(X)
    torch.manual_seed(1)
    assert torch.equal(module(X), expected)
    assert type(module.inner) is nn.Linear


def test_lazy_module_gets_units() -> None:
    scaled = lossless_unit_scale(Lazy(), X)
    torch.manual_seed(1)
    expected = Lazy()(X)
    torch.manual_seed(1)
    assert torch.equal(scaled(X), expected)
    assert "2 matmuls" in scaled.explain()  # type: ignore[operator]


def test_lazy_module_with_plan_draws_same_random_numbers() -> None:
    """The first weights and the step's dropout draw in the order of an uncaptured step."""

    def trained(transform: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, list[Tensor]]:
        layers = (nn.LazyLinear(5), nn.Dropout(0.3), nn.LazyLinear(1))
        module, losses = transform(nn.Sequential(*layers)), []
        torch.manual_seed(1)
        for _ in range(2):
            losses.append(module(X).square().mean())
            losses[-1].backward()
        return module, [*losses, *(param.grad for param in module.parameters())]

    planned, found = trained(lambda module: remat(module, "min_cut"))
    state = torch.get_rng_state()
    _, expected = trained(lambda module: module)
    assert torch.equal(state, torch.get_rng_state())
    assert_same_bits(found, expected)
    assert planned.remat_reports()  # type: ignore[operator]


@pytest.mark.parametrize("transform", [unit_scale, simulate_fp8])
def test_transformed_lazy_module_trains(
    transform: Callable[[nn.Module], nn.Module],
) -> None:
    changed = transform(Lazy())
    for _ in range(2):
        changed(X).backward()
    assert not any(map(is_lazy, changed.parameters()))
    assert all(one.grad is not None for one in changed.parameters())

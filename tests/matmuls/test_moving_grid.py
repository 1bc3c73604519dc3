"""The moving grid: positions, when they change, and their effect on training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.capture.module_steps import captured_forward, steps_of
from lightning_unitscale.matmuls.matmul_formats import MovingGrid
from lightning_unitscale.matmuls.rounding import grid_factor
from lightning_unitscale.quantize import quantize
from lightning_unitscale.transforms import fp8_linears, lossless_unit_scale, simulate_format
from tests.helpers import assert_same_bits


def _factors(grid: MovingGrid, names: list[str], call: int = 1) -> Tensor:
    return torch.tensor([grid.factor(name, call) for name in names])


def test_grid_factors_are_uniform_and_independent() -> None:
    grid = MovingGrid()
    names = [f"layer{index}.linear operand {role}" for index in range(20) for role in range(2)]
    seen = []
    for call in range(1, 401):
        seen.append(_factors(grid, names, call))
    factors = torch.stack(seen)
    assert factors.min() > 0.5 and factors.max() <= 1.0
    logs = -factors.log2().double()
    # The share of steps in any part of the range is its length, to one or two steps in a hundred.
    for edge in torch.linspace(0.1, 0.9, 9).tolist():
        assert ((logs < edge).double().mean(0) - edge).abs().max() < 0.015
    # Casts begin at places of their own: no two of them are near each other at all steps.
    first = logs[0].sort().values
    assert first.unique().numel() == len(names) and first.diff().max() < 0.25
    assert_same_bits(_factors(grid, names[::-1]).flip(0), _factors(grid, names))


def test_accumulated_batches_share_grid_factors() -> None:
    counted, followed = MovingGrid(), MovingGrid()
    for step in range(3):
        followed.follow(step)
        for call in range(5, 8):
            expected = _factors(counted, ["a"], step + 1)
            assert_same_bits(_factors(followed, ["a"], call), expected)


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.gelu(self.one(x)))  # type: ignore[no-any-return]


def _layers() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return _Layers(), torch.randn(64, 32)


def _units(module: nn.Module, x: Tensor) -> nn.Module:
    """Lossless unit scaling that has seen a backward pass, and so knows the units of gradients."""
    units = lossless_unit_scale(module, x)
    _steps(units, x, 2)
    return units


def _steps(module: nn.Module, x: Tensor, count: int) -> list[list[Tensor]]:
    """Output and gradients of some steps of the same weights."""
    seen = []
    for _ in range(count):
        module.zero_grad()
        y = module(x)
        y.square().sum().backward()
        gradients = [one.grad.clone() for one in module.parameters() if one.grad is not None]
        seen.append([y.detach(), *gradients])
    return seen


def test_grid_factor_is_applied_and_removed() -> None:
    module, x = _layers()
    assert isinstance(module, _Layers)
    layer = module.one
    moved = simulate_format(layer, "E4M3FN", "E5M2", grid="moving")
    grid = MovingGrid()
    for call in range(1, 4):
        of_x, of_w = (grid_factor(grid, f"linear:{role}", call) for role in ("input", "weight"))
        assert 0.5 < of_x <= 1.0 and of_x != of_w
        x8 = quantize(x * of_x, "E4M3FN") / of_x
        w8 = quantize(layer.weight.detach() * of_w, "E4M3FN") / of_w
        assert_same_bits(moved(x).detach(), F.linear(x8, w8, layer.bias).detach())


@pytest.mark.parametrize("gradient", ["E4M3FN", "E5M2"])
def test_fp8_grid_matches_simulated_grid(gradient: Any) -> None:
    """FP8 has the same numbers; the factors are divided out before the sum, or after it."""
    module, x = _layers()
    units = _units(module, x)
    simulated = simulate_format(units, "E4M3FN", gradient, grid="moving")
    real = fp8_linears(units, gradient_format=gradient, grid="moving")
    fixed = fp8_linears(units, gradient_format=gradient)
    pairs = zip(_steps(simulated, x, 3), _steps(real, x, 3), _steps(fixed, x, 3), strict=True)
    for ours, found, unmoved in pairs:
        for index, (one, other, still) in enumerate(zip(ours, found, unmoved, strict=True)):
            near = 2e-6 * float(one.abs().max())
            torch.testing.assert_close(one, other, rtol=0.0, atol=near)
            # The gradient of the last bias is what arrives, which nothing rounds.
            assert (other - still).abs().max() > 100 * near or index == 4


def test_moving_grid_averages_errors_over_steps() -> None:
    """With a fixed grid, the mean over steps has the same error as one step."""
    module, x = _layers()
    exact = _steps(module, x, 1)[0]
    fixed, moving = (
        _steps(fp8_linears(_units(module, x), grid=grid), x, 64)  # type: ignore[arg-type]
        for grid in ("fixed", "moving")
    )
    for index, right in enumerate(exact):
        once, always, mean = (
            float((one - right).norm() / right.norm())
            for one in (
                moving[5][index],
                torch.stack([step[index] for step in fixed]).mean(0),
                torch.stack([step[index] for step in moving]).mean(0),
            )
        )
        assert mean < 0.3 * once and mean < 0.3 * always, (index, once, always, mean)


@pytest.mark.slow_cases
@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
def test_moving_grid_does_not_recompile(executor: Any, torch_kernels: None) -> None:
    module, x = _layers()
    moved, _ = captured_forward(fp8_linears(_units(module, x), grid="moving"), "test")
    eager = _steps(copy.deepcopy(moved), x, 3)
    steps = steps_of(moved)
    assert steps is not None
    steps.use_executor(executor)
    found = _steps(moved, x, 3)
    torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-5)
    assert (found[0][0] - found[1][0]).abs().max() > 1e-3
    assert len(steps.steps["forward"].graphs) == 1


def test_stochastic_rounding_on_moving_grid() -> None:
    module, x = _layers()
    moved = simulate_format(module, "E4M3FN", "E5M2", rounding="stochastic", grid="moving")
    first, second = _steps(moved, x, 2)
    exact = _steps(module, x, 1)[0]
    for one, other, right in zip(first, second, exact, strict=True):
        assert not torch.equal(one, other)
        assert (one - right).norm() < 0.2 * right.norm()


def test_moving_grid_in_bf16() -> None:
    module, x = _layers()
    exact = _steps(module, x, 1)[0]
    moved = simulate_format(module.bfloat16(), "E4M3FN", "E5M2", grid="moving")
    for one, right in zip(_steps(moved, x.bfloat16(), 1)[0], exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.float() - right).norm() < 0.1 * right.norm()


def test_wrong_arguments() -> None:
    module, _ = _layers()
    with pytest.raises(ValueError, match=r"grid='random': unknown grid. Expected 'fixed' or"):
        simulate_format(module, "E4M3FN", "E5M2", grid="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"grid='random': unknown grid. Expected 'fixed' or"):
        fp8_linears(module, grid="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"grid='moving': with scaling='dynamic' the largest"):
        fp8_linears(module, scaling="dynamic", grid="moving")
    with pytest.raises(ValueError, match=r"gradient_format='E3M2FN': no format of FP8 gradients"):
        fp8_linears(module, gradient_format="E3M2FN")  # type: ignore[arg-type]

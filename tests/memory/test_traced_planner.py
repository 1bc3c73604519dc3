"""Plans of a step that is traced on fake tensors, against Dynamo's graphs and the profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.memory.planner import Planner
from lightning_unitscale.memory.remat_module import _planner
from lightning_unitscale.memory.traced_planner import at_batch, traced_problem
from lightning_unitscale.profiler import profile_graph
from tests.memory.networks import NETWORKS


class Mean(nn.Module):
    """The mean square of a network's output as its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Any = self.net(*inputs)
        return output.float().square().mean()


def _example(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net, x = NETWORKS[name]()
    return Mean(net), x


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("name", ["mlp", "residual", "tied", "batch_norm"])
def test_traced_plans_match_captured_step(name: str) -> None:
    module, x = _example(name)
    captured = _planner(module, (x,), {}, None, 0)
    traced = Planner(traced_problem(module, x))
    assert traced.default.peak_bytes == pytest.approx(captured.default.peak_bytes, rel=0.02)
    assert traced.floor.peak_bytes == pytest.approx(captured.floor.peak_bytes, rel=0.05)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["mlp", "batch_norm", "tied"])
def test_default_plan_peak_matches_profile(name: str, device: str) -> None:
    module, x = _example(name)
    traced = Planner(traced_problem(module, x, device=device))
    profile = profile_graph(module, x, device=device)  # type: ignore[arg-type]
    peak = profile.peak_bytes - profile.library_bytes
    assert traced.default.peak_bytes == pytest.approx(peak, rel=0.05)
    assert traced.floor.peak_bytes <= traced.default.peak_bytes


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["mlp", "multi_head", "batch_norm"])
def test_interpolated_batch_size_matches_traced_one(name: str) -> None:
    module, x = _example(name)

    def at(size: int) -> Any:
        return traced_problem(module, x.new_zeros(size, *x.shape[1:]), device="cuda")

    found = at_batch(at(4), at(8), (4, 8), 23)
    assert found is not None
    between, exact = Planner(found), Planner(at(23))
    assert between.default.peak_bytes == exact.default.peak_bytes
    assert between.default.flops == exact.default.flops
    assert between.plan(0.5).peak_bytes == pytest.approx(exact.plan(0.5).peak_bytes, rel=0.01)


def test_tracing_does_not_change_module() -> None:
    module, x = _example("batch_norm")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    traced_problem(module, x)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(param.grad is None for param in module.parameters())


def test_step_without_loss_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="returns no loss"):
        traced_problem(nn.Linear(2, 2), torch.ones(3, 2))

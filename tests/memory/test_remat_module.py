import copy

import pytest
import torch

import lightning_unitscale.transforms as transforms
from tests.memory.programs import run
from tests.memory.test_planner import Net


def test_module_within_budget_is_bit_identical() -> None:
    torch.manual_seed(0)
    net, x = Net(2), torch.randn(4, 64, 64)
    plain = run(net.forward, list(net.parameters()), x)
    planned = transforms.remat(net, 0.7)
    assert "Nothing has been planned" in planned.remat_table()
    found = run(planned, list(planned.parameters()), x)
    for a, b in zip(plain[0], found[0], strict=True):
        assert torch.equal(a, b)
    (report,) = planned.remat_reports()
    assert report.recomputed
    assert net.blocks[0].norm.weight is not planned.blocks[0].norm.weight


@pytest.mark.slow
def test_copy_has_its_own_plan() -> None:
    planned = copy.deepcopy(transforms.remat(Net(1), 1.0))
    planned(torch.randn(2, 8, 64)).backward()
    assert len(planned.remat_reports()) == 1


@pytest.mark.slow
def test_transforms_nest() -> None:
    torch.manual_seed(0)
    net, x = Net(1), torch.randn(4, 64, 64)
    tracked = transforms.track_scales(transforms.remat(net, "min_cut"))
    plain = run(net.forward, list(net.parameters()), x)
    found = run(tracked, list(tracked.parameters()), x)
    for a, b in zip(plain[0], found[0], strict=True):
        assert torch.equal(a, b)
    assert len(tracked.scales_graph().nodes) > 10


@pytest.mark.slow
def test_impossible_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match="smallest achievable peak"):
        transforms.remat(Net(1), 1000)(torch.randn(2, 8, 64)).backward()
    with pytest.raises(ValueError, match="budget="):
        transforms.remat(Net(1), "much")


@pytest.mark.slow
def test_other_batch_size_has_separate_plan() -> None:
    planned = transforms.remat(Net(1), 1.0)
    for size in (8, 2):
        planned(torch.randn(size, 64, 64)).backward()
        planned.zero_grad()
    large, small = planned.remat_reports()
    assert small.peak_bytes < large.peak_bytes - large.saved_bytes / 2

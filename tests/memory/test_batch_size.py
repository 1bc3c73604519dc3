"""The largest batch within a budget, checked by profiling it and the next."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_unitscale.memory.graph_profile import fit, largest_batch
from lightning_unitscale.memory.profile_step import batch_size_of, resized
from lightning_unitscale.profiler import profile_graph
from tests.memory.networks import NETWORKS
from tests.memory.oracles import sum_of


@pytest.mark.slow_cases
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["mlp", "multi_head", "batch_norm", "tied"])
def test_largest_batch_fits_and_next_does_not(name: str, device: str) -> None:
    module, given = NETWORKS[name]()

    def peak(batch_size: int) -> int:
        batch = given.new_zeros(batch_size, *given.shape[1:])
        return profile_graph(module, batch, loss=sum_of, device=device).peak_bytes

    budget = 5 * peak(given.shape[0]) + 12345
    profile = profile_graph(module, given, loss=sum_of, device=device)
    best = profile.max_batch_size(budget)
    assert peak(best) <= budget < peak(best + 1)


def test_peak_moves_from_optimizer_to_backward() -> None:
    """Small batches peak in the optimizer, large ones in the backward pass."""
    module = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    profile = profile_graph(module, torch.randn(2, 256), optimizer=torch.optim.AdamW).fit_batch()
    assert profile.peak.phase == "optimizer"
    assert profile.batch_fit is not None
    for batch_size in (4, 100, 5000):
        other = profile_graph(module, torch.randn(batch_size, 256), optimizer=torch.optim.AdamW)
        assert profile.batch_fit.peak_bytes(batch_size) == pytest.approx(other.peak_bytes, rel=1e-3)
    assert other.peak.phase == "backward"


def test_no_batch_fits_parameters_alone() -> None:
    profile = profile_graph(nn.Linear(8, 4), torch.randn(3, 8))
    assert profile.max_batch_size(profile.parameter_bytes) == 0
    with pytest.raises(ValueError, match="budget_bytes=0"):
        profile.max_batch_size(0)


def test_missing_batch_is_an_error() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> torch.Tensor:
            return self.weight * 2

    with pytest.raises(ValueError, match="a profile that profile_graph returned"):
        profile_graph(Constant()).max_batch_size(1000)
    profile = profile_graph(nn.Linear(8, 4), torch.randn(3, 8))
    with pytest.raises(ValueError, match="fit_batch"):
        replace(profile, _profile_at=None).max_batch_size(1000)


def test_batch_size_is_most_common_first_dimension() -> None:
    inputs = ((torch.zeros(6, 2), torch.zeros(6)), {"mask": torch.zeros(3, 3), "flag": True})
    assert batch_size_of(inputs) == 6
    (first, second), options = resized(inputs, 9)
    assert (first.shape, second.shape) == ((9, 2), (9,))
    assert (options["mask"].shape, options["flag"]) == ((3, 3), True)
    assert batch_size_of(((), {})) is None


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**4)), min_size=1, max_size=9),
    st.integers(1, 10**7),
)
def test_fitted_peaks_match_every_batch_size(lines: list[tuple[int, int]], budget: int) -> None:
    """Against trying every batch size."""
    lines = [*lines, (0, 1000)]  # something must grow

    def peak(size: int) -> int:
        return max(fixed + slope * size for fixed, slope in lines)

    def moments(size: int) -> list[int]:
        return [fixed + slope * size for fixed, slope in lines]

    found = fit((4, 8), moments(4), moments(8))
    expected = max((size for size in range(1, 10**4 + 2) if peak(size) <= budget), default=0)
    assert largest_batch(found, budget, peak) == expected


def test_fit_with_different_numbers_of_moments() -> None:
    found = fit((2, 4), [10, 20, 15], [40, 30])
    assert found.peak_bytes(6) == 60

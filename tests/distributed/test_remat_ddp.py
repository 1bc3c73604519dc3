"""Rematerialization under DDP on two CPU processes: one plan for all, and the same training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.launch import results_of_ranks, runs_of_collected
from tests.helpers import assert_same_bits

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
Results = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of every rank."""
    runs = runs_of_collected(request, lambda test, kind="budget": ("whole", kind))
    folder = tmp_path_factory.mktemp("ddp")
    return results_of_ranks("tests.distributed.remat_ddp_run", folder, runs)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["budget", "with units"])
def test_budget_is_bit_identical_on_every_rank(kind: str, results: Results) -> None:
    for whole, planned in zip(results("whole"), results(kind), strict=True):
        assert_same_bits(whole["weights"], planned["weights"])


def test_all_ranks_run_one_plan(results: Results) -> None:
    first, second = results("budget")
    assert first["reports"] == second["reports"]
    assert all(recomputed > 0 for _, recomputed in first["reports"])
    assert first["reports"] != results("whole")[0]["reports"]


def test_predicted_peak_includes_ddp_buckets(
    results: Results,
) -> None:
    for one in results("budget"):
        predicted, measured = one["peaks"]
        assert predicted == pytest.approx(measured, rel=0.03)

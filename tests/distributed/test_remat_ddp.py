"""Rematerialization under DDP on two CPU processes: one plan for all, and the same training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.helpers import assert_same_bits

NUM_RANKS = 2
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What every rank computed."""
    folder: Path = tmp_path_factory.mktemp("ddp")
    run_ranks("tests.distributed.remat_ddp_run", folder, num_ranks=NUM_RANKS)
    return lambda kind: [
        torch.load(folder / f"{kind}-{rank}.pt", weights_only=True) for rank in range(NUM_RANKS)
    ]


@pytest.mark.parametrize("kind", ["budget", "with units"])
def test_a_budget_changes_no_weight_on_any_rank(
    kind: str, results: Callable[[str], list[dict[str, Any]]]
) -> None:
    for whole, planned in zip(results("whole"), results(kind), strict=True):
        assert_same_bits(whole["weights"], planned["weights"])


def test_all_ranks_run_one_plan(results: Callable[[str], list[dict[str, Any]]]) -> None:
    first, second = results("budget")
    assert first["reports"] == second["reports"]
    assert all(recomputed > 0 for _, recomputed in first["reports"])
    assert first["reports"] != results("whole")[0]["reports"]


def test_the_peak_is_predicted_with_the_buckets_of_ddp(
    results: Callable[[str], list[dict[str, Any]]],
) -> None:
    for one in results("budget"):
        predicted, measured = one["peaks"]
        assert predicted == pytest.approx(measured, rel=0.03)

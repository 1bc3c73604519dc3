"""Alerts under DDP: all ranks get the alerts of one rank and act on them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.alerts_ddp_run import NAN_STEP
from tests.distributed.launch import run_ranks

NUM_RANKS = 2
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alerts")
    run_ranks("tests.distributed.alerts_ddp_run", folder, num_ranks=NUM_RANKS, timeout=120)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_all_ranks_stop_at_the_same_step(ranks: list[dict[str, Any]]) -> None:
    for one in (rank["stop"] for rank in ranks):
        assert one["steps"] == NAN_STEP + 1
        (alert,) = one["alerts"]
        # The input of one rank: 4 of 2 x 4 x 6 elements of the joint batch.
        assert alert.startswith(f"step {NAN_STEP}: input.")
        assert "4 NaN among 48 elements" in alert
    assert ranks[0]["stop"] == ranks[1]["stop"]


def test_all_ranks_raise_same_violation(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["raise"] for rank in ranks)
    assert first == second
    assert first["raised"].startswith(f"step {NAN_STEP}: input.")


def test_nan_loss_on_one_rank_samples_on_all(ranks: list[dict[str, Any]]) -> None:
    for one in (rank["between"] for rank in ranks):
        assert one["sampled"] == [0, 1, 3, 6, 7]
        (alert,) = one["alerts"]
        assert alert.startswith("step 6: first.weight")

"""Rules under DDP on two CPU processes: one model, and gradients of the joint batch at RMS 1."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.callbacks.rule_runs import rms
from tests.distributed.launch import results_of_ranks, runs_of_collected
from tests.distributed.rules_ddp_run import KINDS, Late
from tests.helpers import assert_same_bits

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Ranks]:
    """Results of every rank. Two processes run all cases that the tests read."""
    runs = runs_of_collected(request, lambda test, kind="late": [kind])
    folder = tmp_path_factory.mktemp("ddp")
    return results_of_ranks("tests.distributed.rules_ddp_run", folder, runs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_have_same_model(kind: str, results: Callable[[str], Ranks]) -> None:
    first, second = results(kind)
    outputs = [
        [one["loss"] for one in each.pop("outputs") if isinstance(one, dict)]
        for each in (first, second)
    ]
    assert_same_bits(first, second)
    # They saw different data.
    assert all(one != other for one, other in zip(*outputs, strict=True))
    assert len(first["plan"]["decisions"]) > 10
    for name in ("first.weight", "blocks.1.4.weight", "readout.weight"):
        assert rms(first["start"][name]) == pytest.approx(1, rel=0.012)
    has_moved = not torch.equal(*(first[at]["readout.weight"] for at in ("start", "weights")))
    assert has_moved == (kind == "learning")


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["accumulating", "still"])
def test_gradients_are_at_rms_1_at_the_step(kind: str, results: Callable[[str], Ranks]) -> None:
    rows = results(kind)[0]["rms"]
    assert len(rows) == (16 if kind == "still" else 4)
    for row in rows:
        found = [one for name, one in row.items() if name.endswith("weight") and "norm" not in name]
        assert 0.5 < statistics.geometric_mean(found) < 2
        assert all(0.3 < one < 3.3 for one in found)


def test_ranks_agree_on_late_units(results: Callable[[str], Ranks]) -> None:
    first, second = results("late")
    assert_same_bits(first["weights"], second["weights"])
    assert_same_bits(first["state"], second["state"])
    assert first["losses"] != second["losses"]
    assert "lacking" not in first["state"]
    assert first["state"]["gauge"]["experts.1.0.linear"][1] < -8
    # Factors of its gradients, which were zero as well.
    factors = first["state"]["rules"]["log2_gradients"]
    assert {name for name, _ in Late().named_parameters()} == factors.keys()
    assert factors["experts.1.2.weight"] > 4

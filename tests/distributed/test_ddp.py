"""DDP on two CPU processes: same bits with and without the callbacks, and shared units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.ddp_run import KINDS
from tests.distributed.launch import run_ranks, runs_of_collected
from tests.helpers import assert_same_bits

NUM_RANKS = 2
# The first tier runs what ranks differ in, and what nothing else of it has under DDP.
QUICK = [("drifting", "both"), ("unused", "both"), ("manual", "both"), ("plain", "monitor")]
CASES = [*((kind, "both") for kind in KINDS), ("plain", "both, captured"), ("plain", "monitor")]
PARAMS = [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in CASES]
pytestmark = pytest.mark.distributed

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Ranks]:
    """Results of every rank. Two processes run all cases that the tests read."""
    folder = tmp_path_factory.mktemp("ddp")
    runs = runs_of_collected(request, lambda test, kind, how: (f"{kind}:without", f"{kind}:{how}"))
    run_ranks("tests.distributed.ddp_run", folder, *runs, num_ranks=NUM_RANKS)

    def of(kind: str, how: str) -> Ranks:
        paths = [folder / f"{kind}:{how}-{rank}.pt" for rank in range(NUM_RANKS)]
        return [torch.load(path, weights_only=True) for path in paths]

    return of


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "how"), PARAMS)
def test_callbacks_are_bit_identical(
    kind: str, how: str, results: Callable[[str, str], Ranks]
) -> None:
    without, found = results(kind, "without"), results(kind, how)
    ours = [
        {name: one.pop(name) for name in ("gauge", "snapshots") if name in one} for one in found
    ]
    assert_same_bits(found, without)
    # Batch statistics are each rank's own.
    weights = [
        {name: value for name, value in one["weights"].items() if "norm.running" not in name}
        for one in found
    ]
    assert_same_bits(*weights)
    if kind != "manual":
        assert found[0]["outputs"][0]["loss"] != found[1]["outputs"][0]["loss"]
    # One gauge, and the statistics of the batches of both.
    assert_same_bits(ours[0], ours[1])
    if how != "monitor":
        assert len(ours[0]["gauge"]) >= 4
    first = ours[0]["snapshots"][0]
    if kind == "compiled":
        assert "compiled" in first["names"]
        return
    accumulated = KINDS[kind].get("accumulate_grad_batches", 1)
    place = first["names"].index("first.linear")
    assert first["numel"][place] == NUM_RANKS * accumulated * 4 * 8
    if kind != "manual" and how != "monitor":
        # The first step is measured; from the second on there are units.
        assert abs(ours[0]["snapshots"][1]["stored"][place]) < 1

"""DDP on two CPU processes: the same bits with and without the callbacks, one gauge, one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.ddp_run import KINDS
from tests.distributed.launch import run_ranks
from tests.helpers import assert_same_bits

NUM_RANKS = 2
CASES = [*((kind, "both") for kind in KINDS), ("plain", "both, all"), ("plain", "monitor")]
CASES += [(kind, "held") for kind in ("plain", "accumulating", "unused")]
pytestmark = pytest.mark.distributed

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Ranks]:
    """What every rank computed; two processes run all of the cases."""
    folder = tmp_path_factory.mktemp("ddp")
    runs = [f"{kind}:without" for kind in KINDS] + [":".join(case) for case in CASES]
    runs += ["32-true:without", "16-true:held, all"]
    run_ranks("tests.distributed.ddp_run", folder, *runs, num_ranks=NUM_RANKS)

    def of(kind: str, how: str) -> Ranks:
        paths = [folder / f"{kind}:{how}-{rank}.pt" for rank in range(NUM_RANKS)]
        return [torch.load(path, weights_only=True) for path in paths]

    return of


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "how"), CASES)
def test_the_same_with_and_without(
    kind: str, how: str, results: Callable[[str, str], Ranks]
) -> None:
    without, found = results(kind, "without"), results(kind, how)
    ours = [
        {name: one.pop(name) for name in ("gauge", "snapshots", "held") if name in one}
        for one in found
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


@pytest.mark.timeout(300)
def test_16_true_holds_parameters_in_common_units(results: Callable[[str, str], Ranks]) -> None:
    reference, found = results("32-true", "without")[0], results("16-true", "held, all")
    assert_same_bits(found[0]["weights"], found[1]["weights"])
    assert found[0]["held"] == found[1]["held"]
    assert sorted(found[0]["held"]) == sorted(found[0]["weights"])
    assert all(one.dtype == torch.float16 for one in found[0]["weights"].values())
    expected = torch.cat([one.flatten() for one in reference["weights"].values()])
    weights = torch.cat([one.float().flatten() for one in found[0]["weights"].values()])
    # Adam moves an element by the rate whatever its gradient's size: a few go another way.
    assert torch.linalg.vector_norm(weights - expected) < 0.02 * torch.linalg.vector_norm(expected)

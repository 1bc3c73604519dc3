"""Steps around a pipelined module on two CPU processes, against one device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import run_ranks, runs_of_collected
from tests.pipeline.around_run import CASES

CAPTURED = {"captured"}
SCHEDULES = ["own loss:ZBVZeroBubble", "tokens:InterleavedZeroBubble", "captured:ZBVZeroBubble"]
# Steps that only run around the pipeline, with this package's callbacks.
SCALED = ["own loss", "head", "contrastive", "mixed", "broken"]
# Numbers are drawn from another state than on one device.
RANDOM = {"mixed"}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """Folders in which the same cases were trained on one device and on two."""
    folders = {n: tmp_path_factory.mktemp(f"ranks-{n}") for n in (1, 2)}
    of_two = runs_of_collected(
        request, lambda test, case="mixed", scaled="": [case, f"{case}::scaled"][: 1 + bool(scaled)]
    )
    of_one = [one if one.endswith(":scaled") else one.partition(":")[0] for one in of_two]
    cases = {1: list(dict.fromkeys(of_one)), 2: of_two}

    def run(num_ranks: int) -> None:
        run_ranks(
            "tests.pipeline.around_run", folders[num_ranks], str(num_ranks), *cases[num_ranks],
            num_ranks=num_ranks, timeout=240,
        )  # fmt: skip

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, folders))
    return folders


def _found(runs: dict[int, Path], num_ranks: int, case: str, rank: int = 0) -> dict[str, Any]:
    return torch.load(runs[num_ranks] / f"{case}-{rank}.pt", weights_only=False)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("case", [*sorted({*CASES} - RANDOM), *SCHEDULES])
def test_training_matches_one_device(case: str, runs: dict[int, Path]) -> None:
    expected = _found(runs, 1, case.partition(":")[0])
    for rank in range(2):
        found = _found(runs, 2, case, rank)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert found["metrics"].keys() == expected["metrics"].keys()
        for name, one in found["metrics"].items():
            assert one.item() == pytest.approx(expected["metrics"][name].item(), rel=2e-6), name
        for name, one in found["weights"].items():
            torch.testing.assert_close(one, expected["weights"][name], rtol=1e-4, atol=1e-5)
        around = any("only the module that the step calls" in text for text in found["warnings"])
        assert around == (rank == 0 and case.partition(":")[0] not in CAPTURED)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_all_ranks_draw_the_same_order(runs: dict[int, Path]) -> None:
    found = [_found(runs, 2, "mixed", rank) for rank in range(2)]
    assert found[0]["losses"] == found[1]["losses"]
    assert len(set(found[0]["losses"])) == len(found[0]["losses"])


@pytest.mark.distributed
@pytest.mark.timeout(280)
@pytest.mark.parametrize("scaled", [True])
@pytest.mark.parametrize("case", SCALED)
def test_callbacks_work_in_step_around_pipeline(
    case: str, scaled: bool, runs: dict[int, Path]
) -> None:
    """The bits are those of the same pipeline without them, and the names those of one device."""
    alone, *found = (
        torch.load(runs[n] / f"{case}::scaled-{rank}-found.pt", weights_only=False)
        for n, rank in ((1, 0), (2, 0), (2, 1))
    )
    for rank in range(2):
        plain, ours = _found(runs, 2, case, rank), _found(runs, 2, f"{case}::scaled", rank)
        assert ours["losses"] == plain["losses"]
        assert all(torch.equal(one, plain["weights"][n]) for n, one in ours["weights"].items())
        assert "(100 % of their FLOPs)" in found[rank]["explained"]
    assert found[0]["gauge"] == found[1]["gauge"]
    assert found[0]["gauge"].keys() == alone["gauge"].keys()
    snapshot = found[0]["snapshot"]
    assert snapshot.names == found[1]["snapshot"].names
    # Every layer of the pipeline, in both directions.
    for index in range(4):
        for name in (f"net.layers.{index}.0.linear", f"net.layers.{index}.0.weight"):
            row = snapshot.names.index(name)
            assert snapshot.forward[row, 0] > 0
            assert snapshot.backward[row, 0] > 0

"""Pipelines on 2 and 4 CPU processes: losses and gradients of one process, by every schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from lightning_unitscale.pipeline import SCHEDULES
from tests.distributed.launch import run_ranks, runs_of_collected

TIED = {"GPT", "GPT-2", "BERT", "T5"}
# They compute gradients of inputs and of weights apart.
SPLITS_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
RUNS = {
    2: [
        *(f"{model}:{name}" for model in ("GPT", "Shared") for name in SCHEDULES),
        *(f"Odd:{name}" for name in SPLITS_BACKWARD),
        "U-Net:ZBVZeroBubble",
        "T5:ZBVZeroBubble",
        "GPT-2:InterleavedZeroBubble",
        "Llama:DualPipeV",
        "BERT:Interleaved1F1B",
    ],
    4: ["GPT:1F1B", "Odd:GPipe", "U-Net:LoopedBFS", "T5:1F1B", "GPT-2:GPipe", "Llama:1F1B"],
}
CASES = [(ranks, run) for ranks, runs in RUNS.items() for run in runs]
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, Any]]]:
    """Results of every rank. One process group runs all cases of a number of ranks."""
    cases = runs_of_collected(request, lambda test, num_ranks, run: [(num_ranks, run)])
    return {
        ranks: _run(
            tmp_path_factory.mktemp("ranks"), ranks, [run for n, run in cases if n == ranks]
        )
        for ranks in dict(cases)
    }


def _run(folder: Path, num_ranks: int, runs: list[str]) -> list[dict[str, Any]]:
    # One process that forks the ranks, once it has captured the models.
    arguments = (str(num_ranks), *runs)
    run_ranks("tests.pipeline.engine_run", folder, *arguments, num_ranks=1, timeout=280)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "run"), CASES)
def test_losses_and_gradients_match_microbatch_accumulation(
    num_ranks: int, run: str, reports: dict[int, list[dict[str, Any]]]
) -> None:
    found = [report[run] for report in reports[num_ranks]]
    losses = [one["losses"] for one in found if one["losses"] is not None]
    assert len(losses) == 1, "the results are on one rank"
    # Two training steps and one validation of eight microbatches each.
    assert losses[0] == [0.0] * 24
    # The rank of the frozen layers has none.
    assert sum(one["num_gradients"] for one in found) >= 8
    stages = sorted(stage for one in found for stage in one["stages"])
    assert stages == list(range(len(stages)))
    different = {name: value for one in found for name, value in one["gradients"].items()}
    if run.partition(":")[0] in TIED:
        assert set(different) <= {
            "gpt.byte_embedding.weight",
            "transformer.wte.weight",
            "bert.embeddings.word_embeddings.weight",
            "shared.weight",
        }
        assert all(value <= 1e-7 for value in different.values())
    else:
        assert different == {}

"""Validation, test and prediction on two CPU processes: the numbers of one device, to the bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_unitscale.pipeline import SCHEDULES
from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import run_ranks
from tests.pipeline.evaluation_run import Metric
from tests.pipeline.pipeline_run import Groups
from tests.pipeline.test_strategy import _loader

NUM_RANKS = 2

Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of every rank, by the number of ranks."""
    return _run(tmp_path_factory.mktemp("evaluation"))


def _run(root: Path) -> Found:
    counts = (1, NUM_RANKS)
    folders = {count: root / str(count) for count in counts}
    for one in folders.values():
        one.mkdir()
    with ThreadPoolExecutor() as pool:
        running = [
            pool.submit(
                run_ranks,
                "tests.pipeline.evaluation_run",
                folders[count],
                str(count),
                num_ranks=count,
                timeout=500,
            )
            for count in counts
        ]
        for one in running:
            one.result()
    return {
        count: [torch.load(folders[count] / f"{rank}.pt") for rank in range(count)]
        for count in counts
    }


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_validation_during_training_matches_one_device(found: Found) -> None:
    (expected,) = found[1]
    for one in found[NUM_RANKS]:
        assert one["validation"] == pytest.approx(expected["validation"], rel=1e-5)
        assert one["validation"].keys() == expected["validation"].keys()
        memory = one["memory"]
        assert memory["owned"] < 0.8 * memory["whole"]
        assert len(memory["validated"]) == 6
        assert max(memory["validated"]) <= 1.05 * memory["owned"]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_predictions_match_one_device(schedule: str, found: Found) -> None:
    (expected,) = found[1]
    first = found[NUM_RANKS][0]["predictions"]["GPipe"]
    for rank in range(NUM_RANKS):
        predictions = found[NUM_RANKS][rank]["predictions"][schedule]
        assert len(predictions) == 2
        for one, other in zip(predictions, expected["predictions"]["1F1B"], strict=True):
            assert one["index"] == other["index"]
            # Trained on other numbers of devices, the weights differ in their last bits.
            assert torch.allclose(one["logits"], other["logits"], rtol=1e-4, atol=1e-5)
            assert torch.equal(one["first"], other["first"])
        for one, other in zip(predictions, first, strict=True):
            assert torch.equal(one["logits"], other["logits"])


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_test_metrics_match_one_device(found: Found) -> None:
    (expected,) = found[1]
    for one in found[NUM_RANKS]:
        assert one["test"] == pytest.approx(expected["test"], rel=1e-5)
        assert one["test"].keys() == expected["test"].keys() == {"test_loss", "largest"}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_divided_batches_and_unpipelined_steps_match_one_device(found: Found) -> None:
    (expected,) = found[1]
    for one in found[NUM_RANKS]:
        for name in ("divided", "Metric", "Stepless"):
            assert one[name] == pytest.approx(expected[name], rel=1e-5), name
    (reason,) = found[NUM_RANKS][0]["warnings"]["Metric"]
    assert "validation_step runs whole on every rank" in reason and "is not one graph" in reason


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
@pytest.mark.parametrize("kind", ["Keeps", "KeepsNumbers", "Counts"])
def test_values_kept_on_module_match_one_device(kind: str, found: Found) -> None:
    (expected,) = found[1]
    outputs, trained, count = expected[f"kept by {kind}"]
    for one in found[NUM_RANKS]:
        kept = one[f"kept by {kind}"]
        assert kept[0] == pytest.approx(outputs, rel=1e-4, abs=1e-6) and len(outputs) >= 4
        assert kept[1] == pytest.approx(trained, rel=1e-5) and len(trained) == 4
        assert kept[2] == count
    reasons = found[NUM_RANKS][0]["warnings"][kind]
    assert len(reasons) == (kind != "Keeps"), reasons
    if kind == "KeepsNumbers":
        assert "is not one graph" in reasons[0]
    if kind == "Counts":
        assert "5 graphs for batches of one size" in reasons[0] and "counters" in reasons[0]


def test_unpipelined_evaluation_is_an_error_if_required(one_rank: dict[str, Any]) -> None:
    strategy = PipelineStrategy("GPipe", num_microbatches=2, evaluation="pipeline")
    with pytest.raises(MisconfigurationException, match="validation_step is not one graph"):
        pl.Trainer(strategy=strategy, **one_rank).validate(Metric(), _loader())


def test_indivisible_batch_is_an_error(one_rank: dict[str, Any]) -> None:
    strategy = PipelineStrategy("GPipe", num_microbatches=2, num_eval_microbatches=3)
    with pytest.raises(ValueError, match="a batch of 16 samples cannot be divided"):
        pl.Trainer(strategy=strategy, **one_rank).validate(Groups(), _loader(), verbose=False)


@pytest.mark.parametrize("options", [{"evaluation": "none"}, {"num_eval_microbatches": 0}])
def test_bad_evaluation_arguments_are_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        PipelineStrategy(num_microbatches=2, **options)

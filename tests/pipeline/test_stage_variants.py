"""Memory budgets within a stage, without processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_unitscale.memory.budgets import Budget
from lightning_unitscale.memory.remat_plan import RematReport
from lightning_unitscale.pipeline import SplitPoint, pipeline
from lightning_unitscale.pipeline.checks import check_schedule
from lightning_unitscale.pipeline.schedules import find_schedule
from lightning_unitscale.pipeline.stage import StageModule
from lightning_unitscale.pipeline.stage_variants import StagePartitioner, planned_stage

NUM_MICROBATCHES, ROWS, WIDTH = 4, 64, 16


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers)


def _stage() -> StageModule:
    pipe = pipeline(_model(), torch.randn(ROWS, WIDTH), split_spec={"2": SplitPoint.BEGINNING})
    return pipe.get_stage_module(1)


def _planned(
    stage: StageModule, budget: Budget, in_flight: int
) -> tuple[Callable[..., Any], RematReport]:
    reports: list[RematReport] = []
    partitioner = StagePartitioner(
        budget,
        stage=1,
        num_in_flight=in_flight,
        resident_bytes=0,
        sent_bytes=0,
        reports=reports,
    )
    planned = planned_stage(stage, [], partitioner, torch.device("cpu"))
    (report,) = reports
    return planned, report


def test_number_of_microbatches_kept_by_stage() -> None:
    """Under 1F1B as many as stages follow, itself included, and never more than there are."""
    counts = [find_schedule("1F1B").num_in_flight(stage, 4, 8) for stage in range(4)]
    assert counts == [4, 3, 2, 1]
    assert find_schedule("1F1B").num_in_flight(0, 4, 2) == 2
    assert find_schedule("GPipe").num_in_flight(3, 4, 8) == 8
    assert find_schedule("ZBVZeroBubble").num_in_flight(0, 4, 8) is None


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_relative_budget_with_multi_stage_schedule_is_an_error(schedule: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"budget=0.5 .*{schedule}"):
        check_schedule(0.5, find_schedule(schedule))
    check_schedule("min_cut", find_schedule(schedule))
    check_schedule(0.5, find_schedule("1F1B"))


@pytest.mark.slow_cases
@pytest.mark.parametrize("budget", ["min_cut", 0.8])
def test_planned_stage_is_bit_identical(budget: Budget) -> None:
    """Several microbatches forward before the first one goes back, as in a pipeline."""
    stage = _stage()
    planned, report = _planned(stage, budget, NUM_MICROBATCHES)
    assert sum(report.recomputed.values()) > 0

    def run(of: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(1)
        inputs = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(NUM_MICROBATCHES)]
        outputs = [of(one)[0] for one in inputs]
        stage.zero_grad()
        for one in outputs:
            one.sin().sum().backward()
        gradients = [one.grad for one in (*inputs, *stage.parameters())]
        return [one.detach().clone() for one in (*outputs, *gradients) if one is not None]

    for ours, theirs in zip(run(planned), run(stage), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_each_microbatch_adds_its_saved_bytes() -> None:
    """The same plan: each additional microbatch adds the bytes that it saves."""
    peaks = [_planned(_stage(), "min_cut", count)[1] for count in (1, 2, 4)]
    steps = [second.peak_bytes - first.peak_bytes for first, second in itertools.pairwise(peaks)]
    assert steps[1] == 2 * steps[0] > 0
    # Results of the two matmuls, but not what the functions between make of them.
    assert steps[0] >= 2 * 4 * ROWS * WIDTH


@pytest.mark.slow
def test_more_microbatches_recompute_within_same_limit() -> None:
    """One limit is kept for one microbatch without running anything again, and not for four."""
    stage = _stage()
    _, alone = _planned(stage, 1.0, 1)
    limit = int(1.3 * _planned(stage, 1.0, NUM_MICROBATCHES)[1].peak_bytes / 2)
    _, one = _planned(stage, limit, 1)
    _, four = _planned(stage, limit, NUM_MICROBATCHES)
    assert alone.peak_bytes <= limit and sum(one.recomputed.values()) == 0
    assert four.peak_bytes <= limit and sum(four.recomputed.values()) > 0


def test_budget_below_minimum_error_has_minimum() -> None:
    with pytest.raises(
        ValueError, match=r"Stage 1 keeps 4 microbatches .* smallest achievable peak .* bytes"
    ):
        _planned(_stage(), 1024, NUM_MICROBATCHES)


def test_relative_budget_spans_smallest_to_default_peak() -> None:
    least, half, whole = (_planned(_stage(), each, 4)[1].peak_bytes for each in ("min", 0.5, 1.0))
    assert least <= half <= least + 0.5 * (whole - least) < whole

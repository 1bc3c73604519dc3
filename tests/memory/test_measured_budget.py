"""Plans of a step of several graphs from a measurement, against the allocator's events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.memory.measured_budget import MeasuredPartitioner, StepPeaks
from lightning_unitscale.memory.real_memory import PeakMeter
from lightning_unitscale.remat import aot_backend

NUM_BLOCKS = 4


class _Step:
    """A step whose blocks are captured one by one, by the same code, and whose loss is not."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())
            for _ in range(NUM_BLOCKS)
        )
        self.input = torch.randn(40, 16)

    def capture(self, partitioner: MeasuredPartitioner) -> None:
        """Capture it, again if it was captured before."""
        torch._dynamo.reset()

        def block(module: nn.Module, x: Tensor) -> Tensor:
            return module(x)

        self.block: Callable[..., Tensor] = torch.compile(block, backend=aot_backend(partitioner))

    def __call__(self, x: Tensor) -> list[Tensor]:
        self.blocks.zero_grad()
        for module in self.blocks:
            x = self.block(module, x)
        x.exp().sum().backward()
        return [param.grad for param in self.blocks.parameters() if param.grad is not None]

    def measured(self, partitioner: MeasuredPartitioner) -> PeakMeter:
        """Measure the second of two steps, whose initial memory is known."""
        self(self.input)
        meter = partitioner.meter = PeakMeter(torch.device("cpu"))
        meter.start()
        grads = self(self.input)
        meter.mark([list(self.blocks.parameters()), grads, self.input])
        del grads
        self(self.input)
        self.peak = meter.stop()
        partitioner.meter = None
        return meter


def _planned(budget: Any) -> tuple[_Step, MeasuredPartitioner]:
    step, partitioner = _Step(), MeasuredPartitioner(budget)
    step.capture(partitioner)
    partitioner.plan(step.measured(partitioner).parts)
    step.capture(partitioner)
    return step, partitioner


@pytest.mark.slow_cases
@pytest.mark.parametrize("budget", [1.0, 0.6, 0.0, "min_cut"])
def test_predicted_peak_matches_measured_peak(budget: Any) -> None:
    step, partitioner = _planned(budget)
    step.measured(partitioner)
    assert {report.peak_bytes for report in partitioner.reports} == {step.peak}


@pytest.mark.slow
def test_relative_budget_spans_smallest_to_default_peak() -> None:
    peaks = []
    for budget in (1.0, 0.5, 0.0):
        step, partitioner = _planned(budget)
        grads = step(step.input)
        step.measured(partitioner)
        peaks.append(step.peak)
        if budget == 1.0:
            expected = grads
        assert all(map(torch.equal, grads, expected))
    whole, half, least = peaks
    assert least < half <= least + 0.5 * (whole - least)


@pytest.mark.slow
def test_no_graph_could_use_faster_plan() -> None:
    step, partitioner = _Step(), MeasuredPartitioner(0.5)
    step.capture(partitioner)
    parts = step.measured(partitioner).parts
    measured = StepPeaks(parts, partitioner.graphs)
    assert sum(measured.calls.values()) == NUM_BLOCKS
    top, bottom = (measured.peak_bytes(each) for each in (measured.default, measured.lowest))
    assert bottom <= max(peak for _, peak in parts) < top
    for limit in (bottom, (bottom + top) // 2, top - 1, top):
        chosen = measured.fastest(limit)
        assert measured.peak_bytes(chosen) <= limit
        for name, graph in measured.graphs.items():
            for choice in graph.all:
                if choice.plan.seconds < chosen[name].plan.seconds:
                    assert measured.peak_bytes({**chosen, name: choice}) > limit


@pytest.mark.slow
def test_other_batch_size_uses_smallest_plan() -> None:
    step, partitioner = _planned(1.0)
    saved = [report.saved_bytes for report in partitioner.reports]
    assert min(saved) > 0
    step(step.input[:30])
    assert (
        "captured later, for batches of other sizes, use the smallest plans" in partitioner.table()
    )
    with pytest.warns(UserWarning, match=r"budget=1\.0: a graph was captured after the step"):
        step(torch.randn(80, 16))


@pytest.mark.slow
def test_budget_below_minimum_is_an_error() -> None:
    step, partitioner = _Step(), MeasuredPartitioner(1)
    step.capture(partitioner)
    parts = step.measured(partitioner).parts
    with pytest.raises(
        ValueError, match=r"achievable peak is .* bytes\), of a step that was measured"
    ):
        partitioner.plan(parts)

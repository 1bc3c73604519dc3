"""When units are measured, when they are taken anew, and that nothing is compiled for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.graph.compiled_graph import CompiledGraph, GraphBackend, Variant
from tests.callbacks.modules import Evaluated, Regression, regression_with
from tests.callbacks.runs import (
    assert_same_run,
    loader,
    monitor_of,
    run,
    unit_scale_of,
)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The step of every graph that Dynamo hands over."""
    seen: list[str] = []
    plain = GraphBackend.__call__

    def counted(self: Any, *args: Any) -> Any:
        seen.append(self.step().name)
        return plain(self, *args)

    monkeypatch.setattr(GraphBackend, "__call__", counted)
    return seen


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each graph that ran carried probes."""
    seen: list[bool] = []
    build, call = CompiledGraph._build, Variant.__call__
    observed: dict[int, bool] = {}

    def built(self: Any, step: Any, is_observed: bool) -> Any:
        variant = build(self, step, is_observed)
        observed[id(variant)] = is_observed
        return variant

    def called(self: Any, *args: Any) -> Any:
        seen.append(observed[id(self)])
        return call(self, *args)

    monkeypatch.setattr(CompiledGraph, "_build", built)
    monkeypatch.setattr(Variant, "__call__", called)
    return seen


def _growing(self: Any, batch: Any, batch_idx: int) -> Any:
    """Its inputs grow, and so its gradients shrink."""
    x, y = batch
    self.factor.mul_(2.0)
    return F.mse_loss(self.second(torch.tanh(self.first(x * self.factor))), y) / self.factor


class Growing(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    training_step = _growing


@pytest.mark.parametrize("depth", ["products", "all"])
@pytest.mark.parametrize("recalibrate", ["auto", None, 2, 5])
def test_units_follow_without_a_compilation(
    recalibrate: Any, depth: str, captures: list[str]
) -> None:
    _, callbacks = assert_same_run(
        Growing,
        lambda: [UnitScaleCallback(depth=depth, recalibrate=recalibrate)],
        max_steps=20,
    )
    assert captures == ["training_step"]
    unit = unit_scale_of(callbacks).gauge.pair("first.linear:input").log2_sigma
    # 2**1 times about 2**-7 at the first batch; doubled with each.
    last = {"auto": 16, None: 0, 2: 18, 5: 15}[recalibrate]
    assert abs(unit - (last + 1 - 6.6)) < 2
    events = unit_scale_of(callbacks).explain().count("New units")
    # The first is of the first batch, which is measured while it runs.
    assert events == 1 + {"auto": 2, None: 0, 2: 9, 5: 3}[recalibrate]


@pytest.mark.parametrize("first", ["unit scale", "monitor"])
def test_a_step_that_is_not_sampled_runs_the_plain_variant(
    first: str, captures: list[str], variants: list[bool]
) -> None:
    callbacks = [UnitScaleCallback(recalibrate=None), ScaleMonitor(every_n_steps=4)]
    if first == "monitor":
        callbacks.reverse()
    run(Regression, callbacks, max_steps=10)
    assert captures == ["training_step"]
    # The step that units are measured in runs neither variant.
    assert variants == [step % 4 == 0 for step in range(1, 10)]
    variants.clear()
    run(Regression, [UnitScaleCallback(recalibrate=5)], max_steps=12)
    assert variants == [step in (5, 10) for step in range(1, 12)]


def test_looks_of_one_do_not_show_in_the_other(variants: list[bool]) -> None:
    callbacks = [UnitScaleCallback(recalibrate=3), ScaleMonitor(every_n_steps=4)]
    run(Regression, callbacks, max_steps=10)
    assert [one.step for one in monitor_of(callbacks).snapshots] == [0, 4, 8]
    assert variants == [step % 4 == 0 or step in (3, 6, 9) for step in range(1, 10)]


def test_accumulated_batches_are_one_sample() -> None:
    watched: list[bool] = []

    class Looking(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            watched.append("training_step" in vars(self))
            return super().training_step(batch, batch_idx)

    monitor = ScaleMonitor(every_n_steps=2)
    run(Looking, [monitor], accumulate_grad_batches=2, max_steps=4)
    assert watched == [True, True, False, False] * 2
    snapshot = monitor.snapshots[0]
    assert [one.step for one in monitor.snapshots] == [0, 2]
    place = snapshot.names.index("first.linear")
    assert snapshot.column("numel", "forward")[place] == 2 * 4 * 8
    assert snapshot.column("numel", "backward")[place] == 2 * 4 * 8


def test_training_and_validation_are_captured_once(captures: list[str]) -> None:
    run(
        Evaluated,
        [UnitScaleCallback(), ScaleMonitor()],
        max_epochs=3,
        max_steps=-1,
        num_sanity_val_steps=1,
        entry_options={"val_dataloaders": loader(8)},
    )
    assert sorted(captures) == ["training_step", "validation_step"]


def test_a_rate_that_a_step_reads_is_no_compilation(captures: list[str]) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return self.loss(batch)

    def configure(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    made = regression_with(step, configure_optimizers=configure)
    found, _ = assert_same_run(made, max_steps=12)
    assert len(captures) <= 3
    rates = [row["rate"] for _, row in found.logged if "rate" in row]
    assert rates == pytest.approx([0.1 * 0.9**n for n in range(12)])


def test_operands_are_at_unit_scale() -> None:
    """What the callback is for, as the monitor sees it."""

    def tiny(generator: Any) -> Any:
        x = torch.randn(6, generator=generator)
        return x * 1e-6, x[:2]

    callbacks = [UnitScaleCallback(), ScaleMonitor(every_n_steps=1)]
    run(lambda: Regression(norm=False), callbacks, data=lambda: loader(make=tiny), max_steps=2)
    # The first step has shown the units.
    _, snapshot = callbacks[1].snapshots
    place = snapshot.names.index("first.linear")
    stored = snapshot.log2_rms("backward", stored=True)[place]
    assert abs(stored) <= 0.75
    assert snapshot.log2_rms("forward", stored=False)[place] < math.log2(1.0)

"""The times of measurements and recalibrations, which compile nothing."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.capture.graph_recorder import GraphInterpreter
from lightning_unitscale.capture.graph_variants import GraphBackend, Variant
from lightning_unitscale.matmuls.measurement import Extent
from tests.callbacks.modules import Evaluated, Regression, regression_with
from tests.callbacks.runs import (
    BOTH_WAYS,
    Capturing,
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
    """Record if each graph that ran carried probes, but not of those measured as captured."""
    seen: list[bool] = []
    initialize, call = Variant.__init__, Variant.__call__
    observed: dict[int, bool] = {}

    def initialized(self: Any, graph: Any, run: Any) -> None:
        initialize(self, graph, run)
        observed.pop(id(self), None)
        if not isinstance(getattr(run, "__self__", None), GraphInterpreter):
            observed[id(self)] = graph.observed

    def called(self: Any, *args: Any) -> Any:
        if id(self) in observed:
            seen.append(observed[id(self)])
        return call(self, *args)

    monkeypatch.setattr(Variant, "__init__", initialized)
    monkeypatch.setattr(Variant, "__call__", called)
    return seen


class Looks(pl.Callback):
    """Records the training batches in which operands were measured, and those that were watched."""

    def __init__(self, patch: pytest.MonkeyPatch, num_batches: int = 1) -> None:
        self.measured: list[bool] = []
        self._steps: list[Any] = []
        self._unwatched = num_batches * 2
        self._count = 0
        measure = Extent.of

        def counted(tensor: Any) -> Any:
            self._count += 1
            return measure(tensor)

        patch.setattr(Extent, "of", staticmethod(counted))

    @property
    def watched(self) -> list[bool]:
        """A watched step has something in its place that the third one, which is not, has not."""
        third = self._steps[self._unwatched]
        return [step is not third for step in self._steps]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._steps.append(vars(pl_module).get("training_step"))
        self._count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.measured.append(self._count > 0)


def _growing(self: Any, batch: Any, batch_idx: int) -> Any:
    """A step whose inputs grow, so its gradients shrink."""
    x, y = batch
    self.factor.mul_(2.0)
    return F.mse_loss(self.second(torch.tanh(self.first(x * self.factor))), y) / self.factor


class Growing(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    training_step = _growing


@pytest.mark.slow_cases
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("recalibrate", ["auto", None, 2, 5])
def test_units_are_recalibrated_without_recompilation(
    recalibrate: Any, captured: bool, captures: list[str]
) -> None:
    _, callbacks = assert_same_run(
        Growing,
        lambda: [UnitScaleCallback(recalibrate=recalibrate), *[Capturing()] * captured],
        max_steps=20,
    )
    assert captures == (["training_step"] if captured else [])
    unit = unit_scale_of(callbacks).gauge.pair("first.linear:input").log2_sigma
    # 2**1 times about 2**-7 at the first batch; doubled with each.
    last = {"auto": 16, None: 0, 2: 18, 5: 15}[recalibrate]
    assert abs(unit - (last + 1 - 6.6)) < 2
    events = unit_scale_of(callbacks).explain().count("New units")
    # The first is of the first batch, which is measured while it runs.
    assert events == 1 + {"auto": 2, None: 0, 2: 9, 5: 3}[recalibrate]


@pytest.mark.slow_cases
@pytest.mark.parametrize("first", ["unit scale", "monitor"])
def test_unsampled_steps_measure_no_tensor(
    first: str, captures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    callbacks = [UnitScaleCallback(recalibrate=None), ScaleMonitor(every_n_steps=4)]
    if first == "monitor":
        callbacks.reverse()
    run(Regression, callbacks, max_steps=11, others=lambda: [looks])
    assert looks.measured == [step == 0 for step in range(11)]
    assert looks.watched == [step in (0, 1, 4, 8, 10) for step in range(11)]
    looks = Looks(monkeypatch)
    run(Regression, [UnitScaleCallback(recalibrate=5)], max_steps=12, others=lambda: [looks])
    assert looks.measured == [step in (0, 5, 10) for step in range(12)]
    assert not any(looks.watched)
    assert captures == []


def test_recalibration_and_sampling_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    callbacks = [UnitScaleCallback(recalibrate=3), ScaleMonitor(every_n_steps=4)]
    run(Regression, callbacks, max_steps=11, others=lambda: [looks])
    assert [one.step for one in monitor_of(callbacks).snapshots] == [0, 1, 4, 8, 10]
    assert looks.watched == [step in (0, 1, 4, 8, 10) for step in range(11)]
    assert looks.measured == [step in (0, 3, 6, 9) for step in range(11)]


@pytest.mark.slow_cases
@pytest.mark.parametrize("first", ["unit scale", "monitor"])
def test_unsampled_captured_step_runs_plain_variant(
    first: str, captures: list[str], variants: list[bool]
) -> None:
    callbacks = [
        UnitScaleCallback(recalibrate=None),
        ScaleMonitor(every_n_steps=4),
    ]
    if first == "monitor":
        callbacks.reverse()
    run(Regression, [*callbacks, Capturing()], max_steps=10)
    assert captures == ["training_step"]
    assert variants == [step in (0, 1, 4, 8, 9) for step in range(10)]
    variants.clear()
    callbacks = [UnitScaleCallback(recalibrate=3), ScaleMonitor(every_n_steps=4)]
    run(Regression, [*callbacks, Capturing()], max_steps=10)
    assert [one.step for one in monitor_of(callbacks).snapshots] == [0, 1, 4, 8, 9]
    # Units are measured as matmuls run, in either variant.
    assert variants == [step in (0, 1, 4, 8, 9) for step in range(10)]


def test_accumulated_batches_are_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, monitor = Looks(monkeypatch, num_batches=2), ScaleMonitor(every_n_steps=3)
    run(
        Regression,
        [UnitScaleCallback(recalibrate=2), monitor],
        accumulate_grad_batches=2,
        max_steps=8,
        others=lambda: [looks],
    )
    assert looks.watched == [step in (0, 1, 3, 6, 7) for step in range(8) for _ in range(2)]
    # The first units are those of a whole step too, as in loops that do not announce batches.
    assert looks.measured == [True, True, False, False] * 4
    snapshot = monitor.snapshots[0]
    assert [one.step for one in monitor.snapshots] == [0, 1, 3, 6, 7]
    place = snapshot.names.index("first.linear")
    assert snapshot.column("numel", "forward")[place] == 2 * 4 * 8
    assert snapshot.column("numel", "backward")[place] == 2 * 4 * 8


def run_accumulated(step: Any, callback: UnitScaleCallback, num_steps: int) -> None:
    """Optimizer steps of two batches of four."""
    run(
        regression_with(step),
        [callback],
        accumulate_grad_batches=2,
        max_steps=num_steps,
        data=lambda: loader(8 * num_steps),
    )


def test_recalibration_uses_rms_over_accumulated_batches() -> None:
    """The units of a look are those of the RMS over all batches of the optimizer's step."""

    def scaled(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        # Steps of two batches; in the third one, the look, the second is 2**8 times the first.
        return self.loss((x * 2.0**8 if batch_idx == 5 else x, y))

    callback = UnitScaleCallback(recalibrate=2)
    run_accumulated(scaled, callback, 3)
    assert callback.explain().count("New units") == 2
    first = 0.01 * 2.0**8 / math.sqrt(2)
    assert abs(callback.gauge.pair("first.linear:input").log2_sigma - math.log2(first)) < 1


@BOTH_WAYS
def test_one_small_microbatch_does_not_change_units(captured: dict[str, Any]) -> None:
    """Accumulated batches read one tensor, whose units fit as long as its RMS stays."""

    def in_turns(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.loss((x * 2.0**-8 if batch_idx % 2 else x, y))

    callback = UnitScaleCallback(**captured)
    run_accumulated(in_turns, callback, 9)
    assert "first.linear:input at RMS" not in callback.explain()


class Counted(Evaluated):
    """Counts how often its steps run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"train": 0, "validate": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts["train"] += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts["validate"] += 1
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("make", "captured"), [(Counted, False), (Evaluated, False), (Evaluated, True)]
)
def test_steps_run_once_per_batch_and_are_captured_at_most_once(
    make: Any, captured: bool, captures: list[str]
) -> None:
    found, _ = assert_same_run(
        make,
        lambda: [UnitScaleCallback(), ScaleMonitor(), *[Capturing()] * captured],
        max_epochs=3,
        max_steps=-1,
        num_sanity_val_steps=1,
        entry_options={"val_dataloaders": loader(8)},
    )
    assert sorted(captures) == (["training_step", "validation_step"] if captured else [])
    if make is Counted:
        # Of the data's four batches and two.
        assert found.module.counts == {"train": 3 * 4, "validate": 1 + 3 * 2}


def test_reading_learning_rate_does_not_recompile(captures: list[str]) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return self.loss(batch)

    def configure(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    made = regression_with(step, configure_optimizers=configure)
    found, _ = assert_same_run(made, max_steps=12)
    assert captures == []
    rates = [row["rate"] for _, row in found.logged if "rate" in row]
    assert rates == pytest.approx([0.1 * 0.9**n for n in range(12)])


def test_operands_are_at_unit_scale_after_recalibration() -> None:
    """The purpose of the callback, as the monitor sees it."""

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


class Probed(Regression):
    """A frozen regression whose result is scaled by a trained number."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(x)


def test_frozen_matmuls_are_measured_at_the_first_batch() -> None:
    """Their gradients are never measured."""
    callback = UnitScaleCallback(simulate="fp8")
    run(Probed, [callback], max_steps=6)
    lines = [line for line in str(callback.explain()).splitlines() if "New units" in line]
    assert lines == ["New units for 4 tensors at the first batch"]
    assert len(callback.state_dict()["gauge"]) == 4

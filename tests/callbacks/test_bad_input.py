"""Wrong input gives one clear error or warning, and leaves the module unchanged."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from benchmarks.executed_matmuls import has_torchs_own_kernels
from lightning_unitscale import (
    FP8,
    RematCallback,
    Rules,
    ScaleMonitor,
    Simulate,
    UnitScaleCallback,
)
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.matmuls.scaled_methods import SessionMethod
from tests.callbacks.modules import Regression, regression_with
from tests.callbacks.runs import (
    QUIET,
    MemoryLogger,
    assert_same_run,
    both,
    loader,
    monitor_of,
    unit_scale_of,
)
from tests.helpers import assert_same_bits


def _fit(module: Any, *callbacks: pl.Callback, **options: Any) -> None:
    options = {**QUIET, "max_steps": 2, **options}
    pl.Trainer(callbacks=list(callbacks), **options).fit(module, loader())


def _is_in_the_form(message: str) -> bool:
    """The problem; the expected value; the change to make."""
    return re.search(r".+: .+. Expected .+\. .+\.$", message) is not None


def _compiled(module: pl.LightningModule, how: str) -> Any:
    if how == "torch.compile":
        return torch.compile(module, backend="eager")
    module.compile(backend="eager")
    return module


HOW_COMPILED = pytest.mark.parametrize("how", ["torch.compile", "module.compile"])


@HOW_COMPILED
def test_remat_of_compiled_module_is_an_error(how: str) -> None:
    module = Regression()
    with pytest.raises(MisconfigurationException, match="is compiled already") as raised:
        _fit(_compiled(module, how), UnitScaleCallback(remat="min_cut"))
    assert _is_in_the_form(str(raised.value))
    _assert_not_captured(module)


@HOW_COMPILED
def test_compiled_module_has_bits_of_plain_run(how: str) -> None:
    weights = []
    for callbacks in ([], [UnitScaleCallback()]):
        pl.seed_everything(1, verbose=False)
        # Without a callback, Dynamo does not get through Lightning's ``self.log`` in a step.
        module = regression_with(lambda self, batch, batch_idx: self.loss(batch))()
        _fit(_compiled(module, how), *callbacks, max_steps=4)
        weights.append(dict(module.state_dict()))
        # Lightning itself puts a compiled step there.
        assert not isinstance(vars(module).get("training_step"), SessionMethod)
    assert_same_bits(*weights)
    coverage = unit_scale_of(callbacks).coverage
    # Matmuls of a compiled graph reach the dispatcher, or are counted as compiled.
    assert coverage.counts
    assert has_torchs_own_kernels()


def _assert_not_captured(module: pl.LightningModule) -> None:
    assert steps_of(module) is None
    assert not isinstance(module.training_step, CapturedStep)
    assert "log" not in module.__dict__


def test_missing_logger_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = ScaleMonitor()
        _fit(Regression(), monitor)
    found = [str(one.message) for one in caught if "no logger" in str(one.message)]
    assert len(found) == 1
    assert _is_in_the_form(found[0])
    assert len(monitor.snapshots) == 2
    assert "linear" in monitor.table(full=True)


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"barebones": True}])
def test_trainer_mode_without_loggers_does_not_warn(options: dict[str, Any]) -> None:
    kept = {} if "barebones" not in options else {"accelerator": "cpu", "devices": 1}
    base = kept or {**QUIET}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(barebones|LeafSpec|num_workers|workers)")
        pl.Trainer(callbacks=[ScaleMonitor()], **{**base, "max_steps": 2, **options}).fit(
            Regression(), loader()
        )


def _opaque(self: Any, batch: Any, batch_idx: int) -> Any:
    torch._dynamo.graph_break()
    return self.opaque(batch)


@torch.compiler.disable
def _out_of_sight(self: Any, batch: Any) -> Any:
    return self.loss(batch)


def test_uncapturable_step_runs_with_one_warning() -> None:
    make = regression_with(_opaque, opaque=_out_of_sight)
    results = []
    for callbacks in ([], [UnitScaleCallback(remat="min_cut"), ScaleMonitor(every_n_steps=1)]):
        pl.seed_everything(1, verbose=False)
        module = make()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _fit(module, *callbacks, max_steps=4, logger=MemoryLogger())
        found = [
            str(one.message) for one in caught if "no graph could be captured" in str(one.message)
        ]
        assert len(found) == (1 if callbacks else 0)
        results.append(dict(module.state_dict()))
    assert "Stepping.training_step" in found[0]
    assert_same_bits(*results)
    assert unit_scale_of(callbacks).gauge, "matmuls are scaled all the same"
    # The first call, which Dynamo skips, has no probes. Later ones are watched.
    snapshots = monitor_of(callbacks).snapshots
    assert [snapshot.step for snapshot in snapshots] == [1, 2, 3]
    assert {"first.linear", "second.linear"} <= set(snapshots[-1].names)


def test_matmuls_need_no_capture() -> None:
    _, callbacks = assert_same_run(regression_with(_opaque, opaque=_out_of_sight), both)
    coverage = unit_scale_of(callbacks).coverage
    assert coverage.num_in_units == coverage.num_matmuls > 0
    assert {"first.linear", "second.linear"} <= set(monitor_of(callbacks).snapshots[0].names)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: UnitScaleCallback("magic"), ValueError),
        (lambda: UnitScaleCallback(depth="some"), ValueError),
        (lambda: UnitScaleCallback(recalibrate=0), ValueError),
        (lambda: UnitScaleCallback(recalibrate=-3), ValueError),
        (lambda: UnitScaleCallback(recalibrate=True), ValueError),
        (lambda: UnitScaleCallback(recalibrate=1.5), ValueError),
        (lambda: UnitScaleCallback(recalibrate="often"), ValueError),
        (lambda: UnitScaleCallback(replace={}), ValueError),
        (lambda: UnitScaleCallback(residual=(1.0, 1.0)), ValueError),
        (lambda: UnitScaleCallback(lr_scaling="match"), ValueError),
        (lambda: UnitScaleCallback(init_weights=False), ValueError),
        (lambda: UnitScaleCallback(on_unknown="keep"), ValueError),
        (lambda: Rules("lossless"), ValueError),
        (lambda: UnitScaleCallback(FP8()), ValueError),
        (lambda: UnitScaleCallback(precision=True), ValueError),
        (lambda: UnitScaleCallback(compile="yes"), ValueError),
        (lambda: UnitScaleCallback("u-mup", init_weights="no"), ValueError),
        (lambda: UnitScaleCallback("u-mup", lr_scaling="adam"), ValueError),
        (lambda: UnitScaleCallback("u-mup", replace={1: abs}), ValueError),
        (lambda: UnitScaleCallback("u-mup", replace=[abs]), ValueError),
        (lambda: UnitScaleCallback("u-mup", residual=0.5), ValueError),
        (lambda: UnitScaleCallback("u-mup", residual=(0.5, -1.0)), ValueError),
        (lambda: UnitScaleCallback("u-mup", on_unknown="guess"), ValueError),
        (lambda: Rules("u-mup", residual_mult=0.0), ValueError),
        (lambda: Rules("u-mup", residual_attn_ratio=-1.0), ValueError),
        (lambda: Rules("unit-scaling", attention_mult=float("nan")), ValueError),
        (lambda: Rules("unit-scaling", activation_mult=True), ValueError),
        (lambda: Rules("unit-scaling", loss_mult=float("inf")), ValueError),
        (lambda: UnitScaleCallback(precision="fp4"), ValueError),
        (lambda: UnitScaleCallback(precision="fp8", simulate="fp8"), ValueError),
        (lambda: FP8(exclude=[""]), ValueError),
        (lambda: FP8(gradient_format="FP16"), ValueError),
        (lambda: FP8(evaluation="always"), ValueError),
        (lambda: FP8(grid="random"), ValueError),
        (lambda: Simulate("fp7"), ValueError),
        (lambda: Simulate(grid="auto"), ValueError),
        (lambda: UnitScaleCallback(remat="many"), ValueError),
        (lambda: ScaleMonitor(0), ValueError),
        (lambda: ScaleMonitor(-1), ValueError),
        (lambda: ScaleMonitor(True), ValueError),
        (lambda: ScaleMonitor(2.0), ValueError),
        (lambda: ScaleMonitor(include=[1]), ValueError),
        (lambda: ScaleMonitor(exclude=""), ValueError),
        (lambda: ScaleMonitor(formats=("FP17",)), ValueError),
        (lambda: ScaleMonitor(formats="FP17"), ValueError),
        (lambda: RematCallback(0.5, compile="fast"), ValueError),
        (lambda: ScaleMonitor(histograms="all"), ValueError),
        (lambda: ScaleMonitor(on_violation="shout"), ValueError),
        (lambda: ScaleMonitor(on_violation=lambda: None), TypeError),
        (lambda: ScaleMonitor(first_step=-1), ValueError),
        (lambda: ScaleMonitor(first_step=2, last_step=1), ValueError),
        (lambda: ScaleMonitor(trend_steps=0), ValueError),
        (lambda: ScaleMonitor(trend_steps=True), ValueError),
        (lambda: ScaleMonitor(thresholds=0.1), TypeError),
        (lambda: ScaleMonitor(thresholds={"FP17": 0.1}), ValueError),
        (lambda: ScaleMonitor(thresholds={"FP16": 1.5}), ValueError),
        (lambda: ScaleMonitor(thresholds={"FP16": True}), ValueError),
        (lambda: ScaleMonitor(thresholds={"FP16": float("nan")}), ValueError),
        (lambda: ScaleMonitor(thresholds={"FP16": {"overflows": 0.1}}), ValueError),
        (lambda: ScaleMonitor(thresholds={"FP16": 0.1, "half": 0.1}), ValueError),
    ],
)
def test_bad_arguments_are_an_error(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        make()
    assert re.search(r"^\w+=.+: .+. Expected .+", str(raised.value)), raised.value


def test_explain_and_table_before_first_step(tmp_path: Path) -> None:
    assert "No step has run yet" in UnitScaleCallback().explain()
    assert not UnitScaleCallback().gauge and not UnitScaleCallback().coverage.counts
    assert UnitScaleCallback().state_dict() == {}
    assert "No step" in ScaleMonitor().table()
    for name in ("to_csv", "to_json_lines"):
        with pytest.raises(RuntimeError, match=rf"^{name}: path='.*': no step .*. Expected "):
            getattr(ScaleMonitor(), name)(tmp_path / "scales")
    assert not list(tmp_path.iterdir())


def test_module_without_optimizer_and_parameters() -> None:
    class Empty(pl.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            batch[0] @ batch[0].T

        def configure_optimizers(self) -> None:
            return None

    with pytest.warns(UserWarning):
        _fit(Empty(), *both(), logger=MemoryLogger())


def test_module_that_uses_torch_compile_inside() -> None:
    class Inside(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.compile(self.first, backend="eager")

    results = []
    for callbacks in ([], both()):
        pl.seed_everything(1, verbose=False)
        module = Inside()
        _fit(module, *callbacks, max_steps=4, logger=MemoryLogger())
        results.append([one.clone() for one in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert isinstance(module.first, nn.Module)

"""Runs whose saved tensors wait in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback
from tests.callbacks.modules import Regression
from tests.callbacks.runs import MemoryLogger, loader
from tests.callbacks.test_memory_budget import _assert_same_weights, _batches, _fit, _gpt


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}],
    ids=["plain", "accumulated, mixed precision"],
)
def test_offloaded_run_matches_plain_run_and_predicted_peak(options: dict[str, Any]) -> None:
    plain, moved = _gpt(dropout=0.0), _gpt(dropout=0.0)
    _fit(plain, _batches(6), **options)
    callback, logger = RematCallback(0.3, offload="host"), MemoryLogger()
    _fit(moved, _batches(6), callback, logger=logger, **options)
    _assert_same_weights(plain, moved)
    assert callback.reports[0].num_offloaded
    assert callback.predicted_peak_bytes == pytest.approx(callback.measured_peak_bytes, rel=0.01)
    assert "moved to the host" in callback.explain()


@pytest.mark.slow
def test_offload_with_units_and_monitor() -> None:
    plain, moved = _gpt(dropout=0.0), _gpt(dropout=0.0)
    _fit(plain, _batches())
    monitors = ScaleMonitor(every_n_steps=2), ScaleMonitor(every_n_steps=2)
    _fit(_gpt(dropout=0.0), _batches(), RematCallback(1.0), monitors[0], logger=MemoryLogger())
    callback = RematCallback(0.3, offload="host")
    _fit(moved, _batches(), callback, UnitScaleCallback(), monitors[1], logger=MemoryLogger())
    _assert_same_weights(plain, moved)
    assert callback.reports[0].num_offloaded
    names = [list(monitor.snapshots[-1].names) for monitor in monitors]
    assert names[0] == names[1]


@pytest.mark.slow
def test_resumed_run_has_same_weights(tmp_path: Path) -> None:
    whole, first, second = (_gpt(dropout=0.0) for _ in range(3))
    path = tmp_path / "half.ckpt"
    _fit(whole, _batches(), RematCallback(0.3, offload="host"), max_epochs=2)
    trainer = _fit(first, _batches(), RematCallback(0.3, offload="host"), max_epochs=1)
    trainer.save_checkpoint(path)
    _fit(second, _batches(), RematCallback(0.75), max_epochs=2, ckpt_path=str(path))
    _assert_same_weights(whole, second)


def test_incompatible_settings_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"offload='disk': .*Pass offload='host'"):
        RematCallback(0.5, offload="disk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget='min_cut' limits no bytes"):
        RematCallback("min_cut", offload="host")
    with pytest.raises(ValueError, match="Leave compile=True out"):
        RematCallback(0.5, compile=True, offload="host")
    assert repr(RematCallback(0.5, offload="host")) == "RematCallback(budget=0.5, offload='host')"


def test_budget_below_minimum_with_offload_is_an_error() -> None:
    with pytest.raises(ValueError, match="smallest achievable peak is"):
        _fit(Regression(), loader(8), RematCallback(10, offload="host"))


def test_offload_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    config = tmp_path / "run.yaml"
    config.write_text(
        "trainer:\n  logger: false\n  callbacks:\n"
        "  - class_path: lightning_unitscale.RematCallback\n"
        "    init_args: {budget: 0.5, offload: host}\n"
    )
    monkeypatch.setattr("sys.argv", ["train", "--config", str(config)])
    cli = LightningCLI(BoringModel, run=False, seed_everything_default=0)
    (callback,) = (c for c in cli.trainer.callbacks if isinstance(c, RematCallback))
    assert callback.offload == "host"
    assert isinstance(cli.trainer, pl.Trainer)

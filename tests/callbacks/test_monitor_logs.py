"""The monitor's logs: names, steps, and values that are left out."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from tests.callbacks.modules import Evaluated, Regression
from tests.callbacks.runs import MemoryLogger, loader, run

SUMMARY = {
    f"scales/{name}/{kind}_{direction}"
    for name in ("FP16", "E4M3FN", "E5M2")
    for kind in ("overflow", "underflow")
    for direction in ("forward", "backward")
}


def _events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), {"tensors": 0, "scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def test_scales_tab_instructions_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = ScaleMonitor(every_n_steps=1)
    loggers = [TensorBoardLogger(tmp_path, "board"), MemoryLogger(), CSVLogger(tmp_path, "csv")]
    with caplog.at_level(logging.INFO):
        run(Regression, [monitor], logger=loggers, max_steps=3)
        (line,) = [one.message for one in caplog.records if "#scales" in one.message]
        caplog.clear()
        run(Regression, [ScaleMonitor()], logger=MemoryLogger(), max_steps=1)
    assert "--logdir board and open http://localhost:6006/#scales" in line
    # Where there is nothing to open, nothing is logged.
    assert not [one.message for one in caplog.records if "#scales" in one.message]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_scales_share_step_axis_with_loss_in_every_logger(accumulate: int, tmp_path: Path) -> None:
    board, table = TensorBoardLogger(tmp_path, "board"), CSVLogger(tmp_path, "csv")
    memory = MemoryLogger()
    monitor = ScaleMonitor(every_n_steps=3)
    run(
        Evaluated,
        [UnitScaleCallback(), monitor],
        logger=[board, table, memory],
        max_steps=8,
        accumulate_grad_batches=accumulate,
        entry_options={"val_dataloaders": loader(4)},
    )
    expected = [0, 1, 3, 6, 7]
    assert [one.step for one in monitor.snapshots] == expected
    ours = [row for row in memory.rows if set(row[1]) >= SUMMARY]
    # A logger of which nothing else is known gets numbers only.
    assert all(isinstance(value, float) for _, row in ours for value in row.values())
    assert [step for step, _ in ours] == expected
    losses = [step for step, row in memory.rows if "train_loss_step" in row]
    assert losses == list(range(8))
    with open(Path(table.log_dir) / "metrics.csv") as lines:
        rows = list(csv.DictReader(lines))
    assert set(rows[0]) >= SUMMARY
    name = "scales/E5M2/underflow_backward"
    assert [int(row["step"]) for row in rows if row[name]] == expected
    events = _events(Path(board.log_dir))
    tags = events.Tags()
    assert [one.step for one in events.Scalars("train_loss_step")] == losses
    for tag in ("~scales/first/weight", "~scales/first/linear.grad"):
        assert [one.step for one in events.Scalars(f"{tag}/log2_rms")] == expected
        assert [one.step for one in events.Histograms(f"{tag}/exponents")] == expected
    assert [one.step for one in events.Scalars(f"~{name}")] == expected
    # Everything stands behind what the module has logged.
    own = [tag for tag in sorted(tags["scalars"]) if not tag.startswith("~scales/")]
    assert sorted(tags["scalars"])[: len(own)] == own and "val_loss" in own
    text = tensor_util.make_ndarray(events.Tensors("~scales/table/text_summary")[-1].tensor_proto)
    assert "linear" in str(text.ravel()[0])


def test_no_histograms(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path, "board")
    monitor = ScaleMonitor(every_n_steps=1, histograms=False, formats=["FP16"])
    run(Regression, [monitor], logger=board, max_steps=2)
    assert monitor.snapshots[0].exponent_counts() is None
    tags = _events(Path(board.log_dir)).Tags()
    assert not tags["histograms"]
    assert "~scales/FP16/overflow_forward" in tags["scalars"]
    assert not any("E4M3" in one for one in tags["scalars"])


def test_only_the_scales_tab(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path, "board")
    run(Regression, [ScaleMonitor(1, tensorboard_tabs="scales")], logger=board, max_steps=2)
    tags = _events(Path(board.log_dir)).Tags()
    assert not [tag for tag in tags["scalars"] if "scales" in tag]
    assert not tags["histograms"]
    assert [tag for tag in tags["tensors"] if tag.startswith("scales/forward/exponents/")]


def test_unknown_tensorboard_tabs_are_an_error() -> None:
    expected = (
        r"tensorboard_tabs='none': not a choice. Expected 'scales', 'operands' or 'all'. Leave"
    )
    with pytest.raises(ValueError, match=expected):
        ScaleMonitor(tensorboard_tabs="none")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "inside", "outside"),
    [
        ({"include": "first*"}, {"first.linear", "first.weight"}, {"second.linear", "gelu"}),
        ({"include": ["second.*", "gelu"]}, {"gelu", "second.linear"}, {"first.linear"}),
        ({"exclude": "first*"}, {"second.linear", "gelu"}, {"first.linear", "first.weight"}),
        ({"include": "*linear", "exclude": "first*"}, {"second.linear"}, {"first.linear", "gelu"}),
        ({"include": "second"}, {"second.linear"}, {"first.linear"}),
    ],
)
def test_include_and_exclude(options: Any, inside: set[str], outside: set[str]) -> None:
    monitor = ScaleMonitor(every_n_steps=1, **options)
    run(Regression, [UnitScaleCallback(), monitor], max_steps=1)
    names = set(monitor.snapshots[0].names)
    assert inside <= names
    assert not outside & names


def test_monitor_without_matching_tensors_warns() -> None:
    monitor = ScaleMonitor(every_n_steps=1, include="no such tensor")
    with pytest.warns(UserWarning, match="include='no such tensor': matches nothing"):
        run(Regression, [monitor], max_steps=2)
    assert not monitor.snapshots
    assert "No step has been sampled" in monitor.table()


def test_statistics_match_weight_and_gradient() -> None:
    seen: dict[str, torch.Tensor] = {}

    class Seeing(Regression):
        def on_after_backward(self) -> None:
            seen["weight"] = self.first.weight.grad.clone()
            seen["value"] = self.first.weight.detach().clone()

    for callbacks in ([], [UnitScaleCallback()]):
        monitor = ScaleMonitor(every_n_steps=1)
        run(Seeing, [*callbacks, monitor], max_steps=1)
        (snapshot,) = monitor.snapshots
        place = snapshot.names.index("first.weight")
        for direction, tensor in (("forward", seen["value"]), ("backward", seen["weight"])):
            expected = tensor.double().square().mean().sqrt().log2()
            found = snapshot.log2_rms(direction)[place]
            assert found == pytest.approx(float(expected), abs=1e-5)


def test_gradients_exclude_loss_scale() -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    found = []
    for scale in (1.0, 2.0**12):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        monitor = ScaleMonitor(every_n_steps=1)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        run(lambda: Regression(norm=False), [monitor], plugins=plugin, max_steps=1)
        snapshot = monitor.snapshots[0]
        found.append(snapshot.log2_rms("backward")[snapshot.names.index("second.linear")])
    assert found[0] == pytest.approx(found[1], abs=0.01)


@pytest.mark.parametrize("exact", [False, True])
def test_exact_histograms(exact: bool) -> None:
    class Wide(Regression):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.sin(self.first(x).repeat(1, 1000)).mean()

    monitor = ScaleMonitor(every_n_steps=1, histograms="exact" if exact else True)
    run(Wide, [monitor], max_steps=1)
    statistics = monitor.snapshots[0].statistics("sin")
    assert statistics is not None and statistics.exponent_counts is not None
    assert statistics.numel == 32_000
    number = statistics.num_sampled
    assert number == 32_000 if exact else 8000 < number <= 16_384
    assert monitor.snapshots[0].share_read()[0] == 1  # of what is small
    assert ("~" in monitor.table(full=True)) is not exact
    assert statistics.exponent_counts.sum() == statistics.num_sampled

"""Snapshots as CSV and JSON lines, read back with the standard library."""

import csv
import json
import math

import pytest

from lightning_unitscale.callbacks import ScaleMonitor
from lightning_unitscale.scales.export import snapshot_rows
from tests.tensorboard.runs import NAMES, snapshot, unit_scaled


@pytest.fixture
def monitor():
    monitor = ScaleMonitor()
    monitor.snapshots = [unit_scaled(snapshot(0)), snapshot(10, backward=False)]
    return monitor


def test_csv_has_a_row_per_step_tensor_and_direction(monitor, tmp_path):
    monitor.to_csv(tmp_path / "scales.csv")
    with (tmp_path / "scales.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(NAMES) + len(NAMES)
    keys = {(row["step"], row["tensor"], row["direction"]) for row in rows}
    assert len(keys) == len(rows)
    row = rows[len(NAMES) + 2]
    assert (row["step"], row["tensor"], row["direction"]) == ("0", NAMES[2], "backward")
    first = monitor.snapshots[0]
    statistics = first.statistics(2, "backward")
    assert float(row["rms"]) == statistics.rms
    assert float(row["log2_unit"]) == first.log2_gamma[2]
    assert float(row["log2_rms_stored"]) == first.log2_rms("backward", stored=True)[2]
    stored = first.statistics(2, "backward", stored=True)
    assert float(row["E4M3FN.flushed"]) == stored.fraction("E4M3FN", "flushed")


def test_json_lines_are_valid_json(monitor, tmp_path):
    monitor.to_json_lines(tmp_path / "scales.jsonl")
    lines = (tmp_path / "scales.jsonl").read_text().splitlines()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [row["step"] for row in rows] == [0] * 12 + [10] * 6
    zeros = rows[11]
    assert zeros["rms"] == 0 and zeros["zeros"] == zeros["numel"] == 8
    assert zeros["log2_rms"] is None and zeros["abs_min"] is None


def test_rows_are_about_what_was_measured():
    rows = list(snapshot_rows(snapshot(0, backward=False)))
    assert {row["direction"] for row in rows} == {"forward"}
    assert all(math.isfinite(row["FP16.overflow"]) for row in rows)


def test_nothing_sampled_is_an_empty_file(tmp_path):
    ScaleMonitor().to_csv(tmp_path / "scales.csv")
    assert (tmp_path / "scales.csv").read_text().strip() == ""

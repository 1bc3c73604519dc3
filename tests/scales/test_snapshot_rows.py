"""Snapshots as CSV and JSON lines, read back with the standard library; and in a few numbers.

These, and whose they are, against a look at every tensor.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_unitscale.callbacks import ScaleMonitor
from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.scales.layout import DIRECTIONS, RowLayout
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.snapshot_rows import exponent_histogram, snapshot_rows, summarize
from lightning_unitscale.scales.statistics import statistics_row
from tests.tensorboard.runs import NAMES, snapshot, unit_scaled

READ = (True, True, False, True, False, True)


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


def test_rows_have_only_measured_directions():
    rows = list(snapshot_rows(snapshot(0, backward=False)))
    assert {row["direction"] for row in rows} == {"forward"}
    assert all(math.isfinite(row["FP16.overflow"]) for row in rows)


def _read(one: ScaleSnapshot) -> ScaleSnapshot:
    return replace(one, operands=READ, matmuls=READ)


@pytest.mark.parametrize("in_units", [False, True])
def test_summary_has_worst_operand_values(in_units: bool) -> None:
    one = snapshot(3, offset=18)
    one = _read(unit_scaled(one) if in_units else one)
    summary = summarize(one)
    assert len(summary.numbers) == 2 + 6 + 12 and len(summary.tensors) == 12
    rows = np.flatnonzero(READ)
    for direction in DIRECTIONS:
        statistics = {NAMES[k]: one.statistics(int(k), direction, stored=True) for k in rows}
        scales = [item.log2_rms for item in statistics.values() if np.isfinite(item.log2_rms)]
        for name, expected in (("min", min), ("median", np.median), ("max", max)):
            found = summary.numbers[f"scales/log2_rms/{name}_{direction}"]
            assert found == pytest.approx(expected(scales), abs=1e-9)
        for item in one.layout.formats:
            for word, kind in (("overflow", "overflow"), ("underflow", "flushed")):
                shares = {name: own.fraction(item, kind) for name, own in statistics.items()}
                key = f"scales/{item.name}/{word}_{direction}"
                assert summary.numbers[key] == max(shares.values())
                tensor = summary.tensors[f"{key}_tensor"]
                assert (
                    shares[tensor] == max(shares.values()) if tensor else not any(shares.values())
                )
    assert bool(summary.tensors["scales/FP16/overflow_forward_tensor"]) is not in_units


def test_ties_in_summary_prefer_more_extreme_tensor() -> None:
    layout = RowLayout()
    values = [torch.full((8,), 2.0**exponent) for exponent in (20, 30, -40, -30, 0)]
    rows = torch.stack([statistics_row(value, layout) for value in values]).numpy()
    names = ("large", "larger", "smaller", "small", "ordinary")
    summary = summarize(ScaleSnapshot(0, names, rows, rows, layout))
    assert summary.numbers["scales/E5M2/overflow_forward"] == 1
    assert summary.tensors["scales/E5M2/overflow_forward_tensor"] == "larger"
    assert summary.tensors["scales/E5M2/underflow_backward_tensor"] == "smaller"


def test_summary_without_matmuls_excludes_scalars_and_losses() -> None:
    layout = RowLayout()
    values = [torch.full((8,), 2.0), torch.tensor(2.0**30), torch.full((8,), 2.0**31)]
    rows = torch.stack([statistics_row(value, layout) for value in values]).numpy()
    one = ScaleSnapshot(0, ("linear", "mean", "mse_loss"), rows, rows, layout)
    summary = summarize(one)
    assert summary.numbers["scales/log2_rms/max_forward"] == 1
    assert summary.numbers["scales/FP16/overflow_forward"] == 0


def test_summary_keys_of_custom_format_are_sanitized() -> None:
    layout = RowLayout((NumberFormat("my: E3/M4", 3, 4),))
    rows = statistics_row(torch.ones(8), layout).numpy()[None]
    summary = summarize(ScaleSnapshot(0, ("linear",), rows, rows, layout))
    assert "scales/my__E3_M4/overflow_forward" in summary.numbers


def test_unmeasured_direction_is_left_out() -> None:
    one = _read(snapshot(0, backward=False))
    summary = summarize(one)
    assert not any("backward" in key for key in (*summary.numbers, *summary.tensors))
    assert exponent_histogram(one, "backward") is None
    empty = ScaleSnapshot(
        0, (), np.zeros((0, one.layout.num_columns)), one.backward[:0], one.layout
    )
    assert summarize(empty).numbers == {"scales/num_violations": 0.0}
    assert exponent_histogram(empty, "forward") is None


def test_exponent_histogram_is_of_stored_values() -> None:
    for one in (snapshot(1), unit_scaled(snapshot(1))):
        one = _read(one)
        found = exponent_histogram(one, "forward")
        assert found is not None
        counts, edges = found
        assert len(edges) == len(counts) + 1 and counts[0] and counts[-1]
        expected: dict[int, float] = {}
        for k in np.flatnonzero(READ):
            unit = one.log2_sigma[k]
            for exponent, count in enumerate(one.statistics(int(k)).exponent_counts):
                if count:
                    place = exponent - 150 - int(unit)
                    expected[place] = expected.get(place, 0) + count
        shown = {int(edge): count for edge, count in zip(edges, counts, strict=False) if count}
        assert shown == expected

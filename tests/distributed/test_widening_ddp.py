"""All ranks leave FP8 together, even if operands stop fitting on one rank only."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

EVENTS = ("Out of FP8 from step 2 on: first.linear", "Back in the finer format from step 5 on")


@pytest.mark.distributed
@pytest.mark.timeout(150)
def test_ranks_widen_same_matmul_at_same_step(tmp_path: Path) -> None:
    run_ranks("tests.distributed.widening_run", tmp_path, timeout=120)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for found in ranks:
        assert found["in_fp8"] == ["88", "88", "-8", "-8", "-8", "-8", "88"]
        assert all(event in found["explained"] for event in EVENTS)
    assert ranks[0]["weight"] == ranks[1]["weight"]
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        written = {row["step"]: row["scales/formats"] for row in csv.DictReader(file)}
    texts = {step: text for step, text in written.items() if text}
    assert list(texts) == ["2", "5"]
    for event, text in zip(EVENTS, texts.values(), strict=True):
        assert text.startswith(event)

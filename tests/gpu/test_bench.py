"""``make bench-gpu`` starts, and writes what it has measured, before anybody has a GPU for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fp8_matmul import faster_casts

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_a_rehearsal(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(_SCRIPT), "--rehearse", "--output", str(output)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stderr
    results = json.loads(output.read_text())
    assert {row["ratio"] for row in results["overheads"] if row["variant"].endswith("plain")} == {1}
    assert len(results["overheads"]) == 14
    predicted, measured = (
        results["budgets"][0][f"{word} peak, MiB"] for word in ("predicted", "measured")
    )
    assert predicted == pytest.approx(measured, rel=0.1)


def test_the_faster_casts_are_told() -> None:
    for milliseconds, expected in (((0.8, 0.7), "kernel"), ((0.7, 0.8), "fused")):
        names = ("BF16", "constant", "constant, kernel")
        rows = [
            {"products": name, "ms": taken}
            for name, taken in zip(names, (0.5, *milliseconds), strict=True)
        ]
        assert faster_casts(rows) == expected

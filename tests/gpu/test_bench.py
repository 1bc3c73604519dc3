"""``make bench-gpu`` starts on a CPU and writes its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.fp8_matmul import Layer, errors, without_fp8
from benchmarks.on_a_gpu import summary_of
from lightning_unitscale.transforms import compile, fp8_linears

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_benchmark_runs_on_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(_SCRIPT), "--rehearse", "--output", str(output)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert finished.returncode == 0, finished.stderr
    results = json.loads(output.read_text())
    rows = [*results["eager"], *results["compiled"]]
    assert len({row["variant"] for row in rows}) == 8
    assert all(row["ratio"] > 0 for row in rows)
    predicted, measured = (
        results["budgets"][0][f"{word} peak, MiB"] for word in ("predicted", "measured")
    )
    assert predicted == pytest.approx(measured, rel=0.1)


def test_test_outcomes_are_summarized() -> None:
    def line(test: str, outcome: str, said: str = "") -> dict[str, str]:
        return {"test": test, "outcome": outcome, "said": said}

    lines = [line("a", "passed"), line("b", "failed", "x" * 5000), line("b", "passed")]
    lines += [line("c", "skipped", "no GPU"), line("d", "skipped", "no GPU")]
    found = summary_of([*lines, line("a", "failed", "in its teardown")])
    assert found["tests"] == {"failed": 2, "skipped": 2}
    assert found["skipped"] == {"no GPU": ["c", "d"]}
    assert found["failures"]["a"] == "in its teardown" and len(found["failures"]["b"]) == 4000


_FILE = """
import pytest

@pytest.fixture
def broken():
    yield
    raise OSError("at the end")

def test_right(): ...
def test_wrong(): assert 1 == 2
def test_left_out(): pytest.skip("there is none")
def test_broken(broken): ...

@pytest.mark.xfail(reason="not yet")
def test_not_yet(): assert 1 == 2
"""


def test_outcomes_are_written_during_run(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(_FILE)
    (tmp_path / "test_none.py").write_text("import nothing_of_this_name")
    written = tmp_path / "outcomes"
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "-p", "tests.gpu.outcomes"]
    command += ["--continue-on-collection-errors", "--outcomes", str(written), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(_SCRIPT.parents[1])}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some of them take seconds to import
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    found = summary_of([json.loads(line) for line in written.read_text().splitlines()])
    assert found["tests"] == {"passed": 1, "failed": 3, "skipped": 1, "xfailed": 1}
    assert list(found["skipped"]) == ["there is none"]
    assert list(found["xfailed"]) == ["not yet"]
    assert sum("nothing_of_this_name" in said for said in found["failures"].values()) == 1
    assert sum("at the end" in said for said in found["failures"].values()) == 1


def test_variants_that_ran_without_fp8_are_reported() -> None:
    names = ("BF16", "dynamic", "constant", "constant, eager")
    rows = [
        {
            "module": "block",
            "hidden size": 64,
            "matmuls": name,
            "error": 2e-2,
            "gradient error": error,
        }
        for name, error in zip(names, (2e-3, 0.0, 2e-3, 3e-2), strict=True)
    ]
    rows[0]["error"] = 2e-3
    assert without_fp8(rows) == ["dynamic (block, 64)", "constant (block, 64)"]
    assert without_fp8([]) == []


@pytest.mark.slow
def test_errors_are_measured_on_outputs() -> None:
    """Also after more compilations of the same code than Dynamo allows."""
    torch.manual_seed(0)
    module, x = Layer(32), torch.randn(8, 32, requires_grad=True)
    gradient = torch.randn(8, 32)
    for rows in range(1, 12):
        torch.compile(module, dynamic=False)(torch.randn(rows, 32))
    fp8 = compile(fp8_linears(module, scaling="dynamic", gradient_format="E5M2"))
    assert min(errors(fp8, module, x, gradient)) > 1e-3
    assert errors(torch.compile(module), module, x, gradient) == (0.0, 0.0)
    torch._dynamo.reset()

"""Run the tests and benchmarks that need a GPU, in short steps that write their results at once.

Run: ``make gpu`` (all steps), ``make test-gpu``, ``make bench-gpu``, or::

    python benchmarks/on_a_gpu.py --list
    python benchmarks/on_a_gpu.py bits conformance --minutes 9 --wheels FOLDER --output FOLDER

Steps run in the order of the list. A step that fails or exceeds its limit does not stop the others.
The output folder has ``gpu.json``, with numbers of tests, reasons of skips, and failures of each
step; ``gpu.log``, with all that the steps print; ``tests.jsonl``, with a line for each test; and a
JSON of each benchmark. All are written while the steps run, and a later call adds to them. Without
a network, ``--wheels`` names a folder with wheels of what this Python lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The number of last characters kept of the output of a failed test.
KEPT = 4000


@dataclass(frozen=True)
class Step:
    """A command and what it tests or measures.

    Args:
        name: Its name on the command line and in the results.
        shows: Its line in ``--list``.
        command: Arguments of Python, in which ``{device}`` and ``{output}`` are filled in.
        rehearsal: Further arguments where there is no GPU; ``None`` if the step needs one.
        workers: Processes that share the tests; ``None`` for a benchmark.
        keeps: A regular expression. Output lines that match it are kept in the results.
    """

    name: str
    shows: str
    command: str
    rehearsal: str | None = ""
    workers: int | None = None
    keeps: str | None = None


_GPU_TESTS = "--device {device} tests/gpu -m gpu -k"
STEPS = (
    Step(
        "conformance",
        "the conformance matrix on the device: results are equal bit for bit",
        f"{_GPU_TESTS} test_odd_modules",
        workers=8,
    ),
    Step(
        "bits",
        "a GPT bit for bit, TF32, CUDA graphs, formats, memory; no step waits for the GPU",
        f'{_GPU_TESTS} "not test_odd_modules and not test_a_rehearsal"',
        workers=8,
    ),
    Step(
        "suite",
        "one case of every quick test on the CPU, with this Python and this torch",
        'tests --cases 1 -m "not slow and not distributed and not browser and not gpu"',
        workers=12,
    ),
    Step(
        "eager",
        "the time that unit scaling and the monitor add to a step in eager mode",
        "benchmarks/gpu.py --only eager --output {output}",
        "--rehearse",
    ),
    Step(
        "rows",
        "the monitor's statistics of a tensor: bytes per second, compared with aminmax",
        "benchmarks/gpu.py --only rows --output {output}",
        "--rehearse",
    ),
    Step(
        "compiled",
        "the time that unit scaling adds under Inductor and in CUDA graphs",
        "benchmarks/gpu.py --only compiled --output {output}",
        "--rehearse",
    ),
    Step("fp8", "FP8 compared with BF16", "benchmarks/gpu.py --only fp8 --output {output}", None),
    Step(
        "budgets",
        "predicted and measured peaks of memory budgets",
        "benchmarks/gpu.py --only budgets --output {output}",
        "--rehearse",
    ),
    Step(
        "demo",
        "the demo, and the number of its operands near RMS 1",
        "-m lightning_unitscale fit --config configs/gpt_unit_scaled.yaml"
        " --trainer.accelerator {device} --trainer.logger.init_args.save_dir {logs}",
        "--trainer.max_steps 3 --trainer.limit_val_batches 1",
        keeps="matmuls scaled|within 2x of RMS 1,|^Validation loss",
    ),
    Step(
        "training",
        "the demo with and without the callbacks: losses and weights are equal bit for bit",
        "benchmarks/same_training.py --device {device} --output {output}",
        "--steps 2",
    ),
)
# The plugin of pytest-benchmark, where an image has it, warns of xdist, and warnings are errors.
_PYTEST = "-m pytest -q -ra -p no:cacheprovider -p no:benchmark -p tests.gpu.outcomes"


class Folder:
    """Where the results go.

    Args:
        path: The folder; it is made.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path.resolve()
        self.log = self.path / "gpu.log"
        self.outcomes = self.path / "tests.jsonl"
        self._summary = self.path / "gpu.json"

    def add(self, name: str, result: Mapping[str, Any]) -> None:
        """Write the result of a step, or another entry, beside those that are there."""
        summary = json.loads(self._summary.read_text()) if self._summary.exists() else {}
        summary[name] = result
        unfinished = self._summary.with_suffix(".new")
        unfinished.write_text(json.dumps(summary, indent=1) + "\n")
        unfinished.replace(self._summary)


def run(step: Step, folder: Folder, environment: Mapping[str, str], args: Any) -> dict[str, Any]:
    """Run a step and say what became of it."""
    with tempfile.TemporaryDirectory() as logs:
        command = _filled_in(step, folder, Path(logs), args)
        known, printed = map(_size, (folder.outcomes, folder.log))
        start = time.monotonic()
        with folder.log.open("a") as log:
            print(f"\n== {step.name}: {shlex.join(command)}", file=log, flush=True)
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                ended = f"exit code {process.wait(timeout=args.limit)}"
            except subprocess.TimeoutExpired:
                ended = f"stopped after {args.limit} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    result = {
        "shows": step.shows,
        "device": args.device,
        "ended": ended,
        "seconds": round(time.monotonic() - start, 1),
    }
    if step.workers is not None:
        result |= summary_of([json.loads(line) for line in _lines(folder.outcomes, known)])
    if step.keeps is not None:
        result["says"] = [
            line for line in _lines(folder.log, printed) if re.search(step.keeps, line)
        ]
    return result


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines(path: Path, start: int) -> list[str]:
    """The lines that a file has got since it had so many bytes."""
    return path.read_bytes()[start:].decode(errors="replace").splitlines() if path.exists() else []


def _filled_in(step: Step, folder: Folder, logs: Path, args: Any) -> list[str]:
    line = step.command
    if step.workers is not None:
        line = f"{_PYTEST} --outcomes {{outcomes}} {line} {args.pytest_args}"
        if step.workers:
            line += f" -n {min(step.workers, os.cpu_count() or 1)}"
    if args.device == "cpu":
        line += f" {step.rehearsal}"
    places = {
        "device": args.device,
        "output": folder.path / f"{step.name}.json",
        "outcomes": folder.outcomes,
        "logs": logs,
    }
    return [sys.executable, *(word.format_map(places) for word in shlex.split(line))]


def summary_of(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of tests by outcome, reasons of skips and expected failures, and what failed says.

    Args:
        outcomes: The lines of ``tests.gpu.outcomes``: of one test there may be several.
    """
    of_test: dict[str, Mapping[str, Any]] = {}
    for line in outcomes:
        if of_test.get(line["test"], {}).get("outcome") != "failed":
            of_test[line["test"]] = line
    counts: dict[str, int] = defaultdict(int)
    reasons: dict[str, dict[str, list[str]]] = {
        outcome: defaultdict(list) for outcome in ("skipped", "xfailed")
    }
    for test, line in of_test.items():
        counts[line["outcome"]] += 1
        if line["outcome"] in reasons:
            reasons[line["outcome"]][line["said"]].append(test)
    failures = {
        test: line["said"][-KEPT:] for test, line in of_test.items() if line["outcome"] == "failed"
    }
    return {"tests": dict(counts), "failures": failures, **reasons}


def environment_with(wheels: Path | None, site: Path, log: Path) -> dict[str, str]:
    """Environment variables of the steps: this checkout, and what the wheels bring."""
    paths = [str(ROOT)]
    if wheels is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--no-cache-dir", "--target", str(site)]
        with log.open("a") as file:
            names = map(str, sorted(wheels.glob("*.whl")))
            subprocess.run([*command, *names], check=True, stdout=file, stderr=file)
        paths.append(str(site))
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # Without it cuBLAS may add up in another order in another run.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


_MACHINE = "import json; from benchmarks.measure import machine; print(json.dumps(machine()))"


def main() -> int:
    """Run the steps that were asked for; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("steps", nargs="*", help="names, 'tests', or 'benchmarks'; default: all")
    parser.add_argument("--list", action="store_true", help="list the steps with their contents")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: rehearse")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first")
    parser.add_argument("--limit", type=float, default=240, help="seconds allowed for each step")
    parser.add_argument("--minutes", type=float, default=60, help="minutes allowed for all steps")
    parser.add_argument("--pytest-args", default="", help="more arguments for pytest")
    args = parser.parse_args()
    kinds = {step.name: "benchmarks" if step.workers is None else "tests" for step in STEPS}
    if unknown := {*args.steps} - {*kinds, *kinds.values()}:
        parser.error(f"no step is named {', '.join(sorted(unknown))}. Expected {', '.join(kinds)}")
    steps = [s for s in STEPS if not args.steps or {s.name, kinds[s.name]} & {*args.steps}]
    if args.list:
        for step in steps:
            print(f"{step.name:12} {kinds[step.name]:11} {step.shows}")
        return 0
    end, start = time.monotonic() + 60 * args.minutes, time.monotonic()
    limit, folder, failed = args.limit, Folder(args.output), []
    with tempfile.TemporaryDirectory() as site:
        environment = environment_with(args.wheels, Path(site), folder.log)
        command = [sys.executable, "-c", _MACHINE]
        about = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
        folder.add("machine", json.loads(about))
        for step in steps:
            if args.device == "cpu" and step.rehearsal is None:
                continue
            args.limit = min(limit, end - time.monotonic())
            if args.limit < 10:
                result: dict[str, Any] = {"shows": step.shows, "ended": "no time was left for it"}
            else:
                result = run(step, folder, environment, args)
            folder.add(step.name, result)
            failed += [step.name] if result["ended"] != "exit code 0" else []
            print(f"{step.name:12} {result.get('seconds', 0):6} s, {result['ended']}", flush=True)
            for outcome, count in result.get("tests", {}).items():
                print(f"{count:8} {outcome}")
            for outcome in ("skipped", "xfailed"):
                for reason, tests in result.get(outcome, {}).items():
                    first_line, *_ = [*reason.splitlines(), ""]
                    print(f"{len(tests):8} {outcome}: {first_line[:100]}")
            for line in result.get("says", []):
                print(f"         {line}")
            for test in result.get("failures", {}):
                print(f"         failed: {test}", flush=True)
    print(f"{time.monotonic() - start:.0f} s; results in {folder.path}; failed: {failed or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

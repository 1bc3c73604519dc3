"""Every model with every schedule on several processes, compared with one process.

Each run makes two training steps and one forward pass of eight microbatches and compares their
losses, and the gradients of all parameters, with microbatch accumulation of the unmodified module
in one process: FP32 on CPUs, gloo between them. What is written is the largest difference.

    python benchmarks/pipeline_equality.py                     # all: half an hour of two cores
    python benchmarks/pipeline_equality.py --ranks 2 --models GPT --schedules 1F1B ZBVZeroBubble
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tabulate import tabulate

from benchmarks.measure import RESULTS, machine
from lightning_unitscale.pipeline import SCHEDULES
from tests.distributed.launch import run_ranks
from tests.pipeline.models import MODELS

RESULT = "pipeline_equality.json"
# A gradient that is a sum over stages is added up in another order than in one process.
TIED_LIMIT = 1e-7


def rows_of(model: str, schedules: list[str], num_ranks: int) -> list[dict[str, Any]]:
    """Run one model by all of the schedules."""
    runs = [f"{model}:{schedule}" for schedule in schedules]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = (str(num_ranks), *runs)
        run_ranks("tests.pipeline.engine_run", folder, *arguments, num_ranks=1, timeout=900)
        reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return [_row(run, [report[run] for report in reports]) for run in runs]


def _row(run: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    model, _, schedule = run.partition(":")
    (losses,) = [report["losses"] for report in found if report["losses"] is not None]
    users: dict[str, int] = {}
    for report in found:
        for name in report["has_gradient"]:
            users[name] = users.get(name, 0) + 1
    different = {name: value for report in found for name, value in report["gradients"].items()}
    multiple = {name for report in found for name in report["in_several_stages"]}
    tied = [value for name, value in different.items() if name in multiple]
    untied = [value for name, value in different.items() if name not in multiple]
    return {
        "model": model,
        "schedule": schedule,
        "ranks": len(found),
        "stages": sum(len(report["stages"]) for report in found),
        "parameters": len(users),
        "losses": max(losses),
        "gradients": max(untied, default=0.0),
        "tied": max(tied, default=0.0) if multiple else None,
    }


def main() -> int:
    """Print and write the table; returns whether a difference is too large."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    options = parser.parse_args()
    rows = []
    for num_ranks in options.ranks:
        for model in options.models:
            found = rows_of(model, options.schedules, num_ranks)
            print(tabulate(found, headers="keys"), flush=True)
            rows += found
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / RESULT
    # What was run on other numbers of processes before stays.
    known = json.loads(path.read_text()) if path.exists() else {"rows": []}
    others = [row for row in known["rows"] if row["ranks"] not in options.ranks]
    content = {
        "title": __doc__.splitlines()[0],
        "machine": about,
        "rows": sorted([*others, *rows], key=lambda row: row["ranks"]),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return int(
        any(row["losses"] or row["gradients"] or (row["tied"] or 0.0) > TIED_LIMIT for row in rows)
    )


if __name__ == "__main__":
    sys.exit(main())

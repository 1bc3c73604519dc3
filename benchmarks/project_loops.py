"""Packages that train by their own entry points, with and without the callbacks.

Nothing of them is changed, and no name stands for another: a package that trains by
``pytorch_lightning`` does. Each trains from one seed without a callback, once more without, with
the monitor, with unit scaling, and with both, each time in a process of its own. The gradients of
every optimizer step, what the package itself reports (losses, metrics, forecasts) and the final
weights are compared bit for bit. Nothing is installed or downloaded: models have random weights,
data are made here. What is missing is listed with the command that installs it.

Run: ``python benchmarks/project_loops.py [names...]``
(docs/measurements/real-projects.md says how to install the packages)
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

from entry_points.entry_points import ENTRY_POINTS
from entry_points.run import VARIANTS, difference, run
from measure import RESULTS, machine
from real.apart import Failure, apart
from tabulate import tabulate

PROJECT_SECONDS, RUN_SECONDS = 1800.0, 600.0


def examine(name: str) -> dict[str, Any]:
    """Train all variants of one project, each in a process that is forked from this one."""
    warnings.filterwarnings("ignore")
    entry_point = ENTRY_POINTS[name]
    entry_point.load()
    row: dict[str, Any] = {"name": name, "call": entry_point.call, "way in": entry_point.way_in}
    row["versions"] = entry_point.versions()
    runs = {variant: apart("fork", RUN_SECONDS, run, entry_point, variant) for variant in VARIANTS}
    plain = runs["plain"]
    if isinstance(plain, Failure):
        return {**row, "error": plain.text, "details": plain.details}
    row["steps"] = len(plain.gradients)
    row["numbers"] = len(plain.numbers)
    row["variants"] = {}
    for variant, found in runs.items():
        if isinstance(found, Failure):
            row["variants"][variant] = {"error": found.text, "details": found.details}
            continue
        about: dict[str, Any] = {"equal": difference(plain, found) or "equal"}
        about["warnings"] = sorted(found.warnings - plain.warnings)
        if found.coverage is not None:
            about["matmuls"] = found.coverage.num_matmuls
            about["matmuls in units"] = found.coverage.num_in_units
            about["flops in units"] = found.coverage.fraction_of_flops("units", "format")
            about["reasons"] = dict(found.coverage.reasons)
        if found.sampled:
            about["sampled steps"] = found.sampled
            about["modules"] = len(found.modules)
            about["not watched"] = sorted(found.modules - found.watched)
        row["variants"][variant] = about
    return row


def table_row(row: dict[str, Any]) -> dict[str, str]:
    """What is equal, what ran in units and what was watched."""
    packages = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    cells = {"package, loop": packages, "call": row["call"], "callbacks by": row["way in"]}
    if "error" in row:
        return {**cells, "plain twice": row["error"]}
    variants = row["variants"]
    cells["steps"] = str(row["steps"])
    for variant in list(VARIANTS)[1:]:
        cells[variant] = variants[variant].get("error") or variants[variant]["equal"]
    if "matmuls" in (units := variants["units"]):
        cells["matmuls"] = f"{units['matmuls in units']} of {units['matmuls']}"
        cells["FLOPs"] = f"{100 * units['flops in units']:.4g}%"
    if "modules" in (monitor := variants["monitor"]):
        cells["snapshots"] = str(len(monitor["sampled steps"]))
        watched = monitor["modules"] - len(monitor["not watched"])
        cells["modules"] = f"{watched} of {monitor['modules']}"
    return cells


def _print_notes(row: dict[str, Any]) -> None:
    """Why matmuls ran plain, and what the callbacks warned of."""
    for variant, found in row.get("variants", {}).items():
        if variant == "units":
            for reason, share in found.get("reasons", {}).items():
                print(f"  {100 * share:.2g}% of FLOPs plain: {reason}")
        for line in found.get("warnings", ()):
            print(f"  {variant}: {line[:300]}")


def main() -> None:
    """Train what is installed, and print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", choices=[[], *ENTRY_POINTS], help="projects; all by default"
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "project_loops.json")
    parser.add_argument("--markdown", action="store_true", help="the table of the documentation")
    parser.add_argument("--verbose", action="store_true", help="with tracebacks")
    options = parser.parse_args()
    rows = []
    for name in options.names or ENTRY_POINTS:
        entry_point = ENTRY_POINTS[name]
        if missing := entry_point.missing():
            print(f"{name}: not installed: pip install {' '.join(missing)}")
            continue
        row = apart("spawn", PROJECT_SECONDS, examine, name)
        if isinstance(row, Failure):
            row = {"name": name, "call": entry_point.call, "way in": entry_point.way_in,
                   "versions": entry_point.versions(), "error": row.text,
                   "details": row.details}  # fmt: skip
        rows.append(row)
        print(" | ".join((name, *list(table_row(row).values())[3:])), flush=True)
        _print_notes(row)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        if options.verbose:
            for part in (row, *row.get("variants", {}).values()):
                print(part.get("details", ""), end="")
    form = "github" if options.markdown else "simple"
    print(tabulate([table_row(row) for row in rows], headers="keys", tablefmt=form))


if __name__ == "__main__":
    main()

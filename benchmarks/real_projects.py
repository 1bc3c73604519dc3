"""Modules that ship in other packages, trained with and without the callbacks.

Each module trains from one seed without a callback, once more without, with the monitor, with unit
scaling, with both, with products in simulated FP8, with a memory budget, and by the rules of u-muP.
Losses, logged numbers and final weights of the first five are compared bit for bit; in FP8
something has to be rounded, and by rules another model trains.
Nothing is installed or downloaded: models have random weights, data are made here. What is missing
is listed with the command that installs it.

Run: ``python benchmarks/real_projects.py [names...]`` (``pip install -e '.[dev,bench,real]'``)
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import RESULTS, machine
from real.apart import Failure, apart
from real.comparison import Compared, compared
from real.projects import PROJECTS
from real.training import VARIANTS, train
from tabulate import tabulate

PROJECT_SECONDS, RUN_SECONDS = 1800.0, 300.0
EQUAL = ("again", "monitor", "default", "both")


def examine(name: str, steps: int, variants: list[str]) -> dict[str, Any]:
    """Train all variants of one project, each in a process that is forked from this one."""
    warnings.filterwarnings("ignore")
    project = PROJECTS[name]
    # Imports everything, so that no run's first step does.
    module, _ = project.make()
    shown = getattr(module, "model", module) if type(module).__name__ == "Loss" else module
    row: dict[str, Any] = {
        "name": name,
        "module": f"{type(shown).__module__.split('.')[0]}.{type(shown).__name__}",
        "versions": project.versions(),
        "parameters": sum(p.numel() for p in module.parameters()),
        "steps": steps,
    }
    del module, shown
    plain = apart("fork", RUN_SECONDS, train, project, "plain", steps)
    if isinstance(plain, Failure):
        return {**row, "error": plain.text, "details": plain.details}
    row["variants"] = {"plain": asdict(compared(plain, plain))}
    for variant in variants:
        run = apart("fork", RUN_SECONDS, train, project, variant, steps)
        row["variants"][variant] = asdict(compared(plain, run))
        if isinstance(run, Failure):
            row["variants"][variant]["details"] = run.details
    return row


def bits_row(row: dict[str, Any]) -> dict[str, str]:
    """What is equal, and what of the products ran in units."""
    cells = {"module": f"{row['module']} ({_packages(row)})"}
    if "error" in row:
        return {**cells, "plain twice": row["error"]}
    variants = {name: Compared(**_without(found)) for name, found in row["variants"].items()}
    for variant in EQUAL:
        if variant in variants:
            header = "plain twice" if variant == "again" else variant
            cells[header] = variants[variant].error or variants[variant].equal
    default = variants.get("default")
    if default is not None and default.num_products is not None:
        cells["products"] = f"{default.num_in_units} of {default.num_products}"
        cells["FLOPs"] = f"{100 * default.flops_in_units:.4g}%"
    fp8 = variants.get("fp8")
    if fp8 is not None:
        cells["loss in FP8"] = fp8.error or f"{_number(variants['plain'].loss)} -> " + (
            "the same bits" if fp8.equal == "equal" else _number(fp8.loss)
        )
    return cells


def costs_row(row: dict[str, Any]) -> dict[str, str]:
    """Times and memory of plain training, and how many times as much the variants take."""
    cells = {"module": row["module"]}
    if "error" in row:
        return cells
    plain = row["variants"]["plain"]
    cells["first ms"] = f"{1e3 * plain['first_step']:.0f}"
    cells["later ms"] = f"{1e3 * plain['later_steps']:.1f}"
    for variant in ("monitor", "default", "both", "fp8"):
        found = row["variants"].get(variant)
        if found is None or found["error"]:
            continue
        first, later, memory = (
            found[key] / max(plain[key], 1e-9)
            for key in ("first_step", "later_steps", "peak_bytes")
        )
        cells[variant] = f"{first:.1f} / {later:.2f} / {memory:.2f}"
    return cells


def _begun(
    row: dict[str, Any], variant: str, column: str
) -> tuple[dict[str, str], dict[str, Any] | None]:
    """A variant's first cells, and what it has found; else the error is in ``column``."""
    cells = {"project": row["name"]}
    found = row.get("variants", {}).get(variant)
    error = row.get("error", "") if found is None else found["error"]
    if found is None or error:
        return {**cells, column: error}, None
    return cells, found


def _first_steps(row: dict[str, Any], found: dict[str, Any]) -> str:
    """Seconds of the first step: plain, and of a variant."""
    return f"{row['variants']['plain']['first_step']:.2f} -> {found['first_step']:.1f}"


def remat_row(row: dict[str, Any]) -> dict[str, str]:
    """What became of a step under a memory budget, beside plain."""
    cells, found = _begun(row, "remat", "parts")
    if found is None:
        return cells
    cells["parts"] = str(found["parts"])
    cells["losses"] = "equal" if found["loss_gap"] == 0 else f"within {found['loss_gap']:.0e}"
    cells["weights"] = "equal" if found["equal"] == "equal" else "differ"
    cells["first s"] = _first_steps(row, found)
    reason = (found["unplanned"].strip().splitlines() or [""])[0].replace("|", "/")
    # Of a file the name is enough.
    cells["why not planned"] = textwrap.shorten(re.sub(r"/\S*/", "", reason), 120)
    return cells


def rules_row(row: dict[str, Any]) -> dict[str, str]:
    """What became of a step by rules, beside plain."""
    cells, found = _begun(row, "rules", "trains")
    if found is None:
        return cells
    plain = row["variants"]["plain"]
    reasons = (_PLAIN_BY_RULES.search(line) for line in found["warnings"])
    reason = next((match.group(1) for match in reasons if match), "")
    cells["trains"] = "the plain model" if reason else "by rules"
    cells["loss"] = f"{_number(plain['loss'])} -> {_number(found['loss'])}"
    cells["first s"] = _first_steps(row, found)
    cells["why plain"] = reason
    return cells


_PLAIN_BY_RULES = re.compile(r"cannot run captured: (.*?)\. So it runs as it is")


def _without(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != "details"}


def _packages(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in row["versions"].items()) or "own"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _print_notes(row: dict[str, Any]) -> None:
    """Why products ran plain, and what the callbacks warned of."""
    for variant, found in row.get("variants", {}).items():
        if variant == "default":
            for reason, share in found["reasons"].items():
                print(f"  {100 * share:.2g}% of FLOPs plain: {reason}")
        for line in found["warnings"]:
            print(f"  {variant}: {line[:300]}")


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def main() -> None:
    """Train what is installed, and print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", choices=[[], *PROJECTS], help="projects; all by default"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS)[1:], default=list(VARIANTS)[1:]
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "real_projects.json")
    parser.add_argument(
        "--markdown", action="store_true", help="the tables of docs/measurements/real-projects.md"
    )
    parser.add_argument("--verbose", action="store_true", help="with tracebacks")
    options = parser.parse_args()
    rows = []
    for name in options.names or PROJECTS:
        if missing := PROJECTS[name].missing():
            print(f"{name}: not installed: pip install {' '.join(missing)}")
            continue
        row = apart("spawn", PROJECT_SECONDS, examine, name, options.steps, options.variants)
        if isinstance(row, Failure):
            row = {"name": name, "module": name, "versions": PROJECTS[name].versions(),
                   "error": row.text, "details": row.details}  # fmt: skip
        rows.append(row)
        print(" | ".join((name, *list(bits_row(row).values())[1:])), flush=True)
        _print_notes(row)
        _write(rows, options.json)
        if options.verbose:
            for part in (row, *row.get("variants", {}).values()):
                print(part.get("details", ""), end="")
    form = "github" if options.markdown else "simple"
    print(tabulate([bits_row(row) for row in rows], headers="keys", tablefmt=form))
    print("\nFirst step / later steps / memory, beside plain:")
    print(tabulate([costs_row(row) for row in rows], headers="keys", tablefmt=form))
    print("\nWith RematCallback('min_cut'):")
    print(tabulate([remat_row(row) for row in rows], headers="keys", tablefmt=form))
    print("\nWith UnitScaleCallback('u-mup'):")
    print(tabulate([rules_row(row) for row in rows], headers="keys", tablefmt=form))


if __name__ == "__main__":
    main()

"""Modules of other packages, trained with and without the callbacks.

Each module trains from one seed without a callback, once more without, with the monitor, with unit
scaling, with both, with matmuls in simulated FP8, with a memory budget, and by the rules of u-muP.
Losses, logged numbers and final weights of the first five are compared bit for bit; in FP8
something has to be rounded, and by rules another model trains.
Nothing is installed or downloaded: models have random weights, data are made here. What is missing
is listed with the command that installs it.

Run: ``python benchmarks/real_projects.py [names...]``
(docs/measurements/real-projects.md says how to install the packages)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
import warnings
from collections.abc import Sequence
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
CAPTURED = ("remat", "rules")
UNCAPTURED = tuple(name for name in VARIANTS if name not in {"plain", *CAPTURED})


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
    """What is equal, and what of the matmuls ran in units."""
    cells = {"module": f"{row['module']} ({_packages(row)})"}
    if "error" in row:
        return {**cells, "plain twice": row["error"]}
    variants = {name: Compared(**_without(found)) for name, found in row["variants"].items()}
    for variant in EQUAL:
        if variant in variants:
            header = "plain twice" if variant == "again" else variant
            cells[header] = variants[variant].error or variants[variant].equal
    default = variants.get("default")
    if default is not None and default.num_matmuls is not None:
        cells["matmuls"] = f"{default.num_in_units} of {default.num_matmuls}"
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


def captured_row(row: dict[str, Any], variant: str) -> dict[str, str]:
    """What became of a step that a callback wants captured, beside plain."""
    cells = {"project": row["name"]}
    found = row.get("variants", {}).get(variant)
    error = row.get("error", "") if found is None else found["error"]
    if found is None or error:
        return {
            **cells,
            "parts": "error" if error else "",
            "why it is uncaptured": _shortened(error),
        }
    plain = row["variants"]["plain"]
    cells["parts"] = str(found["parts"])
    if variant == "rules":
        cells["trains"] = "the plain model" if found["uncaptured"] else "by rules"
        cells["last loss"] = f"{_number(plain['loss'])} -> {_number(found['loss'])}"
    gap = found["loss_gap"]
    cells["losses differ by"] = "0" if gap == 0 else f"{gap:.0e}"
    if variant == "remat":
        cells["weights"] = "equal" if found["equal"] == "equal" else "differ"
    cells["first s"] = f"{plain['first_step']:.2f} -> {found['first_step']:.1f}"
    cells["why it is uncaptured"] = _shortened(found["uncaptured"])
    return cells


def _shortened(reason: str) -> str:
    first_line = (reason.strip().splitlines() or [""])[0].replace("|", "/")
    # Of a file the name is enough.
    return textwrap.shorten(re.sub(r"/\S*/", "", first_line), 120)


def _without(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != "details"}


def _packages(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in row["versions"].items()) or "own"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _print_notes(row: dict[str, Any]) -> None:
    """Why matmuls ran plain, and what the callbacks warned of."""
    for variant, found in row.get("variants", {}).items():
        if variant == "default":
            for reason, share in found["reasons"].items():
                print(f"  {100 * share:.2g}% of FLOPs plain: {reason}")
        for line in found["warnings"]:
            print(f"  {variant}: {line[:300]}")


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    """Put what was measured into the file; what it has of other rows and variants stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = json.loads(path.read_text()) if path.exists() else {}
    lists = {"rows": written.get("rows", []), "captured": written.get("captured", [])}
    for key, variants in (("rows", UNCAPTURED), ("captured", CAPTURED)):
        measured = {row["name"]: _only(row, variants) for row in rows if _has(row, variants)}
        merged = {row["name"]: row for row in lists[key]} | measured
        lists[key] = [merged[name] for name in PROJECTS if name in merged]
    text = json.dumps({"machine": machine(), **lists}, indent=1) + "\n"
    for folder in sorted({str(RESULTS.parents[1]), *filter(None, sys.path)}, key=len, reverse=True):
        text = text.replace(f"{folder}/", "")  # no names of this machine
    path.write_text(text)


def _has(row: dict[str, Any], variants: Sequence[str]) -> bool:
    return "error" in row or not row["variants"].keys().isdisjoint(variants)


def _only(row: dict[str, Any], variants: Sequence[str]) -> dict[str, Any]:
    found = row.get("variants", {})
    kept = {name: found[name] for name in ("plain", *variants) if name in found}
    return {**row, "variants": kept}


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
    for variant in CAPTURED:
        print(f"\nSteps that are captured ({variant}):")
        table = [captured_row(row, variant) for row in rows]
        print(tabulate(table, headers="keys", tablefmt=form, disable_numparse=True))


if __name__ == "__main__":
    main()

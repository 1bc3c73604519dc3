"""Compare two recorded runs: ``lightning-unitscale compare RUN_A RUN_B``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lightning_unitscale.tensorboard.divergence import Divergence, find_divergence
from lightning_unitscale.tensorboard.history import RunParser, read_run

EXIT_DIVERGED = 1


def compare_runs(run_a: str | Path, run_b: str | Path) -> Divergence:
    """Find the first step, tensor and direction in which two runs differ by more than chance.

    The runs may have other precisions, devices and parallel layouts, but sample the same steps.

    Args:
        run_a: Folder with the event files of a run that had a ``ScaleMonitor``.
        run_b: Folder of the other run.

    Returns:
        The finding. ``text`` is a report in a few lines.

    Raises:
        FileNotFoundError: If a folder has no event files.
        ValueError: If a run has no scales, or the runs share no tensor or no sampled step.
    """
    return find_divergence(read_run(run_a), read_run(run_b))


def main(args: Sequence[str]) -> None:
    """Run the command ``compare``."""
    parser = RunParser(
        prog="lightning-unitscale compare",
        description="Find the first step, tensor, module and direction in which two runs that a "
        "ScaleMonitor logged to TensorBoard differ by more than chance. Exit "
        "status: 0 if they do not, 1 if they do, 2 for errors.",
    )
    parser.add_argument("run_a", metavar="RUN_A", help="folder of a run, with its event files")
    parser.add_argument("run_b", metavar="RUN_B", help="folder of the other run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(args)
    with parser.reading():
        found = compare_runs(options.run_a, options.run_b)
    print(json.dumps(found.to_json(), allow_nan=False) if options.json else found.text)
    if found.diverged:
        raise SystemExit(EXIT_DIVERGED)

"""Run the commands that read the event files of finished runs: compare, diagnose and report."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from typing_extensions import override

from lightning_unitscale.cli.errors import CommandError
from lightning_unitscale.precision.diagnosis import diagnose
from lightning_unitscale.tensorboard.divergence import compare_runs
from lightning_unitscale.tensorboard.history import LastStep, read_run
from lightning_unitscale.tensorboard.run_report import write_report

EXIT_DIVERGED = 1


class _Parser(argparse.ArgumentParser):
    """A parser whose errors, and those of the runs, are one line each."""

    @override
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{self.prog}: {message}. See {self.prog} --help.")

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """End the command with the error of its runs, if there is one."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise CommandError(f"{self.prog}: {error}") from None


def compare(args: Sequence[str]) -> None:
    """Print where two runs diverge."""
    parser = _Parser(
        prog="lightning-unitscale compare",
        description="Find the first step, tensor, module and direction in which two runs that a "
        "ScaleMonitor logged to TensorBoard differ by more than chance. Exit status: 0 if they do "
        "not, 1 if they do, 2 for errors.",
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


def summarize(args: Sequence[str]) -> None:
    """Print the summary of a run."""
    parser = _Parser(
        prog="lightning-unitscale diagnose",
        description="Summarize a run that a ScaleMonitor logged to TensorBoard, one line each: "
        "violations, trends, the worst tensors, coverage, and the first NaN or infinity.",
    )
    parser.add_argument("logdir", metavar="LOGDIR", help="folder of a run, with its event files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(args)
    with parser.reading():
        run = read_run(options.logdir)
        found = diagnose(LastStep(run), run.alerts(), run.coverage())
    print(json.dumps(found.to_json(), allow_nan=False) if options.json else found)


def report(args: Sequence[str]) -> None:
    """Write and print the scales of runs."""
    parser = _Parser(
        prog="lightning-unitscale report",
        description="Write the scales that a ScaleMonitor logged to TensorBoard as pictures and "
        "as one HTML file that needs no server. Print the table of the last step.",
    )
    parser.add_argument(
        "run_directory", nargs="+", metavar="RUN_DIR", help="folder of a run, with its event files"
    )
    parser.add_argument(
        "--output", default="scale_report", metavar="DIR", help="folder to write to (%(default)s)"
    )
    parser.add_argument("--full", action="store_true", help="print the scales of all tensors")
    options = parser.parse_args(args)
    with parser.reading():
        written = write_report(options.run_directory, options.output, full=options.full)
    for name, table in written.tables.items():
        print(f"{name}\n{table}\n" if len(written.tables) > 1 else f"{table}\n")
    print("\n".join(f"Written: {path}" for path in (*written.pictures, written.page)))
    if written.no_pictures:
        print(f"No picture: {written.no_pictures}", file=sys.stderr)

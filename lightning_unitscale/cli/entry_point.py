"""Run the command line: dispatch a call to a command, which may read finished runs itself."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import NoReturn

from typing_extensions import override

from lightning_unitscale import __version__
from lightning_unitscale.cli.commands import (
    EXIT_INTERRUPTED,
    CommandError,
    UnitScaleCLI,
    is_answer,
    is_own,
)
from lightning_unitscale.cli.fit_in import FitInCLI
from lightning_unitscale.cli.precision import PrecisionCLI
from lightning_unitscale.cli.profiled import ExplainPipelineCLI, ProfileCLI
from lightning_unitscale.precision.diagnosis import diagnose
from lightning_unitscale.tensorboard.divergence import find_divergence
from lightning_unitscale.tensorboard.history import LastStep, read_run
from lightning_unitscale.tensorboard.run_report import write_report

EXIT_DIVERGED = 1
EXIT_BROKEN_PIPE = 141  # that of a program that the signal SIGPIPE ends


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
        a, b = read_run(options.run_a, "RUN_A"), read_run(options.run_b, "RUN_B")
        found = find_divergence(a, b)
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
    parser.add_argument("logdir", metavar="RUN_DIR", help="folder of a run, with its event files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(args)
    with parser.reading():
        run = read_run(options.logdir, "RUN_DIR")
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


_TRACEBACK = "--traceback"

_COMMANDS = {
    "fit": "train, then show the scale of every tensor and the validation loss",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "predict on the prediction data",
    "profile": "predict memory and operations of a training step without running it",
    "fit-in": "find batch, remat budget, precision and shards that fit into a device's memory",
    "precision": "report what low precision costs, matmul by matmul",
    "explain-pipeline": "estimate the costs of pipeline stages without running them",
    "compare": "find where two finished runs diverge: step, tensor, module and direction",
    "diagnose": "summarize a finished run: violations, trends, worst tensors, coverage",
    "report": "show the scales of finished runs as a picture, a page and a table",
}
# These read event files and need no configuration.
_OF_EVENT_FILES = {"compare": compare, "diagnose": summarize, "report": report}
# These only plan, so their refusals are answers for the user.
_PLANNING: dict[str, type[ProfileCLI]] = {
    cli.command: cli for cli in (ProfileCLI, FitInCLI, PrecisionCLI, ExplainPipelineCLI)
}


def main(args: Sequence[str] | None = None) -> None:
    """Run a command, such as `fit` or `profile`."""
    try:
        try:
            _run(args)
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except KeyboardInterrupt:  # except in the training, which handles Ctrl-C itself
        raise SystemExit(EXIT_INTERRUPTED) from None
    except BrokenPipeError as error:
        if not is_own(error):
            raise
        # The reader of our output has ended, such as `head`. Python flushes it again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_BROKEN_PIPE) from None


def _run(args: Sequence[str] | None) -> None:
    """Run a command whose output is read to its end."""
    words = list(sys.argv[1:] if args is None else args)
    shows_traceback = _TRACEBACK in words
    words = [word for word in words if word != _TRACEBACK]
    if words in (["--help"], ["-h"]):
        print(_help())
        return
    if words == ["--version"]:
        print(f"lightning-unitscale {__version__}")
        return
    if not words or (not words[0].startswith("-") and words[0] not in _COMMANDS):
        problem = f"{words[0]}: no such command" if words else "no command"
        raise CommandError(
            f"lightning-unitscale: {problem}. Expected one of {', '.join(_COMMANDS)}. See "
            "lightning-unitscale --help."
        )
    if (command := _OF_EVENT_FILES.get(words[0])) is not None:
        command(words[1:])
        return
    # All of jsonargparse[signatures]: without one of them Lightning fails late or obscurely.
    needed = ("jsonargparse", "docstring_parser", "typeshed_client")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise CommandError(
            f"lightning-unitscale: {', '.join(missing)} not found. The command line needs the "
            "extra `cli`. Run: pip install 'lightning-unitscale[cli]'"
        )
    # A console script has only its own folder on the path. We add the current one, as `python -m`
    # does, so that a configuration can name classes of its project.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if (planning := _PLANNING.get(words[0])) is not None:
            planning(words[1:], run=False).answer()
        else:
            UnitScaleCLI(args=words if shows_traceback or args is not None else None)
    except Exception as error:
        if shows_traceback or not is_answer(error, plans=words[0] in _PLANNING):
            raise
        raise CommandError(f"lightning-unitscale: {error} ({_TRACEBACK} shows where)") from None


def _help() -> str:
    """Return the commands of all parsers. Each parser has only its own."""
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: lightning-unitscale COMMAND ...",
            "",
            "Unit scaling for PyTorch Lightning, from YAML: COMMAND --config FILE",
            "",
            "commands (each with --help):",
            *lines,
            "",
            "options:",
            f"  {'--help':{width}}  show this page",
            f"  {'--version':{width}}  {__version__}",
            f"  {_TRACEBACK:{width}}  with a command: also show the traceback of errors in the "
            "request",
        ]
    )

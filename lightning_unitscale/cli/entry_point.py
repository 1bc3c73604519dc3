"""Run the command line: dispatch the words of a call to a command, and end with its errors."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from lightning_unitscale import __version__
from lightning_unitscale.cli import run_commands
from lightning_unitscale.cli.commands import (
    EXIT_INTERRUPTED,
    ExplainPipelineCLI,
    ProfileCLI,
    UnitScaleCLI,
)
from lightning_unitscale.cli.errors import CommandError, is_answer
from lightning_unitscale.cli.fit_in import FitInCLI
from lightning_unitscale.cli.precision import PrecisionCLI

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
_OF_EVENT_FILES = {
    "compare": run_commands.compare,
    "diagnose": run_commands.summarize,
    "report": run_commands.report,
}
# These only plan, so their refusals are answers for the user.
_PLANNING: dict[str, type[ProfileCLI]] = {
    cli.command: cli for cli in (ProfileCLI, FitInCLI, PrecisionCLI, ExplainPipelineCLI)
}


def main(args: Sequence[str] | None = None) -> None:
    """Run a command, such as `fit` or `profile`."""
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
    except KeyboardInterrupt:  # before or after the training, which handles Ctrl-C itself
        raise SystemExit(EXIT_INTERRUPTED) from None


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

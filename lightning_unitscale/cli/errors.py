"""Put errors of a command into one line, and decide which need no traceback."""

import re
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_unitscale.capture.fallback import Refusal
from lightning_unitscale.capture.step_messages import CaptureError

EXIT_ERROR = 2
_PACKAGE = Path(__file__).resolve().parent.parent
# Lines of jsonargparse's messages that repeat the type or the value.
_REPEATED = re.compile(r"(Does not validate|Subtypes: |Errors:|Given value|Expected a (path|dot) )")
_GIVEN = re.compile(r"^ *Given value: (?!NestedArg)(.*)", re.MULTILINE)
# The form of argument errors: "argument=value: what is wrong. Expected ...".
_ARGUMENT_ERROR = re.compile(r"^[\s-]*(\w+=.*: .*[Ee]xpected .*)", re.MULTILINE)


class CommandError(SystemExit):
    """The end of a command with one line on stderr and exit status 2."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        print(line, file=sys.stderr)
        self.code = EXIT_ERROR


class OneLineParser(LightningArgumentParser):
    """A parser of a configuration whose errors are one line each."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        if not program.startswith("lightning-unitscale"):  # jsonargparse's own, for one class
            program = "lightning-unitscale"
        raise CommandError(f"{program}: {in_one_line(message)}. See {program} --help.")


def in_one_line(message: str) -> str:
    """Return a message of jsonargparse without its repetitions."""
    lines = [line.strip(" -") for line in message.splitlines()]
    kept = dict.fromkeys(
        re.sub(r'^Parser key "(.*?)":', r"\1:", line)
        .replace("Expected a <class 'NoneType'>", "")
        .replace("a typing.Literal", "one of ")
        for line in lines
        if not _REPEATED.match(line)
    )
    text = re.sub(r"a <class '(?:.*\.)?(\w+)'>", r"\1", " ".join(filter(None, kept)))
    begin, *choices = text.split("Expected ")
    text = f"{begin}Expected {' or '.join(map(str.strip, choices))}" if choices else text
    given = None if "Got value" in text else _GIVEN.search(message)
    return text if given is None else f"{text}. Got {given[1]}"


def argument_error(error: Exception) -> str | None:
    """Return the line of an error's text about an argument, or ``None``."""
    complaint = _ARGUMENT_ERROR.search(str(error))
    return None if complaint is None else complaint[1]


def is_answer(error: Exception, *, plans: bool) -> bool:
    """Check whether an error answers the user: the request is wrong or impossible."""
    if isinstance(error, (CaptureError, Refusal, MisconfigurationException)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    place = Path(frames[-1].filename).resolve() if frames else Path()
    if place.name == "accelerator_connector.py":  # Lightning's checks of the Trainer's arguments
        return True
    if not place.is_relative_to(_PACKAGE):  # the user's code or a library
        return False
    if isinstance(error, (ValueError, TypeError)):
        return argument_error(error) is not None
    return plans and isinstance(error, RuntimeError)

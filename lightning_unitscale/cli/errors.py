"""Which errors of a command are answers to the user, and need no traceback."""

import re
import traceback
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_unitscale.capture.fallback import Refusal
from lightning_unitscale.capture.step_messages import CaptureError

_PACKAGE = Path(__file__).resolve().parent.parent
# How errors about an argument read: "argument=value: what is wrong. Expected ...".
_ARGUMENT_ERROR = re.compile(r"^[\s-]*(\w+=.*: .*[Ee]xpected .*)", re.MULTILINE)


def argument_error(error: Exception) -> str | None:
    """Return the line of an error's text that is about an argument; ``None`` without one."""
    complaint = _ARGUMENT_ERROR.search(str(error))
    return None if complaint is None else complaint[1]


def is_answer(error: Exception, *, plans: bool) -> bool:
    """Return whether an error answers the user: what was asked for is wrong, or cannot be had."""
    if isinstance(error, (CaptureError, Refusal)):
        return True
    if not _is_of_package(error):
        return False
    if isinstance(error, (ValueError, TypeError)):
        return argument_error(error) is not None
    return isinstance(error, MisconfigurationException) or (
        plans and isinstance(error, RuntimeError)
    )


def _is_of_package(error: Exception) -> bool:
    """Return whether this package has raised an error, rather than the user's code or a library."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(_PACKAGE)

"""Decide which errors of a command are answers to the user, and need no traceback."""

import re
import traceback
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_unitscale.capture.fallback import Refusal
from lightning_unitscale.capture.step_messages import CaptureError

_PACKAGE = Path(__file__).resolve().parent.parent
# The form of argument errors: "argument=value: what is wrong. Expected ...".
_ARGUMENT_ERROR = re.compile(r"^[\s-]*(\w+=.*: .*[Ee]xpected .*)", re.MULTILINE)


def argument_error(error: Exception) -> str | None:
    """Return the line of an error's text about an argument, or ``None``."""
    complaint = _ARGUMENT_ERROR.search(str(error))
    return None if complaint is None else complaint[1]


def is_answer(error: Exception, *, plans: bool) -> bool:
    """Check whether an error answers the user: the request is wrong or impossible."""
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
    """Check whether this package raised an error, not the user's code or a library."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(_PACKAGE)

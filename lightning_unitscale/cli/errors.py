"""Which errors of a command are answers to the user, and need no traceback."""

import traceback
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def is_of_package(error: Exception) -> bool:
    """Return whether this package has raised an error, rather than the user's code or a library."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(_PACKAGE)

"""How to open a run in TensorBoard: the command, and the address of the Scales tab."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from lightning_unitscale.tensorboard.schema import PLUGIN_NAME

# TensorBoard's own port, unless it is taken.
SCALES_URL: Final = f"http://localhost:6006/#{PLUGIN_NAME}"


def tensorboard_command(logger: Any) -> str:
    """Return the command that shows a run beside the others of its logger.

    It works as it stands in a shell in the current folder, whether or not the environment is
    activated.
    """
    save_dir = getattr(logger, "save_dir", None)
    logdir = Path(logger.log_dir if save_dir is None else save_dir)
    if logdir.resolve() == Path.cwd():  # TensorBoard would search everything that is here
        logdir = Path(getattr(logger, "root_dir", logger.log_dir))
    beside_python = Path(sys.executable).with_name("tensorboard")
    on_path = shutil.which("tensorboard")
    if on_path is not None and Path(on_path).resolve() == beside_python.resolve():
        program = "tensorboard"
    elif beside_python.exists():
        program = shlex.quote(_relative_to_cwd(beside_python))
    else:
        program = f"{shlex.quote(sys.executable)} -m tensorboard.main"
    return f"{program} --logdir {shlex.quote(_relative_to_cwd(logdir))}"


def _relative_to_cwd(path: Path) -> str:
    """The path as a person in the current folder would type it; absolute if it is elsewhere."""
    absolute = Path(os.path.abspath(path))  # keeps symbolic links, which environments consist of
    cwd = Path.cwd()
    return str(absolute.relative_to(cwd) if absolute.is_relative_to(cwd) else absolute)

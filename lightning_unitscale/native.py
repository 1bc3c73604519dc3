"""Compiles a C file of this package when it is first needed, and loads it.

It is compiled for this processor, into a temporary folder, so it leaves nothing behind and never
loads anything stale. Without a C compiler there is no library, and the caller has another way.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# From the best to the plainest; the next is tried when a compiler or a processor lacks one.
TARGETS: Final[tuple[tuple[str, ...], ...]] = (
    ("-march=native", "-mprefer-vector-width=512"),
    ("-mcpu=native",),
    (),
)
_FLAGS: Final = ("-O3", "-std=c11", "-fPIC")
_TIMEOUT_SECONDS: Final = 60
_log = logging.getLogger(__name__)


def first_that_compiles(
    source: Path, targets: Sequence[Sequence[str]], flags: Sequence[str] = ()
) -> ctypes.CDLL | None:
    """The library of a C file for the first target that the compiler and the system take.

    Args:
        source: The C file.
        targets: Groups of the compiler's flags, in the order in which to try them.
        flags: Flags for all of them, beside ``-O3 -std=c11 -fPIC``.

    Returns:
        The library, or ``None`` without a compiler (``CC``, ``cc``, ``gcc`` or ``clang``).
    """
    compiler = (
        shlex.split(os.environ.get("CC", ""))
        or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    )
    if not compiler:
        _log.info("%s: no C compiler, the slower way is taken", source.name)
        return None
    with tempfile.TemporaryDirectory(prefix="unitscale_", ignore_cleanup_errors=True) as folder:
        for number, target in enumerate(targets):
            try:
                return compiled(compiler, source, (*flags, *target), Path(folder) / str(number))
            except (OSError, subprocess.SubprocessError) as error:
                command = shlex.join([*compiler, *target])
                _log.info("%s: %s does not compile it, %s", source.name, command, error)
    return None


def compiled(
    compiler: Sequence[str], source: Path, flags: Sequence[str], path: Path
) -> ctypes.CDLL:
    """Compile for one target and load.

    Args:
        compiler: The command.
        source: The C file.
        flags: The compiler's flags, beside ``-O3 -std=c11 -fPIC``.
        path: Where to write, without a suffix.

    Raises:
        OSError: If there is no such compiler, or the library cannot be loaded.
        subprocess.SubprocessError: If it does not compile.
    """
    compiled_object, library = path.with_suffix(".o"), path.with_suffix(".so")
    for arguments in (
        (*_FLAGS, *flags, "-c", source, "-o", compiled_object),
        # No -fopenmp here: it would bring the system's OpenMP, a second set of threads that fights
        # torch's for the cores. Without, the names are found in torch's, or loading fails.
        ("-shared", compiled_object, "-o", library),
    ):
        command = [*compiler, *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_SECONDS)
    return ctypes.CDLL(str(library))

"""The C kernel that makes a statistics row of a CPU tensor in one read.

Separate torch operations read and write the tensor some fifteen times for the same row, and a call
into Python costs as much as the statistics of a hundred thousand elements. The C file is compiled
for this processor when the first row is asked for (0.9 s), into a temporary folder, so it leaves
nothing behind and never loads anything stale. Without a C compiler there is no kernel, and the
caller has torch operations.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from lightning_unitscale.scales.layout import RowLayout

SOURCE = Path(__file__).parent / "csrc" / "cpu_operators.c"
# Only sums may be reordered, which is what makes them vectors; NaN and infinities keep their
# meaning. Not -ffast-math: a library linked with it turns subnormals off for the whole process.
# A square may be added in one instruction, which rounds once instead of twice.
_FLAGS: Final = (
    *("-O3", "-std=c11", "-fPIC"),
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-ffp-contract=fast"),
)
# From the best to the plainest; the next is tried when a compiler or a processor lacks one.
_TARGETS: Final[tuple[tuple[str, ...], ...]] = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-mprefer-vector-width=512"),
    ("-mcpu=native",),
    (),
)
_TIMEOUT_SECONDS: Final = 180  # 0.9 s, on a machine that does nothing else
_ALL_ELEMENTS = 2**62
MAX_CUTS = 48  # as in the C file: sixteen formats
NAMESPACE: Final = "lightning_unitscale"
# Of torch's stable C interface, in the order of ``Torch`` in the C file (checked on 2.11 and 2.13).
TORCH_FUNCTIONS: Final = (
    "aoti_torch_library_init_impl",
    "torch_library_impl",
    "torch_call_dispatcher",
    "torch_list_size",
    "torch_list_get_item",
    "torch_delete_list",
    "torch_string_length",
    "torch_string_c_str",
    "torch_delete_string",
    "torch_get_num_threads",
    "aoti_torch_get_dtype",
    "aoti_torch_get_numel",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_data_ptr",
    "aoti_torch_empty_strided",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_dtype_float32",
    "aoti_torch_dtype_bfloat16",
    "aoti_torch_dtype_float16",
    "aoti_torch_dtype_float64",
    "aoti_torch_device_type_cpu",
)
_log = logging.getLogger(__name__)
_added: set[str] = set()
_lock = threading.Lock()


def is_available() -> bool:
    """Whether torch calls the kernel; compiles it when asked for the first time."""
    return _library() is not None


def add_new_layout(layout: RowLayout) -> bool:
    """Give the kernel a layout that it lacks; returns whether it lacked it and has it now."""
    library = _library()
    if library is None or layout.key in _added:
        return False
    _added.add(layout.key)
    return add_layout(library, layout)


def _library() -> ctypes.CDLL | None:
    with _lock:  # a backward pass has a thread of its own
        return _compiled()


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    library = _compile_for_this_processor()
    return library if library is not None and register(library, NAMESPACE) else None


def _compile_for_this_processor() -> ctypes.CDLL | None:
    compiler = (
        shlex.split(os.environ.get("CC", ""))
        or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    )
    if not compiler:
        _log.info("%s: no C compiler, torch operations take its place", SOURCE.name)
        return None
    for target in _TARGETS:
        try:
            return compile_kernel(target, compiler)
        except (OSError, subprocess.SubprocessError) as error:
            command = shlex.join([*compiler, *target])
            _log.info("%s: %s does not compile it, %s", SOURCE.name, command, error)
    return None


def compile_kernel(target: Sequence[str], compiler: Sequence[str] = ("cc",)) -> ctypes.CDLL:
    """Compile the kernel for one kind of processor and load it.

    Args:
        target: The compiler's flags for the processor.
        compiler: The compiler's command.

    Raises:
        OSError: If there is no such compiler, or the library cannot be loaded.
        subprocess.SubprocessError: If it does not compile.
    """
    with tempfile.TemporaryDirectory(prefix="unitscale_", ignore_cleanup_errors=True) as folder:
        object_file, library = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        for arguments in (
            (*_FLAGS, *target, "-c", SOURCE, "-o", object_file),
            # No -fopenmp here: it would bring the system's OpenMP, a second set of threads that
            # fights torch's for the cores. Without, the names are found in torch's, or loading
            # fails.
            ("-shared", object_file, "-o", library),
        ):
            command = [*compiler, *map(str, arguments)]
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_SECONDS)
        return ctypes.CDLL(str(library))


def register(library: ctypes.CDLL, namespace: str) -> bool:
    """Let torch's operator of a namespace, on the CPU, call that of a library.

    Args:
        library: The compiled C file.
        namespace: Where ``statistics_row`` is defined.

    Returns:
        Whether torch has all that it takes.
    """
    folder = Path(torch.__file__).parent / "lib"
    name = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}.get(
        sys.platform, "libtorch_cpu.so"
    )
    try:
        loaded = ctypes.CDLL(str(folder / name))  # the one that is loaded: nothing is loaded twice
        functions = [
            ctypes.cast(getattr(loaded, function), ctypes.c_void_p).value
            for function in TORCH_FUNCTIONS
        ]
    except (OSError, AttributeError) as error:
        _log.info(
            "%s: torch lacks what it calls, torch operations take its place: %s", SOURCE.name, error
        )
        return False
    table = (ctypes.c_void_p * len(functions))(*functions)
    return bool(library.unitscale_register(table, namespace.encode()))


def add_layout(library: ctypes.CDLL, layout: RowLayout) -> bool:
    """Give a library a layout; returns whether it takes it."""
    number = len(layout.edges)
    if number > MAX_CUTS:
        return False
    sample_size = _ALL_ELEMENTS if layout.sample_size is None else layout.sample_size
    return bool(
        library.unitscale_add_layout(
            layout.key.encode(),
            (ctypes.c_double * number)(*layout.edges),
            (ctypes.c_float * number)(*layout.fp32_cuts),  # which the library reads as codes
            ctypes.c_int32(number),
            ctypes.c_int64(sample_size if layout.histogram else 0),
            ctypes.c_int64(layout.num_columns),
        )
    )

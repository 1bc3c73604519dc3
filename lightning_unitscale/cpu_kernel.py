"""Compiles ``cpu_operators.c``, which makes statistics rows in one pass over memory.

Separate torch kernels read and write the tensor some fifteen times for the same row, and a call
into Python costs as much as the statistics of a hundred thousand elements. The C file is compiled
when the first row is asked for (0.9 s); without a C compiler there is no kernel, and the caller has
another way.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
import threading
from pathlib import Path
from typing import Final

import torch

from lightning_unitscale import native
from lightning_unitscale.row_layout import RowLayout

SOURCE = Path(__file__).with_name("cpu_operators.c")
# Only sums may be reordered, which is what makes them vectors; NaN and infinities keep their
# meaning. Not -ffast-math: a library linked with it turns subnormals off for the whole process.
# A square may be added in one instruction, which rounds once instead of twice.
FLAGS = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-ffp-contract=fast")
_TARGETS = ((*native.TARGETS[0], "-fopenmp"), *native.TARGETS)
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
_introduced: set[str] = set()
_lock = threading.Lock()


def is_available() -> bool:
    """Whether torch calls the kernel; compiles it when asked for the first time."""
    return _library() is not None


def introduce(layout: RowLayout) -> bool:
    """Make a layout known to the kernel; returns whether it was not known and is now."""
    library = _library()
    if library is None or layout.key in _introduced:
        return False
    _introduced.add(layout.key)
    return add_layout(library, layout)


def _library() -> ctypes.CDLL | None:
    with _lock:  # a backward pass has a thread of its own
        return _compiled()


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    library = native.first_that_compiles(SOURCE, _TARGETS, FLAGS)
    return library if library is not None and register(library, NAMESPACE) else None


def register(library: ctypes.CDLL, namespace: str) -> bool:
    """Let torch's operators of a namespace, on the CPU, call those of a library.

    Args:
        library: The compiled C file.
        namespace: Where ``statistics_row`` and ``statistics_rows`` are defined.

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
            ctypes.cast(getattr(loaded, one), ctypes.c_void_p).value for one in TORCH_FUNCTIONS
        ]
    except (OSError, AttributeError) as error:
        _log.info("%s: torch lacks what it calls, the slower way is taken: %s", SOURCE.name, error)
        return False
    table = (ctypes.c_void_p * len(functions))(*functions)
    return bool(library.unitscale_register(table, namespace.encode()))


def add_layout(library: ctypes.CDLL, layout: RowLayout) -> bool:
    """Make a layout known to a library; returns whether it takes it."""
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

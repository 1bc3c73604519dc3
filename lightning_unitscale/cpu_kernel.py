"""Compiles and calls ``cpu_kernel.c``, which makes a statistics row in one pass over memory.

Separate torch kernels read and write the tensor some fifteen times for the same row. The C file is
compiled when the first row is asked for (0.2 s), for this processor, into a temporary folder, so
it leaves nothing behind and never loads anything stale. Without a C compiler there is no kernel,
and the caller has another way.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_unitscale.row_layout import RowLayout

_SOURCE = Path(__file__).with_suffix(".c")
# Only sums may be reordered, which is what makes them vectors; NaN and infinities keep their
# meaning. Not -ffast-math: a library linked with it turns subnormals off for the whole process.
_FLAGS = (
    "-O3",
    "-std=c11",
    "-fPIC",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
)
# From the best to the plainest; the next is tried when a compiler or a processor lacks one.
_TARGETS = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-mprefer-vector-width=512"),
    ("-mcpu=native",),
    (),
)
_ALL_ELEMENTS = 2**62
MAX_CUTS = 48  # as in the C file: sixteen formats
_TIMEOUT_SECONDS = 60
_SHORTEST_ROW = 16

_log = logging.getLogger(__name__)
_Kernel = Callable[..., int]


def is_available() -> bool:
    """Whether there is a kernel; compiles it when asked for the first time."""
    return _kernel() is not None


def kernel_row(tensor: Tensor, layout: RowLayout, cuts: Sequence[float]) -> Tensor:
    """Statistics row of an FP32 tensor.

    Args:
        tensor: FP32, on the CPU, not empty. A dense tensor is read in the order of memory, whatever
            its strides say, and a slice of one too; anything else is copied first.
        layout: The columns.
        cuts: Thresholds as in ``RowLayout.fp32_cuts``, at most ``MAX_CUTS``.

    Returns:
        Shape ``(layout.num_columns,)``, float64.

    Raises:
        RuntimeError: If there is no kernel (see ``is_available``) or no memory for it.
    """
    kernel = _kernel()
    if kernel is None:
        raise RuntimeError("no C compiler was found: ask is_available() before")
    rows = rows_in_memory(tensor)
    if rows is None:
        tensor = tensor.contiguous()
        rows = tensor.numel(), tensor.numel()
    row = torch.empty(layout.num_columns, dtype=torch.float64)
    sample_size = _ALL_ELEMENTS if layout.sample_size is None else layout.sample_size
    failed = kernel(
        tensor.data_ptr(),
        tensor.numel(),
        *rows,
        _codes(tuple(cuts)),
        len(cuts),
        sample_size if layout.histogram else 0,
        torch.get_num_threads(),
        row.data_ptr(),
    )
    if failed:
        raise RuntimeError(f"no memory for the statistics of {tensor.numel()} elements")
    return row


def rows_in_memory(tensor: Tensor) -> tuple[int, int] | None:
    """How the elements lie in memory, from the first one on, in any order.

    Returns:
        How many are next to each other, and how far apart the beginnings of such rows are, the same
        number for a dense tensor; ``None`` if there are no such numbers, or the rows are short.
    """
    numel = tensor.numel()
    if tensor.is_contiguous():
        return numel, numel
    length, gap, end = 1, 0, 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if not gap and step == length:
            length *= size  # still next to each other
        elif not gap and step > length:
            gap, end = step, step * size  # the first dimension with gaps
        elif gap and step == end:
            end *= size
        else:
            return None
    # Of shorter rows a copy is faster than to gather them.
    return (length, gap or numel) if length >= _SHORTEST_ROW else None


@functools.lru_cache(maxsize=256)
def _codes(cuts: tuple[float, ...]) -> ctypes.Array[ctypes.c_float]:
    """The cuts as an array of floats, which the kernel reads as integers."""
    return (ctypes.c_float * len(cuts))(*cuts)


@functools.cache
def _kernel() -> _Kernel | None:
    compiler = (
        shlex.split(os.environ.get("CC", ""))
        or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    )
    if not compiler:
        _log.info("No C compiler: statistics are taken by torch's and NumPy's own kernels.")
        return None
    with tempfile.TemporaryDirectory(prefix="unitscale_", ignore_cleanup_errors=True) as folder:
        for number, target in enumerate(_TARGETS):
            try:
                return _compiled(compiler, target, Path(folder) / str(number))
            except (OSError, subprocess.SubprocessError, AttributeError) as error:
                _log.info("%s %s: no kernel, %s", shlex.join(compiler), " ".join(target), error)
    return None


def _compiled(compiler: Sequence[str], target: Sequence[str], path: Path) -> _Kernel:
    """Compile for one target and load, or raise whatever was in the way."""
    compiled_object, library = path.with_suffix(".o"), path.with_suffix(".so")
    for arguments in (
        (*_FLAGS, *target, "-c", _SOURCE, "-o", compiled_object),
        # No -fopenmp here: it would bring the system's OpenMP, a second set of threads that fights
        # torch's for the cores. Without, the names are found in torch's, or loading fails.
        ("-shared", compiled_object, "-o", library),
    ):
        command = [*compiler, *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_SECONDS)
    kernel = ctypes.CDLL(str(library)).statistics_row_fp32
    pointer, long, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    kernel.argtypes = (pointer, long, long, long, pointer, short, long, short, pointer)
    kernel.restype = ctypes.c_int
    return kernel

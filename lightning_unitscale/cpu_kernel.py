"""Calls ``cpu_kernel.c``, which makes statistics rows in one pass over memory.

Separate torch kernels read and write the tensor some fifteen times for the same row. The C file is
compiled when the first row is asked for (0.9 s); without a C compiler there is no kernel, and the
caller has another way.
"""

from __future__ import annotations

import array
import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_unitscale import native
from lightning_unitscale.row_layout import RowLayout

SOURCE = Path(__file__).with_suffix(".c")
# Only sums may be reordered, which is what makes them vectors; NaN and infinities keep their
# meaning. Not -ffast-math: a library linked with it turns subnormals off for the whole process.
# A square may be added in one instruction, which rounds once instead of twice.
FLAGS = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-ffp-contract=fast")
_TARGETS = ((*native.TARGETS[0], "-fopenmp"), *native.TARGETS)
_ALL_ELEMENTS = 2**62
MAX_CUTS = 48  # as in the C file: sixteen formats
_SHORTEST_ROW = 16

_Kernel = Callable[..., int]


def is_available() -> bool:
    """Whether there is a kernel; compiles it when asked for the first time."""
    return _kernel() is not None


def kernel_rows(tensors: Sequence[Tensor], layout: RowLayout, cuts: Sequence[float]) -> Tensor:
    """Statistics rows of FP32 tensors.

    Args:
        tensors: FP32, on the CPU, not empty. A dense tensor is read in the order of memory,
            whatever its strides say, and a slice of one too; anything else is copied first.
        layout: The columns.
        cuts: Thresholds as in ``RowLayout.fp32_cuts``, at most ``MAX_CUTS``.

    Returns:
        Shape ``(len(tensors), layout.num_columns)``, float64.

    Raises:
        RuntimeError: If there is no kernel (see ``is_available``) or no memory for it.
    """
    found = torch.empty((len(tensors), layout.num_columns), dtype=torch.float64)
    _fill(found, tensors, layout, cuts)
    return found


def kernel_row(tensor: Tensor, layout: RowLayout, cuts: Sequence[float]) -> Tensor:
    """``kernel_rows`` of one tensor, as shape ``(layout.num_columns,)``."""
    # Not kernel_rows(...)[0]: a view costs as much as the row of a small tensor.
    found = torch.empty(layout.num_columns, dtype=torch.float64)
    _fill(found, (tensor,), layout, cuts)
    return found


def _fill(
    found: Tensor, tensors: Sequence[Tensor], layout: RowLayout, cuts: Sequence[float]
) -> None:
    kernel = _kernel()
    if kernel is None:
        raise RuntimeError("no C compiler was found: ask is_available() before")
    described = array.array("q")
    kept = []  # copies have to live until the kernel has read them
    for tensor in tensors:
        rows = rows_in_memory(tensor)
        if rows is None:
            tensor = tensor.contiguous()
            kept.append(tensor)
            rows = tensor.numel(), tensor.numel()
        described.extend((tensor.data_ptr(), tensor.numel(), *rows))
    sample_size = _ALL_ELEMENTS if layout.sample_size is None else layout.sample_size
    failed = kernel(
        described.buffer_info()[0],
        len(tensors),
        _codes(tuple(cuts)),
        len(cuts),
        sample_size if layout.histogram else 0,
        torch.get_num_threads(),
        found.data_ptr(),
        layout.num_columns,
    )
    if failed:
        numel = sum(tensor.numel() for tensor in tensors)
        raise RuntimeError(f"no memory for the statistics of {numel} elements")


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


@functools.lru_cache(maxsize=4096)
def _codes(cuts: tuple[float, ...]) -> ctypes.Array[ctypes.c_float]:
    """The cuts as an array of floats, which the kernel reads as integers."""
    return (ctypes.c_float * len(cuts))(*cuts)


@functools.cache
def _kernel() -> _Kernel | None:
    library = native.first_that_compiles(SOURCE, _TARGETS, FLAGS)
    return None if library is None else kernel_of(library)


def kernel_of(library: ctypes.CDLL) -> _Kernel:
    """The function of the compiled C file."""
    kernel = library.statistics_rows_fp32
    pointer, long, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    kernel.argtypes = (pointer, short, pointer, short, long, short, pointer, long)
    kernel.restype = ctypes.c_int
    return kernel

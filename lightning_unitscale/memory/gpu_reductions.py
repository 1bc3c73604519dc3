"""Size the buffer in which blocks of a CUDA reduction combine their partial sums.

A reduction with few results splits each of them over several blocks of threads, which exchange
their partial sums in memory. The rules are those of ``setReduceConfig`` and ``global_memory_size``
of torch 2.13's ``aten/src/ATen/native/cuda/Reduce.cuh``, on the dimensions as ``TensorIterator``
orders and joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, gcd, prod
from typing import Any, NamedTuple

from torch import Tensor

from lightning_unitscale.memory.gpus import GPU

_WARP = 32
_MAX_THREADS = 512
_VECTOR = 4  # elements that a thread reads at once
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # that a thread sums
_MAX_OFFSET = 2**31 - 1  # in bytes; larger tensors are reduced in halves
# A variance's partial sums are Welford's: a mean, a sum of squares and two counts.
WELFORD_BYTES = 16


class _Dim(NamedTuple):
    size: int
    stride: int  # in the input


def reduction_bytes(gpu: GPU, tensor: Tensor, dims: Sequence[int], partial_bytes: int = 0) -> int:
    """Return the bytes of the buffer for partial sums.

    Args:
        gpu: The GPU, whose number of threads decides how far a sum is split.
        tensor: The tensor that is reduced.
        dims: The dimensions that are reduced, or none for all.
        partial_bytes: Bytes of a partial result, by default those of FP32 for 16-bit types.
    """
    reduced = {dim % tensor.dim() for dim in dims} if dims else set(range(tensor.dim()))
    all_dims = [
        _Dim(int(n), int(step)) for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    if 0 in tensor.shape or not all_dims:
        return 0
    all_dims = _addressable(all_dims, tensor.element_size())
    inner = _joined(dim for index, dim in enumerate(all_dims) if index in reduced)
    outer = _joined(dim for index, dim in enumerate(all_dims) if index not in reduced)
    size = partial_bytes or max(4, tensor.element_size())
    return size * _num_partial_sums(gpu, inner, outer)


def _num_partial_sums(gpu: GPU, inner: list[_Dim], outer: list[_Dim]) -> int:
    """Return how many partial sums wait in memory for the last block of each result."""
    num_inputs = prod(dim.size for dim in inner)
    num_outputs = prod(dim.size for dim in outer)
    along_rows = bool(inner) and (not outer or inner[0].stride < outer[0].stride)
    width, height = (num_inputs, num_outputs) if along_rows else (num_outputs, num_inputs)
    vector = 1
    if along_rows and inner[0].stride == 1:
        if len(inner) == 1 and width >= 128:
            width //= _VECTOR
    elif not along_rows and outer and outer[0].stride == 1:
        others = [dim.stride for dim in (*inner, *outer[1:])]
        vector = gcd(_VECTOR, outer[0].size, *others)
        width //= vector
    limit = _MAX_THREADS // vector
    most_wide, most_high = (min(limit, _power_below(size)) for size in (width, height))
    block_height = min(most_high, limit // min(most_wide, _WARP))
    block_width = min(most_wide, limit // block_height)
    step = block_width if along_rows else 1
    values = ceil(num_inputs / step)
    if values < min(16 * block_height, _MOST_VALUES):
        return 0
    values = ceil(num_inputs / (step * block_height))
    blocks = ceil(num_outputs // vector / (1 if along_rows else block_width))
    threads = block_width * block_height
    wanted = gpu.num_multiprocessors * (gpu.threads_per_multiprocessor // threads)
    if values < _MOST_VALUES or blocks > wanted:
        return 0
    parts = max(
        min(ceil(wanted / blocks), ceil(values / _FEWEST_VALUES)), ceil(values / _MOST_VALUES)
    )
    if parts == 1:
        return 0
    return num_outputs * parts * (1 if along_rows else block_width * vector)


def _power_below(size: int) -> int:
    return 1 << max(0, size.bit_length() - 1)


def _joined(dims: Iterable[_Dim]) -> list[_Dim]:
    """Order dimensions by stride, and join those that follow each other in memory."""
    joined: list[_Dim] = []
    for dim in sorted(
        (dim for dim in dims if dim.size > 1), key=lambda dim: (dim.stride, dim.size)
    ):
        if joined and joined[-1].size * joined[-1].stride == dim.stride:
            joined[-1] = _Dim(joined[-1].size * dim.size, joined[-1].stride)
        else:
            joined.append(dim)
    return joined


def _addressable(dims: list[_Dim], item_bytes: int) -> list[_Dim]:
    """Halve the widest dimension until offsets fit 32 bits, as ``with_32bit_indexing`` does."""

    def extent(dim: _Dim) -> int:
        return (dim.size - 1) * dim.stride * item_bytes

    dims = list(dims)
    while sum(map(extent, dims)) + 1 > _MAX_OFFSET:
        widest = max(range(len(dims)), key=lambda index: extent(dims[index]))
        dims[widest] = dims[widest]._replace(size=dims[widest].size // 2)
    return dims


def buffer_of(dims: int, partial_bytes: int = 0) -> Callable[[GPU, Sequence[Any], Any], int]:
    """Count the buffer of a reduction, whose argument number ``dims`` has its dimensions."""
    return lambda gpu, args, _: reduction_bytes(gpu, args[0], _dims_of(args, dims), partial_bytes)


def _dims_of(args: Sequence[Any], position: int) -> tuple[int, ...]:
    dims = args[position] if len(args) > position else None
    if isinstance(dims, bool) or dims is None:
        return ()
    return (dims,) if isinstance(dims, int) else tuple(dims)

"""Estimate the memory that a CUDA kernel allocates while it runs.

The formulas come from torch 2.13's sources, and for cuDNN's attention from cudnn-frontend 1.22's,
which are named with each formula.

A reduction with few results splits each of them over several blocks of threads, which exchange
their partial sums in memory. The size of that buffer follows ``setReduceConfig`` and
``global_memory_size`` of ``aten/src/ATen/native/cuda/Reduce.cuh``, on the dimensions as
``TensorIterator`` orders and joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_unitscale.memory import gpu_kernels, operator_bytes
from lightning_unitscale.memory.gpus import GPU

Formula = Callable[[GPU, Sequence[Any], Any], int]
"""Formula for one call, from the GPU, its positional arguments and its result."""
# EmbeddingBackwardKernel.cu: rows of the gradient that one thread adds, and the number of indices
# up to which they are not sorted (Embedding.cu).
_ROWS_PER_THREAD = 10
_UNSORTED_INDICES = 3072
# Reduce.cuh.
_WARP = 32
_MAX_THREADS = 512
_VECTOR = 4  # elements that a thread reads at once
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # that a thread sums
_MAX_OFFSET = 2**31 - 1  # in bytes; larger tensors are reduced in halves
# A variance's partial sums are Welford's: a mean, a sum of squares and two counts.
_WELFORD_BYTES = 16
_REDUCTIONS = ("sum", "mean", "prod", "nansum", "amax", "amin", "logsumexp")


def cuda_workspace_bytes(gpu: GPU, function: Any, args: Sequence[Any], result: Any) -> int:
    """Return the most bytes alive in one call of an operator beyond its arguments and results."""
    formula = _FORMULAS.get(getattr(function, "overloadpacket", function))
    return 0 if formula is None else max(0, int(formula(gpu, args, result)))


def _flash_backward(gpu: GPU, args: Sequence[Any], result: Any) -> int:
    """Count the gradient of the query in FP32, a number per row, and copies for grouped heads.

    References:
        Dao (2023), "FlashAttention-2", section 3.1.2. Lengths are rounded to the kernel's tiles.
    """
    grad, query, key, value = args[:4]
    batch, heads, length, depth = map(int, query.shape)
    length = ceil(length / 128) * 128
    rounded_depth = ceil(depth / 32) * 32
    shared = 0
    if int(key.shape[1]) != heads:
        per_head = batch * heads * int(key.shape[2]) * query.element_size()
        shared = per_head * (depth + int(value.shape[3]))
    return 4 * batch * heads * length * (rounded_depth + 1) + shared + _turned(grad)


def _cudnn_backward(gpu: GPU, args: Sequence[Any], result: Any) -> int:
    """Count the gradient of the query in FP32, and a sum per row.

    References:
        cudnn-frontend, ``node/scaled_dot_product_flash_attention.h``: ``dQ_accum``,
        ``softmax_sum``. The gradients of grouped heads are added within the kernel.
    """
    query = args[1]
    batch, heads, length, depth = map(int, query.shape)
    return 4 * batch * heads * length * (depth + 1)


def _convolution(gpu: GPU, args: Sequence[Any], result: Any) -> int:
    """Count images, weights and result in the layout of tensor cores, with channels last.

    References:
        NVIDIA, "Convolutional Layers User's Guide", section "Tensor Layouts In Memory: NCHW vs
        NHWC": with other layouts cuDNN transposes within the call, in its workspace. The same holds
        for FP32, whose convolutions run in TF32 by default (``torch.backends.cudnn.allow_tf32``).
    """
    images, weight = args[:2]
    if not _is_turned(gpu, images, weight, args[8]):
        return 0
    return _channels_last(images) + _channels_last(weight) + _channels_last(result)


def _convolution_backward(gpu: GPU, args: Sequence[Any], result: Any) -> int:
    """Count the layouts of :func:`_convolution` for the images' gradient, then for the weights'."""
    grad, images, weight, mask = args[0], args[1], args[2], args[10]
    copied = operator_bytes.copy_of(grad) if images.is_contiguous() else 0
    if not _is_turned(gpu, images, weight, args[9]):
        return copied
    size = _channels_last(images) + _channels_last(weight) + _channels_last(grad)
    # The images' gradient is complete before that of the weights is allocated.
    first = size - operator_bytes.bytes_of(weight) if mask[0] and mask[1] else size
    return copied + (size if mask[1] else first if mask[0] else 0)


def _is_turned(gpu: GPU, images: Tensor, weight: Tensor, groups: int) -> bool:
    """Check whether a convolution runs on tensor cores and its images have another layout."""
    if images.dim() < 3 or not images.is_contiguous():
        return False
    if groups > 1 and groups == int(images.shape[1]):  # torch's own kernel, conv_depthwise2d
        return False
    if images.element_size() >= 4:
        return gpu.capability >= (8, 0) and torch.backends.cudnn.allow_tf32
    return gpu.capability >= (7, 0)


def _channels_last(tensor: Tensor) -> int:
    """Return the bytes of a copy whose channels are aligned to 16 bytes."""
    count, channels, *positions = map(int, tensor.shape)
    aligned = 16 // tensor.element_size()
    padded = ceil(channels / aligned) * aligned
    return count * padded * prod(positions) * tensor.element_size()


class _Tiles(NamedTuple):
    """Tiles of a kernel of ``mem_eff_attention/kernels/cutlassB.h``."""

    num_queries: int
    num_keys: int
    max_depth: int


# Listed in the order in which torch tries them. FP32 tiles of 128 queries need more shared memory
# than GPUs of capabilities 8.6 and 8.9 have.
_FP32_TILES = (_Tiles(64, 64, 32), _Tiles(64, 64, 64), _Tiles(128, 64, 128), _Tiles(128, 64, 65536))
_FP32_SMALL_TILES = (_Tiles(64, 64, 65536),)
_HALF_TILES = (_Tiles(64, 64, 64), _Tiles(128, 128, 128), _Tiles(128, 64, 65536))
_HALF_SMALL_TILES = (_Tiles(64, 64, 64), _Tiles(128, 64, 96), _Tiles(64, 64, 65536))
_LARGE_SHARED_BYTES = 160 * 1024


def _efficient_backward(gpu: GPU, args: Sequence[Any], result: Any) -> int:
    """Count sums of gradient times output, then tiles of the query's gradient in FP32.

    References:
        torch, ``cuda/attention_backward.cu`` and ``mem_eff_attention/kernel_backward.h``:
        ``delta``, ``workspace_size``.
    """
    grad, query, key, value = args[:4]
    batch, heads, length, depth = map(int, query.shape)
    value_depth, is_half = int(value.shape[3]), query.element_size() < 4
    has_room = gpu.shared_bytes > _LARGE_SHARED_BYTES
    fp32 = _FP32_TILES if has_room else _FP32_SMALL_TILES
    half = _HALF_TILES if has_room else _HALF_SMALL_TILES
    widest = max(depth, value_depth)
    tiles = next(each for each in (half if is_half else fp32) if widest <= each.max_depth)
    sums = 4 * batch * heads * length
    # FP32 kernels get the sums from elementwise operators: a product, its sum, and a copy of it.
    product = 0 if is_half else 4 * batch * heads * length * value_depth + sums
    blocks = ceil(length / tiles.num_queries) * ceil(depth / tiles.num_keys)
    per_head = blocks * (4 * tiles.num_queries * tiles.num_keys + 16)
    if is_half and tiles.max_depth > tiles.num_queries:
        splits = _key_splits(batch * heads, int(key.shape[2]), tiles.num_keys)
        widths = sum(ceil(each / tiles.num_queries) * tiles.num_queries for each in (depth, widest))
        per_head += 4 * splits * tiles.num_keys * widths
    return _turned(grad) + max(product, sums + batch * heads * per_head)


def _key_splits(num_blocks: int, num_keys: int, tile: int) -> int:
    splits = ceil(num_keys / tile)
    if num_blocks >= 256 and num_keys <= 2 * tile:
        splits = 1
    return max(1, min(splits, 200 // num_blocks))


def _turned(tensor: Tensor) -> int:
    """Return the bytes of a copy with the heads within each position, or 0 if it is not needed."""
    return operator_bytes.copy_of(tensor.transpose(1, 2))


def _embedding_backward(gpu: GPU, args: Sequence[Any], result: Any) -> int:
    """Count sorted indices, and sums of the gradients of parts of them in FP32.

    References:
        torch, ``native/cuda/Embedding.cu`` and ``EmbeddingBackwardKernel.cu``.
    """
    grad, indices, num_rows = args[:3]
    count = int(indices.numel())
    copies = operator_bytes.copy_of(grad)
    if count <= _UNSORTED_INDICES and args[3] < 0:
        return copies
    parts = min(count, int(num_rows)) + count // _ROWS_PER_THREAD
    # Keys and values, sorted, and as many for cub's radix sort.
    indices_bytes = 4 * 8 * count
    return copies + indices_bytes + 4 * parts * int(grad.shape[-1])


def _index_put(gpu: GPU, args: Sequence[Any], result: Any) -> int:
    """Count linear indices, positions and both sorted, and contiguous values, of a sum.

    References:
        torch, ``native/cuda/Indexing.cu``, ``index_put_with_sort_kernel``.
    """
    is_sum = len(args) > 3 and args[3]
    indices = [index for index in args[1] if index is not None]
    if not is_sum or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return 0
    shape = torch.broadcast_shapes(*(tuple(map(int, index.shape)) for index in indices))
    # Keys and values, sorted, and as many for cub's radix sort.
    return 6 * 8 * prod(shape) + operator_bytes.copy_of(args[2])


def _plain(formula: Callable[[Sequence[Any], Any], int]) -> Formula:
    """Take a formula that does not depend on the GPU."""
    return lambda gpu, args, result: formula(args, result)


class _Dim(NamedTuple):
    size: int
    stride: int  # in the input


def reduction_bytes(gpu: GPU, tensor: Tensor, dims: Sequence[int], partial_bytes: int = 0) -> int:
    """Return the bytes of the buffer for partial sums over some dimensions, or none for all."""
    # A partial result has ``partial_bytes``, by default those of FP32 for 16-bit types.
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


def _buffer_of(dims: int, partial_bytes: int = 0) -> Formula:
    """Count the buffer of a reduction, whose argument number ``dims`` has its dimensions."""
    return lambda gpu, args, _: reduction_bytes(gpu, args[0], _dims_of(args, dims), partial_bytes)


def _dims_of(args: Sequence[Any], position: int) -> tuple[int, ...]:
    dims = args[position] if len(args) > position else None
    if isinstance(dims, bool) or dims is None:
        return ()
    return (dims,) if isinstance(dims, int) else tuple(dims)


_FORMULAS: dict[Any, Formula] = operator_bytes.by_operator(
    {
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
        "_cudnn_rnn": _plain(gpu_kernels.forward_workspace),
        "_cudnn_rnn_backward": _plain(gpu_kernels.backward_workspace),
        "embedding_dense_backward": _embedding_backward,
        **dict.fromkeys(
            ("index_put", "index_put_", "_index_put_impl", "_index_put_impl_"), _index_put
        ),
        **dict.fromkeys(_REDUCTIONS, _buffer_of(1)),
        **dict.fromkeys(("linalg_vector_norm", "norm"), _buffer_of(2)),
        **dict.fromkeys(("var", "var_mean", "std", "std_mean"), _buffer_of(1, _WELFORD_BYTES)),
        **dict.fromkeys(("mse_loss", "smooth_l1_loss"), _plain(operator_bytes.reduced_loss)),
        # SoftMax.cu and layer_norm_kernel.cu read contiguous tensors.
        **dict.fromkeys(
            ("_softmax", "_log_softmax", "native_layer_norm"), _plain(operator_bytes.copies_of(0))
        ),
        **dict.fromkeys(
            ("_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm_backward"),
            _plain(operator_bytes.copies_of(0, 1)),
        ),
    }
)

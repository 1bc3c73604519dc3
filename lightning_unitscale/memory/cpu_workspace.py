"""Estimate the memory that a CPU's kernel allocates while it runs.

The formulas come from the allocator's events of single operators (torch 2.13, AVX-512). oneDNN
blocks channels by the width of the machine's vectors and tiles 16-bit matmuls by its own rules, so
its copies may differ a little elsewhere. Where it has no 16-bit matmuls (AVX2), torch's own run,
which allocate nothing. ``cuda_workspace.py`` has those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod
from typing import Any, TypeVar

import torch
from torch import Tensor

aten = torch.ops.aten
T = TypeVar("T")
Formula = Callable[[Sequence[Any], Any], int]
"""Formula for one call, from its positional arguments and its result."""
# oneDNN groups as many channels as an AVX-512 register has floats.
_CHANNEL_BLOCK = 16
# Up to this many channels are read from the plain layout.
_PLAIN_CHANNELS = 3
_SCRATCH_ALIGNMENT = 128
# For one filter per channel on channels-last images: with more taps in a row than this, the
# gradient of the weights is the sum of this many partial ones, for any batch and thread count.
_DEPTHWISE_TAPS = 3
_DEPTHWISE_COPIES = 257
_REDUCED_TILES_BYTES = 258 * 1024
# Keys that the CPU's attention kernel takes at a time.
_KEY_BLOCK = 512


def cpu_workspace_bytes(function: Any, args: Sequence[Any], result: Any) -> int:
    """Return the most bytes alive in one call of an operator beyond its arguments and results."""
    formula = _CPU.get(getattr(function, "overloadpacket", function))
    return 0 if formula is None else max(0, int(formula(args, result)))


def bytes_of(tensor: Tensor | None) -> int:
    """Return the bytes of a tensor's elements."""
    return 0 if tensor is None else prod(map(int, tensor.shape)) * tensor.element_size()


def copy_of(tensor: Tensor) -> int:
    """Return the bytes of the kernel's contiguous copy, or 0 if the tensor is contiguous."""
    return 0 if tensor.is_contiguous() else bytes_of(tensor)


def copies_of(*positions: int) -> Formula:
    """Count the contiguous copies of some arguments."""
    return lambda args, _: sum(copy_of(args[position]) for position in positions)


def _layer_norm_backward(args: Sequence[Any], result: Any) -> int:
    """Count sums of the gradients of gain and bias, one pair per thread."""
    sums = 2 * prod(args[2]) * args[0].element_size() * torch.get_num_threads()
    return sums + copy_of(args[0]) + copy_of(args[1])


def _safe_softmax(args: Sequence[Any], result: Any) -> int:
    """Count a mask of minus infinity, and one of rows that contain nothing else."""
    (scores, dim) = args[:2]
    count = prod(map(int, scores.shape))
    return count + count // max(1, int(scores.shape[dim]))


def _is_channels_last(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def _blocked(tensor: Tensor) -> int:
    """Return the bytes of an image in oneDNN's own layout, or 0 if it reads the image directly."""
    batch, channels, *positions = map(int, tensor.shape)
    if channels <= _PLAIN_CHANNELS:
        return 0
    if channels > _CHANNEL_BLOCK:
        channels = ceil(channels / _CHANNEL_BLOCK) * _CHANNEL_BLOCK
    return batch * channels * prod(positions) * tensor.element_size()


def _convolution(args: Sequence[Any], result: Any) -> int:
    images, weight, groups = args[0], args[1], args[8]
    if _is_channels_last(images):
        return bytes_of(weight) * (1 if groups > 1 else 2)
    inputs = _blocked(images) + bytes_of(weight) + _thinned(args[4], weight, result)
    output = _blocked(result)
    return max(inputs + output, output + bytes_of(result)) - bytes_of(result)


def _thinned(stride: Sequence[int], weight: Tensor, output: Tensor) -> int:
    """Count, per thread, the positions of one image that a strided 1 x 1 convolution reads."""
    if max(stride) == 1 or prod(map(int, weight.shape[2:])) > 1:
        return 0
    positions = prod(map(int, output.shape[2:]))
    one_image = int(weight.shape[1]) * positions * weight.element_size()
    return (one_image + _SCRATCH_ALIGNMENT) * torch.get_num_threads()


def _convolution_backward(args: Sequence[Any], result: Any) -> int:
    """Count the gradient of the input, then those of weight and bias, then their plain copies."""
    grad, images, weight, mask = args[0], args[1], args[2], args[10]
    if _is_channels_last(images):
        is_depthwise = args[9] > 1 and int(weight.shape[1]) == 1
        if is_depthwise and int(weight.shape[-1]) > _DEPTHWISE_TAPS:
            bias = int(weight.shape[0]) * weight.element_size() if mask[2] else 0
            return _DEPTHWISE_COPIES * bytes_of(weight) + bias
        return 3 * bytes_of(weight)
    blocked = _blocked(grad) + _blocked(images)
    thinned = _thinned(args[4], weight, grad)
    first = second = third = returned = 0
    if mask[0]:
        returned = bytes_of(images)
        # With strides the gradient leaves oneDNN's layout by a third copy.
        copies = 2 if max(args[4]) > 1 and args[9] == 1 else 1
        first = max(blocked + bytes_of(weight) + thinned, copies * _blocked(images) + returned)
    if mask[1]:
        bias = int(weight.shape[0]) * weight.element_size() if mask[2] else 0
        second = returned + blocked + bytes_of(weight) + bias + thinned
        returned += bytes_of(weight) + bias
        third = returned + bytes_of(weight) + bias + copy_of(grad)
    return max(first, second, third) - returned


def _runs_in_onednn(dtype: torch.dtype) -> bool:
    """Check that this machine's oneDNN has matmuls of a 16-bit type; torch's own take no memory."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    query = getattr(torch.ops.mkldnn, name[dtype], None) if dtype in name else None
    return query is not None and bool(query())


def _reduced_matmul(args: Sequence[Any], result: Any) -> int:
    """Count tiles of a 16-bit matmul in oneDNN's own layout, roughly for large operands."""
    if not _runs_in_onednn(result.dtype):
        return 0
    operands = [value for value in args if isinstance(value, Tensor) and value.dim() > 1]
    return min(sum(map(bytes_of, operands)) + 2 * bytes_of(result), _REDUCED_TILES_BYTES)


def _score_tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    length, keys = int(query.shape[2]), int(key.shape[2])
    block = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(block, length), min(_KEY_BLOCK, keys)


def _cpu_attention(args: Sequence[Any], result: Any) -> int:
    """Count, per thread, tiles of scores and of the result, maxima and sums, in FP32."""
    query, (rows, columns) = args[0], _score_tile(args[0], args[1])
    numbers = rows * columns + 2 * rows + rows * int(query.shape[3])
    reduced = rows * columns * query.element_size() if query.element_size() < 4 else 0
    return (4 * numbers + reduced) * torch.get_num_threads()


def _cpu_attention_backward(args: Sequence[Any], result: Any) -> int:
    """Count, per thread, two tiles of scores and a row sum."""
    rows, columns = _score_tile(args[1], args[2])
    return 4 * (2 * rows * columns + rows) * torch.get_num_threads()


def by_operator(formulas: Mapping[str, T]) -> dict[Any, T]:
    """Key formulas by ATen operator. No version of torch has them all."""
    return {
        getattr(aten, name): formula for name, formula in formulas.items() if hasattr(aten, name)
    }


_CPU = by_operator(
    {
        **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _reduced_matmul),
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
        # Two more statistics per channel.
        **dict.fromkeys(
            ("native_batch_norm", "_native_batch_norm_legit_functional"),
            lambda args, _: 2 * int(args[0].shape[1]) * args[0].element_size(),
        ),
        # A second gradient of the input.
        "native_batch_norm_backward": lambda args, result: bytes_of(result[0]) if args[7] else 0,
        # The input times the mask, before it is scaled.
        "native_dropout": lambda _, result: bytes_of(result[0]),
        # The mask as numbers, then the gradient times it; and the scale twice.
        "native_dropout_backward": lambda _, result: bytes_of(result) + 8 + result.element_size(),
        "native_layer_norm": copies_of(0),
        "native_layer_norm_backward": _layer_norm_backward,
        "_safe_softmax": _safe_softmax,
        **dict.fromkeys(("_softmax", "_log_softmax"), copies_of(0)),
        **dict.fromkeys(
            ("_softmax_backward_data", "_log_softmax_backward_data", "embedding_dense_backward"),
            copies_of(0, 1),
        ),
        "embedding": copies_of(1),
        **dict.fromkeys(
            ("upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
            lambda args, result: copy_of(args[0]) and bytes_of(args[0]) + bytes_of(result),
        ),
        "_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
    }
)

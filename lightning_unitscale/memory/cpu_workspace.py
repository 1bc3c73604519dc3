"""Estimate the memory that a CPU's kernel allocates while it runs.

The formulas come from the allocator's events of single operators (torch 2.13). oneDNN tiles 16-bit
matmuls by its own rules. Where it has none (AVX2), torch's own run, which allocate nothing.
``cuda_workspace.py`` has the formulas of a GPU.

Convolutions run in oneDNN or in torch's own kernels (``ConvParams::use_mkldnn`` of
``native/Convolution.cpp``). Torch's own write the patches of all images into columns
(``native/ConvolutionMM2d.cpp``, ``NaiveDilatedConvolution.cpp``,
``NaiveConvolutionTranspose2d.cpp``, ``Convolution`` of 3-D). oneDNN's depend on the width of the
machine's vectors: those of AVX-512 are below, and those of AVX2 in ``avx2_convolution.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.functional.rules import tuple_of
from lightning_unitscale.memory import avx2_convolution
from lightning_unitscale.memory.operator_bytes import (
    by_operator,
    bytes_of,
    copies_of,
    copy_of,
    has_channels_last,
    is_channels_last,
    reduced_loss,
    turned_bytes,
)

_CHANNEL_BLOCK = 16  # oneDNN groups as many channels as an AVX-512 register has floats
# Up to this many channels are read from the plain layout.
_PLAIN_CHANNELS = 3
_SCRATCH_ALIGNMENT = 128
_VOLUME = 5  # dimensions of a batch of volumes
# For one filter per channel on channels-last images: with more taps in a row than this, the
# gradient of the weights is the sum of this many partial ones, for any batch and thread count.
_DEPTHWISE_TAPS = 3
_DEPTHWISE_COPIES = 257
# Below this batch torch's own kernel for filters of one tap is faster in one thread, and below this
# number of elements the one for a single image.
_LEAST_IMAGES, _LEAST_ELEMENTS = 16, 20480


def convolution_workspace(args: Sequence[Any], result: Any) -> int:
    """Count the copies and buffers of a forward convolution."""
    args = _with_every_option(args, 3, args[1].dim() - 2)
    if not _takes_onednn(args[0], args[1], *args[3:9]):
        return _columns_forward(args, result)
    return avx2_convolution.forward(args, result) if _has_avx2() else _wide_forward(args, result)


def convolution_backward_workspace(args: Sequence[Any], result: Any) -> int:
    """Count the copies and buffers of a convolution's gradients."""
    args = _with_every_option(args, 4, args[2].dim() - 2)
    if not _takes_onednn(args[1], args[2], *args[4:10]):
        return _columns_backward(args, result)
    return avx2_convolution.backward(args) if _has_avx2() else _wide_backward(args, result)


def _with_every_option(args: Sequence[Any], first: int, num_dims: int) -> list[Any]:
    """Repeat options that have one number for all dimensions, such as ``padding="valid"`` makes."""
    spatial = {first, first + 1, first + 2, first + 4}  # all but whether it is transposed
    return [
        tuple_of(value, num_dims, 0) if at in spatial else value for at, value in enumerate(args)
    ]


def _has_avx2() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def runs_in_onednn(dtype: torch.dtype) -> bool:
    """Check that this machine's oneDNN has matmuls of a 16-bit type; torch's own take no memory."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    query = getattr(torch.ops.mkldnn, name[dtype], None) if dtype in name else None
    return query is not None and bool(query())


def _takes_onednn(
    images: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    is_transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> bool:
    """Check ``use_mkldnn``."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    large = any(more >= step for more, step in zip(output_padding, stride, strict=True))
    if is_transposed and large:
        return False
    if images.dtype != torch.float32:
        return runs_in_onednn(images.dtype)
    batch = int(images.shape[0])
    taps = [int(taps) for taps in weight.shape[2:]]
    is_simple = max(*stride, *dilation, *taps[-2:]) == 1
    if is_simple and batch < _LEAST_IMAGES and torch.get_num_threads() == 1:
        return False
    is_large = len(taps) > 1 and min(taps[-2:]) > 3
    is_large = is_large or prod(map(int, images.shape[:4])) > _LEAST_ELEMENTS
    return groups > 1 or is_large or batch > 1


def _columns_forward(args: Sequence[Any], result: Any) -> int:
    images, weight, groups = args[0], args[1], _split_groups(args[0], args[3:9])
    columns = _column_bytes(images, weight, result, args[3:9], is_free=not args[6])
    if groups == 1:
        return columns + _turned(columns, weight, images)
    # The results of all groups are joined at the end. Channels of one image need no copy.
    copied = bytes_of(images) // groups if int(images.shape[0]) > 1 else 0
    return max(bytes_of(result), copied + columns)


def _columns_backward(args: Sequence[Any], result: Any) -> int:
    grad, images, weight, mask = args[0], args[1], args[2], args[10]
    groups = _split_groups(images, args[4:10])
    # The gradient of 3-D images has columns for any filter.
    is_dense, is_free = max(args[6]) == 1, images.dim() < 5 or not mask[0]
    columns = _column_bytes(
        images, weight, grad, args[4:10], is_whole=is_dense and not args[7], is_free=is_free
    )
    # A sum in 16 bits reads a copy of the gradient in FP32.
    channels = int(weight.shape[1] * args[9] if args[7] else weight.shape[0])
    is_copied = mask[2] and is_dense and grad.element_size() < 4 and not is_channels_last(grad)
    copied = 4 * (grad.numel() + channels) // groups if is_copied else 0
    own = bytes_of(weight) if mask[1] else 0
    if groups == 1:
        return max(columns + _turned(columns, weight, images, grad), copied - own)
    # The gradients of all groups are joined at the end.
    sizes = (bytes_of(images), bytes_of(weight), channels * grad.element_size())
    joined = sum(size for size, needed in zip(sizes, mask, strict=True) if needed)
    split = (bytes_of(images) + bytes_of(grad)) // groups if int(images.shape[0]) > 1 else 0
    return max(joined, split + max(columns, copied - own // groups))


def _turned(columns: int, weight: Tensor, images: Tensor, *others: Tensor) -> int:
    """Return the bytes of copies with channels last, also of the filters for columns."""
    if not has_channels_last(images, weight):
        return 0
    return turned_bytes(images, *others) + (bytes_of(weight) if columns else 0)


def _split_groups(images: Tensor, options: Sequence[Any]) -> int:
    """Return how many groups torch convolves one after the other. Dense volumes go at once."""
    return 1 if images.dim() == _VOLUME and max(options[2]) == 1 and not options[3] else options[5]


def _column_bytes(
    images: Tensor,
    weight: Tensor,
    result: Tensor,
    options: Sequence[Any],
    *,
    is_whole: bool | None = None,
    is_free: bool = True,
) -> int:
    """Return the bytes of the patches of all images, or of one where torch takes them in turn."""
    # Filters of one tap at every position read the images themselves if ``is_free``.
    stride, padding, dilation, is_transposed = options[:4]
    taps = prod(map(int, weight.shape[2:]))
    if is_free and taps == max(*stride, *dilation) == 1 and not any(padding):
        return 0
    is_volume = images.dim() == _VOLUME
    if is_whole is None:
        is_whole = not is_volume if is_transposed else max(dilation) == 1
    batch = int(images.shape[0]) if is_whole else 1
    positions = prod(map(int, (images if is_transposed else result).shape[2:]))
    channels = int(weight.shape[1]) * options[5] // _split_groups(images, options)
    return batch * channels * taps * positions * images.element_size()


def _blocked(tensor: Tensor) -> int:
    """Return the bytes of an image in oneDNN's own layout, or 0 if it reads the image directly."""
    batch, channels, *positions = map(int, tensor.shape)
    if channels <= _PLAIN_CHANNELS:
        return 0
    if channels > _CHANNEL_BLOCK:
        channels = ceil(channels / _CHANNEL_BLOCK) * _CHANNEL_BLOCK
    return batch * channels * prod(positions) * tensor.element_size()


def _wide_forward(args: Sequence[Any], result: Any) -> int:
    images, weight, groups = args[0], args[1], args[8]
    if has_channels_last(images, weight):
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


def _wide_backward(args: Sequence[Any], result: Any) -> int:
    """Count the gradient of the input, then those of weight and bias, then their plain copies."""
    grad, images, weight, mask = args[0], args[1], args[2], args[10]
    if has_channels_last(images, weight):
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


_REDUCED_TILES_BYTES = 258 * 1024
_KEY_BLOCK = 512  # keys that the CPU's attention kernel takes at a time


def cpu_workspace_bytes(function: Any, args: Sequence[Any], result: Any) -> int:
    """Return the most bytes alive in one call of an operator beyond its arguments and results."""
    formula = _CPU.get(getattr(function, "overloadpacket", function))
    return 0 if formula is None else max(0, int(formula(args, result)))


def _layer_norm_backward(args: Sequence[Any], result: Any) -> int:
    """Count sums of the gradients of gain and bias, one pair per thread."""
    sums = 2 * prod(args[2]) * args[0].element_size() * torch.get_num_threads()
    return sums + copy_of(args[0]) + copy_of(args[1])


def _safe_softmax(args: Sequence[Any], result: Any) -> int:
    """Count a mask of minus infinity, and one of rows that contain nothing else."""
    (scores, dim) = args[:2]
    count = prod(map(int, scores.shape))
    return count + count // max(1, int(scores.shape[dim]))


def _reduced_matmul(args: Sequence[Any], result: Any) -> int:
    """Count tiles of a 16-bit matmul in oneDNN's own layout, roughly for large operands."""
    if not runs_in_onednn(result.dtype):
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


_CPU = by_operator(
    {
        **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _reduced_matmul),
        "convolution": convolution_workspace,
        "convolution_backward": convolution_backward_workspace,
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
        **dict.fromkeys(("mse_loss", "smooth_l1_loss"), reduced_loss),
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

"""Estimate what oneDNN's convolutions allocate on a CPU with AVX2, in FP32.

Which kernel runs, its layouts and its scratchpad follow from oneDNN 3.12's ``src/cpu``:
``cpu_convolution_list.cpp`` has the order of kernels, ``x64/jit_avx2_conv_kernel_f32.cpp`` the
direct ones with eight channels in a block, ``x64/jit_brgemm_conv_bwd_utils.cpp`` those of strided
gradients, and ``gemm_convolution_utils.cpp`` the one for all other shapes, with patches in columns.
``ref_deconvolution.hpp`` runs transposed ones. ``ONEDNN_VERBOSE=1`` prints what runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_unitscale.memory.operator_bytes import (
    bytes_of,
    copy_of,
    has_channels_last,
    turned_bytes,
)

_ITEM = 4
_BLOCK = 8  # channels, as a register has floats
_PAGE = 4096
_ALIGNMENT = 128  # of each part of a scratchpad
_BATCH_ITEM = 40  # sizeof(brgemm_batch_element_t)
_WIDEST_PADDING, _WIDEST_REACH = 3, 7  # positions that a direct kernel computes at once
# The scratchpad of columns is limited, in all and by the tensors for each thread. Where patches
# exceed it, this share of it is used.
_MOST_SCRATCH_BYTES, _MOST_SCRATCH = 2**30, 15
_IMAGE_SHARE, _WEIGHT_SHARE = 0.1, 0.05
_VOLUME = 3  # dimensions
_PLAIN_INPUTS = 3  # of images that are read with channels first
_WIDEST_TAPS, _WIDEST_DEPTHWISE_TAPS = 13, 3  # of a row, in the gradient of the weights


class _Shape(NamedTuple):
    """Sizes of one convolution, with the channels of a group."""

    batch: int
    groups: int
    inputs: int
    outputs: int
    size: tuple[int, ...]  # of an image
    result: tuple[int, ...]  # of a result
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def is_depthwise(self) -> bool:
        """Check that there is one filter for each channel of an image, not of a volume."""
        return self.has_one_each and len(self.taps) < _VOLUME

    @property
    def has_one_each(self) -> bool:
        """Check that there is one filter for each channel."""
        return self.groups > 1 and self.inputs == self.outputs == 1

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the filters."""
        return _ITEM * self.groups * self.inputs * self.outputs * prod(self.taps)

    @property
    def image_bytes(self) -> int:
        """Return the bytes of the images."""
        return _ITEM * self.batch * self.groups * self.inputs * prod(self.size)

    @property
    def result_bytes(self) -> int:
        """Return the bytes of the result."""
        return _ITEM * self.batch * self.groups * self.outputs * prod(self.result)

    @property
    def widths(self) -> list[int]:
        """Return the extents of a dilated filter."""
        return [(n - 1) * step + 1 for n, step in zip(self.taps, self.dilation, strict=True)]

    @property
    def is_dense(self) -> bool:
        """Check that filters have no gaps."""
        return all(n == 1 or step == 1 for n, step in zip(self.taps, self.dilation, strict=True))

    @property
    def end_padding(self) -> list[int]:
        """Return the padding behind the images."""
        every = zip(self.result, self.stride, self.widths, self.size, self.padding, strict=True)
        return [(out - 1) * step + wide - (size + pad) for out, step, wide, size, pad in every]

    def blocked(self) -> tuple[int, int, int]:
        """Return the bytes of images, filters and result in blocks of channels."""
        if self.is_depthwise:
            factor = _rounded(self.groups, _BLOCK) / self.groups
            sizes = (self.image_bytes, self.weight_bytes, self.result_bytes)
            images, filters, result = (int(size * factor) for size in sizes)
            return images, filters, result
        if self.groups > 1:
            return self.image_bytes, self.weight_bytes, self.result_bytes
        inputs, outputs = _rounded(self.inputs, _BLOCK), _rounded(self.outputs, _BLOCK)
        filters = _ITEM * inputs * outputs * prod(self.taps)
        images = _ITEM * self.batch * inputs * prod(self.size)
        return images, filters, _ITEM * self.batch * outputs * prod(self.result)


def _shape_of(images: Tensor, weight: Tensor, result: Tensor, options: Sequence[Any]) -> _Shape:
    """Return the sizes. A transposed convolution is the image's gradient of this one."""
    stride, padding, dilation, is_transposed, _, groups = options
    batch, _, *size = map(int, images.shape)
    first, second, *taps = map(int, weight.shape)
    output_size = tuple(map(int, result.shape[2:]))
    if is_transposed:
        size, output_size = list(output_size), tuple(size)
    return _Shape(
        batch, groups, second, first // groups, tuple(size), output_size,
        tuple(taps), tuple(stride), tuple(padding), tuple(dilation),
    )  # fmt: skip


def forward(args: Sequence[Any], result: Tensor) -> int:
    """Count the copies and buffers of a forward convolution."""
    shape = _shape_of(args[0], args[1], result, args[3:9])
    if has_channels_last(args[0], args[1]):
        buffers = 0 if shape.is_depthwise else _batch_bytes(1)
        return (
            turned_bytes(args[0], args[1]) + _filters(shape, shape.inputs, outputs=True) + buffers
        )
    if args[6]:
        return _image_gradient(shape, has_bias=args[2] is not None) - shape.image_bytes
    # The result leaves its layout by a copy.
    return _direct_or_columns(shape, args[2] is not None) - shape.result_bytes


def backward(args: Sequence[Any]) -> int:
    """Count the gradient of the input, then those of weight and bias, then their plain copies."""
    grad, images, weight, mask, is_transposed = args[0], args[1], args[2], args[10], args[7]
    shape = _shape_of(images, weight, grad, args[4:10])
    channels = shape.groups * (shape.inputs if is_transposed else shape.outputs)
    bias = _ITEM * channels if mask[2] else 0
    turned, copies = has_channels_last(images, weight), 1
    first = second = third = returned = 0
    if mask[0]:
        returned = bytes_of(images)
        if turned:
            first = returned + _turned_image_scratch(shape)
        else:
            first = _direct_or_columns(shape, False) if is_transposed else _image_gradient(shape)
    if mask[1]:
        if turned:
            filters, scratch = _turned_weight_scratch(shape, bias)
            copies = 2
        else:
            filters, scratch = _weight_scratch(shape, bias)
            scratch += _ALIGNMENT if is_transposed and not _has_direct_gradient(shape) else 0
        second = returned + filters + bias + scratch
        third = returned + filters + 2 * bias + copies * shape.weight_bytes
        returned += shape.weight_bytes + bias
    copied = turned_bytes(images, weight, grad) if turned else copy_of(grad)
    return max(first, second, third) + copied - returned


def _direct_or_columns(shape: _Shape, has_bias: bool) -> int:
    """Count a convolution with its result."""
    if shape.has_one_each and len(shape.taps) == _VOLUME and max(shape.dilation) == 1:
        # ``brdgmm_dw_convolution_fwd_t`` reads channels last. The result comes back by two copies.
        running = shape.image_bytes + _filters(shape, 1, outputs=True) + shape.result_bytes
        return max(running, 3 * shape.result_bytes)
    if not _is_direct(shape):
        return shape.result_bytes + max(shape.result_bytes, _columns(shape))
    images, filters, output = shape.blocked()
    taps = prod(shape.taps)
    if not shape.is_depthwise and shape.inputs < _BLOCK and taps > 1:
        outputs = shape.groups * _rounded(shape.outputs, _BLOCK)
        images, filters = 0, _ITEM * outputs * shape.inputs * taps
    bias = _padded_bias(shape) if has_bias else 0
    running = images + filters + bias + _thinned(shape) + output
    return max(running, output + shape.result_bytes)


def _image_gradient(shape: _Shape, *, has_bias: bool = False) -> int:
    """Count the gradient of the images with it. A bias is added from a second one."""
    size = shape.image_bytes
    images, filters, output = shape.blocked()
    if _has_strided_gradient(shape):
        # Channels last, and back by two copies.
        second = size + 2 * _ALIGNMENT if has_bias else 0
        filters = _filters(shape, shape.outputs, outputs=False)
        running = shape.result_bytes + filters + size + _strided_scratch(shape) + second
        return max(running, (3 if shape.groups * shape.inputs > 1 else 2) * size)
    is_blocked = shape.groups == 1 or not (shape.inputs % _BLOCK or shape.outputs % _BLOCK)
    is_dense = max(shape.dilation) == 1 if shape.is_depthwise else shape.is_dense
    # Positions before the image that a filter reaches, and those computed at once.
    reach = shape.widths[-1] - 1 - shape.padding[-1]
    is_narrow = reach <= _WIDEST_REACH or shape.size[-1] <= _WIDEST_REACH
    is_simple = is_dense or (max(shape.stride) == 1 and not shape.is_depthwise)
    if is_simple and (shape.is_depthwise or (is_blocked and is_narrow)):
        second = images + _ALIGNMENT if has_bias else 0
        return max(output + filters + images + second, images + size)
    second = size + 2 * _ALIGNMENT if has_bias else 0
    return size + max(size, _patches(shape, _IMAGE_SHARE) + second)


def _has_strided_gradient(shape: _Shape) -> bool:
    """Check the conditions of ``jit_brgemm_conv_bwd_strided``."""
    if max(shape.stride) == 1 or max(shape.dilation) > 1:
        return False
    return shape.groups == 1 or shape.outputs > _BLOCK


def _weight_scratch(shape: _Shape, bias: int) -> tuple[int, int]:
    """Return the bytes of the filters' gradient as a kernel writes it, and of its buffers."""
    if not _has_direct_gradient(shape):
        return shape.weight_bytes, _column_gradient(shape)
    images, filters, output = shape.blocked()
    if shape.groups == 1 and shape.inputs == _PLAIN_INPUTS and prod(shape.taps) > 1:
        images, filters = 0, filters * _PLAIN_INPUTS // _BLOCK
    padded = _padded_bias(shape) if bias else 0
    return filters, output + images + padded + _thinned(shape)


def _turned_weight_scratch(shape: _Shape, bias: int) -> tuple[int, int]:
    """Return the same for images with channels last, which are read as they are."""
    if shape.is_depthwise and _has_depthwise_gradient(shape):
        return _filters(shape, 1, outputs=True), 0
    if not _has_direct_gradient(shape, is_turned=True):
        turned = _ITEM * prod(shape.size) * shape.inputs * torch.get_num_threads()
        return shape.weight_bytes, _column_gradient(shape) + turned + _ALIGNMENT
    is_plain = shape.inputs == _PLAIN_INPUTS
    inputs = _PLAIN_INPUTS if is_plain else _rounded(shape.inputs, _BLOCK)
    outputs = shape.groups * _rounded(shape.outputs, _BLOCK)
    is_padded = bias and shape.outputs % _BLOCK
    scratch = _thinned(shape) + (_ITEM * outputs + _ALIGNMENT if is_padded else 0)
    return _ITEM * inputs * outputs * prod(shape.taps), scratch


def _turned_image_scratch(shape: _Shape) -> int:
    """Count filters and buffers of the gradient of images with channels last."""
    if shape.is_depthwise and max(shape.dilation) == 1:
        return _filters(shape, 1, outputs=False)
    filters = _filters(shape, shape.outputs, outputs=False)
    if _has_strided_gradient(shape):
        return filters + _strided_scratch(shape)
    if max(shape.stride) == 1:
        return filters + _batch_bytes(1) + _ALIGNMENT
    sums = _ITEM * prod(shape.size) * shape.inputs + _ALIGNMENT if shape.groups > 1 else 0
    return _patches(shape) + sums


def _filters(shape: _Shape, channels: int, *, outputs: bool) -> int:
    """Return the bytes of filters with a padded number of outputs or inputs."""
    if shape.has_one_each:
        padded = _rounded(shape.groups, _BLOCK)
    else:
        padded = shape.groups * _rounded(shape.outputs if outputs else shape.inputs, _BLOCK)
    return _ITEM * padded * channels * prod(shape.taps)


def _is_direct(shape: _Shape) -> bool:
    """Check the conditions of ``jit_avx2_conv_fwd_kernel_f32``."""
    if shape.is_depthwise:
        return True
    if shape.groups > 1 and (shape.outputs % _BLOCK or shape.inputs % _BLOCK):
        return False
    is_wide = shape.taps[-1] > 7 and any(shape.padding) and max(shape.stride) > 1
    ends = shape.end_padding
    is_outside = any(
        wide <= max(pad, end)
        for wide, pad, end in zip(shape.widths, shape.padding, ends, strict=True)
    )
    return not is_wide and not is_outside and shape.padding[-1] <= _WIDEST_PADDING


def _has_depthwise_gradient(shape: _Shape) -> bool:
    """Check the conditions of ``jit_uni_dw_conv_bwd_weights_kernel``."""
    is_small = shape.taps[-1] <= _WIDEST_DEPTHWISE_TAPS and shape.stride[-1] <= shape.taps[-1]
    every = zip(shape.padding, shape.end_padding, shape.taps, strict=True)
    is_inside = all(max(pad, end) <= taps // 2 for pad, end, taps in every)
    return is_small and is_inside and shape.is_dense


def _has_direct_gradient(shape: _Shape, *, is_turned: bool = False) -> bool:
    """Check the conditions of ``jit_avx2_conv_bwd_weights_kernel_f32``."""
    if shape.is_depthwise and not is_turned:
        return _has_depthwise_gradient(shape)
    is_blocked = shape.groups == 1 or not (shape.inputs % _BLOCK or shape.outputs % _BLOCK)
    if not shape.is_dense or not (is_blocked or is_turned):
        return False
    every = zip(shape.padding, shape.end_padding, shape.widths, strict=True)
    if any(max(pad, end) >= wide for pad, end, wide in every):
        return False
    is_deep = len(shape.taps) == _VOLUME and (shape.padding[0] or shape.end_padding[0] > 0)
    fits = all(taps <= size for taps, size in zip(shape.taps[:-1], shape.size[:-1], strict=True))
    return not is_deep and fits and shape.taps[-1] <= _WIDEST_TAPS


def _columns(shape: _Shape) -> int:
    """Return the bytes of the patches of one image, or of the part that the cache holds."""
    if len(shape.taps) == _VOLUME:
        return _patches(shape)
    taps = shape.inputs * prod(shape.taps)
    per_position = shape.inputs * (1 + prod(shape.taps)) + shape.outputs
    cached = (_cache_bytes() // _ITEM - taps * shape.outputs) // per_position
    limit = _ITEM * taps * cached if cached > 0 else _cache_bytes()
    return min(_patches(shape), limit + _ALIGNMENT)


def _patches(shape: _Shape, share: float = 1, filters: int = 0) -> int:
    """Return the bytes of the patches of one image, or of one of its planes.

    Where they exceed the scratchpad that the gradients may have, a share of it is used.
    """
    one_patch = _ITEM * shape.inputs * prod(shape.taps)
    positions, threads = prod(shape.result[-2:]), torch.get_num_threads()
    given = shape.image_bytes + shape.weight_bytes + shape.result_bytes
    available = min(_MOST_SCRATCH_BYTES, _MOST_SCRATCH * threads * given) - filters
    if share < 1 and one_patch * positions > available:
        positions = max(_BLOCK, int(share * (available // one_patch)))
    return one_patch * positions + _ALIGNMENT


def _column_gradient(shape: _Shape) -> int:
    """Return the bytes of patches, and of the filters of each thread.

    oneDNN reserves as many floats for the filters as they have bytes.
    """
    positions, threads = prod(shape.result[-2:]), torch.get_num_threads()
    is_split = positions // threads < 256 and (shape.batch != 1 or shape.groups > 2)
    filters = (threads if is_split else 1) * _ITEM * shape.weight_bytes
    if max(*shape.taps, *shape.stride) == 1 and not any(shape.padding):
        return filters + 2 * _ALIGNMENT
    patches = _patches(shape, _WEIGHT_SHARE, filters) - _ALIGNMENT
    return filters + (threads if is_split else 1) * patches + 2 * _ALIGNMENT


def _strided_scratch(shape: _Shape) -> int:
    """Count a padded gradient for each thread, masks, and addresses of blocks."""
    lengths = [
        out + max(0, wide - 1 - pad) // step + max(0, wide - 1 - end) // step
        for out, wide, pad, end, step in zip(
            shape.result, shape.widths, shape.padding, shape.end_padding, shape.stride, strict=True
        )
    ]
    padded = _rounded(prod(lengths) * shape.groups * shape.outputs, _PAGE)
    threads, scratch = torch.get_num_threads(), 2 * _PAGE + _batch_bytes(prod(shape.taps))
    if shape.size[-1] % shape.stride[-1]:
        # A row that the stride does not divide is written outside the image, once per step.
        row = _rounded(shape.size[-1], shape.stride[-1]) * shape.groups * shape.inputs
        row *= shape.stride[-1]
        scratch += threads * _ITEM * _rounded(row, _PAGE) + _PAGE
    return threads * (_ITEM * padded + _PAGE) + scratch


def _batch_bytes(count: int) -> int:
    """Return the bytes of the addresses of blocks, whole pages for each thread."""
    pages = _rounded(count * _BATCH_ITEM, _PAGE)
    return torch.get_num_threads() * _rounded(pages, _BATCH_ITEM) + _PAGE


def _thinned(shape: _Shape) -> int:
    """Count, per thread, the positions of one image that a strided 1 x 1 convolution reads."""
    every = zip(shape.result, shape.stride, shape.size, strict=True)
    is_even = shape.groups == 1 and all(out * step == size for out, step, size in every)
    if max(shape.stride) == 1 or prod(shape.taps) > 1 or len(shape.taps) == _VOLUME or not is_even:
        return 0
    one_image = _rounded(shape.inputs, _BLOCK) * prod(shape.result) * _ITEM
    return (one_image + _ALIGNMENT) * torch.get_num_threads()


def _padded_bias(shape: _Shape) -> int:
    """Return the bytes of a bias in whole blocks, if it has another size."""
    if shape.groups > 1 and not shape.is_depthwise:
        return 0
    channels = shape.groups * shape.outputs
    return _ITEM * _rounded(channels, _BLOCK) + _ALIGNMENT if channels % _BLOCK else 0


def _rounded(size: int, multiple: int) -> int:
    return ceil(size / multiple) * multiple


def _cache_bytes() -> int:
    """Return the bytes of a core's second cache."""
    try:
        return os.sysconf("SC_LEVEL2_CACHE_SIZE") or _DEFAULT_CACHE_BYTES
    except (AttributeError, OSError, ValueError):
        return _DEFAULT_CACHE_BYTES


_DEFAULT_CACHE_BYTES = 512 * 1024

"""Estimate what oneDNN's convolutions allocate on a CPU with AVX2, in FP32.

Which kernel runs, its layouts and its scratchpad follow from oneDNN 3.12's ``src/cpu``: direct
kernels with eight channels in a block (``x64/jit_avx2_conv_kernel_f32.cpp``), those of strided
gradients (``x64/jit_brgemm_conv_bwd_utils.cpp``), and for the weights' gradient of other shapes one
with patches in columns (``gemm_convolution_utils.cpp``). Transposed convolutions run as gradients.
The other kernels, for shapes that few models have, are estimated by the direct ones.
``ONEDNN_VERBOSE=1`` prints the kernels that run.
"""

from __future__ import annotations

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
_VOLUME = 3  # dimensions
_PLAIN_INPUTS = (3,)  # of images that the gradient of the weights reads as they are
_WIDEST_TAPS, _WIDEST_DEPTHWISE_TAPS = 13, 3  # of a row, in the gradient of the weights
# The scratchpad of columns is limited by the tensors for each thread. Larger patches get a share.
_MOST_SCRATCH, _COLUMN_SHARE = 15, 0.05


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
    is_turned: bool  # channels last, which kernels read as they are

    @property
    def is_depthwise(self) -> bool:
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

    def blocked(self, plain: Sequence[int] = ()) -> tuple[int, int, int]:
        """Return the bytes of images, filters and result in blocks of channels."""
        # Images with as many channels as one of ``plain`` are read as they are.
        groups, inputs, outputs = self.groups, self.inputs, self.outputs
        is_plain = groups == 1 and inputs in plain and prod(self.taps) > 1
        if self.is_depthwise:
            groups = _rounded(groups, _BLOCK)
        elif groups == 1:
            inputs = inputs if is_plain else _rounded(inputs, _BLOCK)
            outputs = _rounded(outputs, _BLOCK)
        images = 0 if is_plain else _ITEM * self.batch * groups * inputs * prod(self.size)
        filters = _ITEM * groups * inputs * outputs * prod(self.taps)
        result = _ITEM * self.batch * groups * outputs * prod(self.result)
        return (0, filters, 0) if self.is_turned else (images, filters, result)


def _shape_of(images: Tensor, weight: Tensor, result: Tensor, options: Sequence[Any]) -> _Shape:
    """Return the sizes. A transposed convolution is the image's gradient of this one."""
    stride, padding, dilation, is_transposed, _, groups = options
    batch, _, *size = map(int, images.shape)
    first, second, *taps = map(int, weight.shape)
    sizes = tuple(size), tuple(map(int, result.shape[2:]))
    return _Shape(
        batch, groups, second, first // groups, *(sizes[::-1] if is_transposed else sizes),
        tuple(taps), tuple(stride), tuple(padding), tuple(dilation),
        has_channels_last(images, weight),
    )  # fmt: skip


def forward(args: Sequence[Any], result: Tensor) -> int:
    """Count the copies and buffers of a forward convolution."""
    shape = _shape_of(args[0], args[1], result, args[3:9])
    copied = turned_bytes(args[0], args[1]) if shape.is_turned else 0
    if args[6]:
        return copied + _image_gradient(shape, has_bias=args[2] is not None) - shape.image_bytes
    return copied + _result(shape) - shape.result_bytes


def backward(args: Sequence[Any]) -> int:
    """Count the gradient of the input, then those of weight and bias, then their plain copies."""
    grad, images, weight, mask, is_transposed = args[0], args[1], args[2], args[10], args[7]
    shape = _shape_of(images, weight, grad, args[4:10])
    bias = _ITEM * int(grad.shape[1]) if mask[2] else 0
    first = second = third = returned = 0
    if mask[0]:
        returned = bytes_of(images)
        first = _result(shape) if is_transposed else _image_gradient(shape)
    if mask[1]:
        filters, scratch = _weight_gradient(shape)
        second = returned + filters + bias + scratch
        third = returned + filters + 2 * bias + (1 + shape.is_turned) * shape.weight_bytes
        returned += shape.weight_bytes + bias
    copied = turned_bytes(images, weight, grad) if shape.is_turned else copy_of(grad)
    return max(first, second, third) + copied - returned


def _result(shape: _Shape) -> int:
    """Count a convolution with its result, which leaves its layout by a copy."""
    images, filters, output = shape.blocked(range(_BLOCK))
    output = output or shape.result_bytes
    running = images + filters + _thinned(shape) + output
    return running if shape.is_turned else max(running, output + shape.result_bytes)


def _image_gradient(shape: _Shape, *, has_bias: bool = False) -> int:
    """Count the gradient of the images with it. A bias is added from a second one."""
    size = shape.image_bytes
    images, filters, output = shape.blocked()
    is_strided = max(shape.stride) > 1 and max(shape.dilation) == 1
    if is_strided and (shape.groups == 1 or shape.outputs > _BLOCK):
        # Channels last, and back by two copies.
        given = 0 if shape.is_turned else shape.result_bytes
        running = given + filters + size * (1 + has_bias) + _strided_scratch(shape)
        return running if shape.is_turned else max(running, 3 * size)
    images = images or size
    running = output + filters + images * (1 + has_bias)
    return running if shape.is_turned else max(running, images + size)


def _weight_gradient(shape: _Shape) -> tuple[int, int]:
    """Return the bytes of the filters' gradient as a kernel writes it, and of its buffers."""
    if _has_direct_gradient(shape):
        images, filters, output = shape.blocked(_PLAIN_INPUTS)
        if shape.is_turned and shape.groups > 1 and not _has_depthwise_gradient(shape):
            channels = _rounded(shape.inputs, _BLOCK) * _rounded(shape.outputs, _BLOCK)
            filters = _ITEM * shape.groups * channels * prod(shape.taps)
        return filters, output + images + _thinned(shape)
    # Patches of one image, or of one of its planes, and the filters of each thread. oneDNN reserves
    # as many floats for them as they have bytes.
    positions, threads = prod(shape.result[-2:]), torch.get_num_threads()
    is_split = positions // threads < 256 and (shape.batch != 1 or shape.groups > 2)
    copies = threads if is_split else 1
    filters = copies * _ITEM * shape.weight_bytes
    if max(*shape.taps, *shape.stride) == 1 and not any(shape.padding):
        return shape.weight_bytes, filters
    one_patch = _ITEM * shape.inputs * prod(shape.taps)
    given = shape.image_bytes + shape.weight_bytes + shape.result_bytes
    available = _MOST_SCRATCH * threads * given - filters
    if one_patch * positions > available:
        positions = max(_BLOCK, int(_COLUMN_SHARE * (available // one_patch)))
    turned = threads * _ITEM * prod(shape.size) * shape.inputs if shape.is_turned else 0
    return shape.weight_bytes, filters + copies * one_patch * positions + turned


def _has_direct_gradient(shape: _Shape) -> bool:
    """Check the conditions of ``jit_avx2_conv_bwd_weights_kernel_f32``."""
    if any(taps > 1 and step > 1 for taps, step in zip(shape.taps, shape.dilation, strict=True)):
        return False
    if not shape.is_turned and shape.is_depthwise:
        return _has_depthwise_gradient(shape)
    if (
        not shape.is_turned
        and shape.groups > 1
        and (shape.inputs % _BLOCK or shape.outputs % _BLOCK)
    ):
        return False
    fits = all(taps <= size for taps, size in zip(shape.taps[:-1], shape.size[:-1], strict=True))
    is_deep = len(shape.taps) == _VOLUME and shape.padding[0] > 0
    return fits and not is_deep and shape.taps[-1] <= _WIDEST_TAPS


def _has_depthwise_gradient(shape: _Shape) -> bool:
    """Check the main condition of ``jit_uni_dw_conv_bwd_weights_kernel``."""
    return shape.is_depthwise and shape.taps[-1] <= _WIDEST_DEPTHWISE_TAPS


def _strided_scratch(shape: _Shape) -> int:
    """Count a padded gradient for each thread, and rows that the stride does not divide."""
    lengths = [
        out + max(0, taps - 1 - pad) // step + max(0, size + pad - 1 - (out - 1) * step) // step
        for out, taps, pad, size, step in zip(
            shape.result, shape.taps, shape.padding, shape.size, shape.stride, strict=True
        )
    ]
    padded = prod(lengths) * shape.groups * shape.outputs
    rest = shape.size[-1] % shape.stride[-1]
    row = _rounded(shape.size[-1], shape.stride[-1]) * shape.groups * shape.inputs if rest else 0
    threads = torch.get_num_threads()
    scratch = _ITEM * (_rounded(padded, _PAGE) + _rounded(row * shape.stride[-1], _PAGE))
    return threads * (scratch + 2 * _PAGE) + 3 * _PAGE  # with masks, and addresses of blocks


def _thinned(shape: _Shape) -> int:
    """Count, per thread, the positions of one image that a strided 1 x 1 convolution reads."""
    every = zip(shape.result, shape.stride, shape.size, strict=True)
    is_even = shape.groups == 1 and all(out * step == size for out, step, size in every)
    if max(shape.stride) == 1 or prod(shape.taps) > 1 or len(shape.taps) == _VOLUME or not is_even:
        return 0
    one_image = _rounded(shape.inputs, _BLOCK) * prod(shape.result) * _ITEM
    return (one_image + _ALIGNMENT) * torch.get_num_threads()


def _rounded(size: int, multiple: int) -> int:
    return ceil(size / multiple) * multiple

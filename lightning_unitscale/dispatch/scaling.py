"""Multiply a tensor by a power of two so that the kernel that reads it takes the same steps."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_unitscale.functional.scale import multiply, placed_like

_LINE_BYTES = 64
# The largest power of two that is a number in FP32, in which kernels hold a Python factor.
_LARGEST = 126


def scaled_copy(tensor: Tensor, exponent: int) -> Tensor:
    """``tensor * 2**exponent`` with the strides and the alignment of ``tensor``.

    BLAS may add in another order for another stride, and for another place within a cache line.

    Args:
        tensor: Floating point, of any shape and layout.
        exponent: Within +-126.
    """
    product = tensor * 2.0**exponent
    if product.stride() == tensor.stride():
        offset = tensor.data_ptr() % _LINE_BYTES
        if offset == product.data_ptr() % _LINE_BYTES or tensor.numel() == 0:
            return product
        return placed_like(tensor, product, offset // tensor.element_size())
    return multiply(tensor, 2.0**exponent)


def scale_in_place(tensor: Tensor, exponent: int) -> None:
    """Multiply a result by ``2**exponent``, in two steps where one factor would overflow."""
    while abs(exponent) > _LARGEST:
        part = _LARGEST if exponent > 0 else -_LARGEST
        tensor.mul_(2.0**part)
        exponent -= part
    if exponent:
        tensor.mul_(2.0**exponent)


def smallest_and_rms(tensor: Tensor) -> Tensor:
    """RMS, smallest magnitude other than zero, and largest magnitude: FP64 of shape ``(3,)``.

    The smallest of a tensor of zeros is infinite. Squares are summed in FP64: a gradient of 1e-25
    is ordinary, and its square is 0 in FP32.
    """
    if tensor.numel() == 0:
        return torch.tensor([0.0, float("inf"), 0.0], dtype=torch.float64, device=tensor.device)
    magnitudes = tensor.detach().abs()
    rms = torch.linalg.vector_norm(magnitudes, dtype=torch.float64) / tensor.numel() ** 0.5
    largest = magnitudes.amax()
    smallest = magnitudes.masked_fill_(magnitudes == 0, float("inf")).amin()
    return torch.stack([rms, smallest.double(), largest.double()])

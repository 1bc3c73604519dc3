"""Count bytes of tensors and their copies, for the formulas of kernels' workspaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_unitscale.capture.aot_backend import suggest_memory_format
from lightning_unitscale.capture.flops import Formula

aten = torch.ops.aten
T = TypeVar("T")


def bytes_of(tensor: Tensor | None) -> int:
    """Return the bytes of a tensor's elements."""
    return 0 if tensor is None else prod(map(int, tensor.shape)) * tensor.element_size()


def copy_of(tensor: Tensor) -> int:
    """Return the bytes of the kernel's contiguous copy, or 0 if the tensor is contiguous."""
    return 0 if tensor.is_contiguous() else bytes_of(tensor)


def is_channels_last(tensor: Tensor) -> bool:
    """Check whether the channels of an image are adjacent in memory, by its strides."""
    # Those decide for dimensions of one element too, unlike in ``Tensor.is_contiguous``.
    return suggest_memory_format(tensor) is torch.channels_last


def has_channels_last(images: Tensor, weight: Tensor) -> bool:
    """Check whether a convolution runs with channels last."""
    return is_channels_last(images) or is_channels_last(weight)


def turned_bytes(*tensors: Tensor) -> int:
    """Return the bytes of the copies of the tensors that have channels first."""
    turned = (each.is_contiguous(memory_format=torch.channels_last) for each in tensors)
    return sum(bytes_of(each) for each, there in zip(tensors, turned, strict=True) if not there)


def copies_of(*positions: int) -> Formula:
    """Count the contiguous copies of some arguments."""
    return lambda args, _: sum(copy_of(args[position]) for position in positions)


def reduced_loss(args: Sequence[Any], result: Tensor) -> int:
    """Count the losses of all elements, before their mean or sum is taken."""
    if result.dim():
        return 0
    shape = torch.broadcast_shapes(*(tuple(map(int, each.shape)) for each in args[:2]))
    return prod(shape) * result.element_size()


def by_operator(formulas: Mapping[str, T]) -> dict[Any, T]:
    """Key formulas by ATen operator. No version of torch has them all."""
    return {
        getattr(aten, name): formula for name, formula in formulas.items() if hasattr(aten, name)
    }

"""Bitwise equality of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equality of shape, type and every bit.

    Not imported from ``tests``: packages that are trained here install a package of that name.
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    raw, other = (value.contiguous().reshape(-1).view(torch.uint8) for value in (first, second))
    return torch.equal(raw, other)

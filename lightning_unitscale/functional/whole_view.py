"""A view of a whole tensor, for functions that pass a value on and do something to its gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def whole_view(tensor: Tensor) -> Tensor:
    """A view of all of a tensor, with its strides, also those of dimensions of size 1.

    ``view_as`` makes those up, and convolutions tell by them whether images are channels-last: a
    single image would go through another kernel, with other last bits.
    """
    if tensor.layout is torch.jagged:
        return tensor.view_as(tensor)
    return torch.ops.aten.alias.default(tensor)

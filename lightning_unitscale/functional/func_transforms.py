"""The only file here that asks for ``torch.func``'s state, by a private name of torch.

``torch._C._are_functorch_transforms_active``; checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import torch


def is_transforming() -> bool:
    """Whether a ``torch.func`` transform (``grad``, ``vmap``, ...) runs the calling code."""
    active: bool = torch._C._are_functorch_transforms_active()
    return active

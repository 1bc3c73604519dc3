"""The only file here that asks for ``torch.func``'s state, by private names of torch.

``torch._C._are_functorch_transforms_active``, ``is_functorch_wrapped_tensor`` and ``get_unwrapped``
of ``torch._C._functorch``; checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from lightning_unitscale.shadowing import shadowed


def is_transforming() -> bool:
    """Whether a ``torch.func`` transform (``grad``, ``vmap``, ...) runs the calling code."""
    active: bool = torch._C._are_functorch_transforms_active()
    return active


def plain_tensor(tensor: Tensor) -> Tensor:
    """What a transform has wrapped: all samples of a ``vmap``, the value that ``grad`` follows."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def hooks_in_transforms() -> Iterator[None]:
    """Within this context transforms run under hooks of saved tensors that leave these as they are.

    They refuse all hooks, because one that changes a tensor would see it wrapped.
    """

    def allowed(message: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    with shadowed(torch.autograd.graph, disable_saved_tensors_hooks=allowed):
        yield

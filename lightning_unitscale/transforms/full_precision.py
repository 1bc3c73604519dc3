"""Run a module that is in FP16 as if it were in FP32, to measure what FP16 would lose.

Units are found by measuring, and in FP16 a gradient below 2**-24 measures as zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def runs_in_fp16(module: nn.Module) -> bool:
    """Whether parameters of the module are FP16, or autocast casts to it here and now."""
    parameters = list(module.parameters())
    if any(one.dtype == torch.float16 for one in parameters):
        return True
    return any(
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        for kind in {one.device.type for one in parameters}
    )


@contextlib.contextmanager
def full_precision(module: nn.Module) -> Iterator[None]:
    """Within this context FP16 parameters and buffers are FP32, and autocast is off.

    So are attributes of the modules that name FP16, to which steps cast: a LightningModule's
    ``dtype`` is one. The tensors that were there come back afterwards, untouched.
    """
    tensors = [*module.parameters(), *module.buffers()]
    wide = {
        one: nn.Parameter(one.detach().float(), one.requires_grad)
        if isinstance(one, nn.Parameter)
        else one.float()
        for one in tensors
        if one.dtype == torch.float16
    }
    places = [
        (owner, name, one)
        for owner in module.modules()
        for name, one in (*owner._parameters.items(), *owner._buffers.items())
        if one is not None and one in wide
    ]
    named = [
        (attributes, key)
        for attributes in map(vars, module.modules())
        for key, value in attributes.items()
        if value is torch.float16
    ]
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for kind in {one.device.type for one in tensors}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            # Other objects, not other ``data`` in them: with a change of type a parameter loses its
            # node of the autograd graph, and with it DDP's hook that averages the gradient.
            for owner, name, one in places:
                setattr(owner, name, wide[one])
            for attributes, key in named:
                attributes[key] = torch.float32
            if default == torch.float16:
                torch.set_default_dtype(torch.float32)
            yield
        finally:
            torch.set_default_dtype(default)
            for attributes, key in named:
                attributes[key] = torch.float16
            for owner, name, one in places:
                setattr(owner, name, one)


def in_full_precision(value: Any) -> Any:
    """A structure with its FP16 tensors in FP32."""

    def widened(one: Any) -> Any:
        return one.float() if isinstance(one, Tensor) and one.dtype == torch.float16 else one

    return tree_map(widened, value)

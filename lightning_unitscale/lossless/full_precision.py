"""Measure in FP32 what runs in FP16, where a gradient below 2**-24 measures as zero."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def find_loss(output: object) -> Tensor | None:
    """The scalar that a step returned for its backward pass, if there is one."""
    candidates: list[object] = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, (tuple, list)) and output:
        candidates.append(output[0])
    for candidate in candidates:
        if isinstance(candidate, Tensor) and candidate.numel() == 1 and candidate.requires_grad:
            return candidate
    return None


def runs_in_fp16(module: nn.Module) -> bool:
    """Whether parameters of the module are FP16, or autocast casts to it here and now."""
    parameters = list(module.parameters())
    if any(param.dtype == torch.float16 for param in parameters):
        return True
    return any(
        torch.is_autocast_enabled(device_type)
        and torch.get_autocast_dtype(device_type) == torch.float16
        for device_type in {param.device.type for param in parameters}
    )


@contextlib.contextmanager
def warning_where_fp16_is_cast_to(title: str) -> Iterator[None]:
    """What a module in FP16 measures in FP32 within this context is left out if it fails."""
    try:
        yield
    except RuntimeError as error:
        warnings.warn(
            f"{title}: it runs in FP16 and not in FP32 "
            f"({str(error).splitlines()[0]}), so units are measured in FP16, where small "
            "gradients are zero; expected a step without casts to torch.float16 of its "
            "own; use tensor.to(other.dtype) for them.",
            stacklevel=6,
        )


@contextlib.contextmanager
def full_precision(module: nn.Module) -> Iterator[None]:
    """Within this context FP16 parameters and buffers are FP32, and autocast is off."""
    # So are attributes of the modules that name FP16, to which steps cast: a LightningModule's
    # ``dtype`` is one. The tensors that were there come back afterwards, untouched.
    tensors = [*module.parameters(), *module.buffers()]
    wide = {
        tensor: nn.Parameter(tensor.detach().float(), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else tensor.float()
        for tensor in tensors
        if tensor.dtype == torch.float16
    }
    tensor_attributes = [
        (owner, name, tensor)
        for owner in module.modules()
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None and tensor in wide
    ]
    dtype_attributes = [
        (attributes, name)
        for attributes in map(vars, module.modules())
        for name, value in attributes.items()
        if value is torch.float16
    ]
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for device_type in {tensor.device.type for tensor in tensors}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        try:
            # Other objects, not other ``data`` in them: with a change of type a parameter loses its
            # node of the autograd graph, and with it DDP's hook that averages the gradient.
            for owner, name, tensor in tensor_attributes:
                setattr(owner, name, wide[tensor])
            for attributes, name in dtype_attributes:
                attributes[name] = torch.float32
            if default == torch.float16:
                torch.set_default_dtype(torch.float32)
            yield
        finally:
            torch.set_default_dtype(default)
            for attributes, name in dtype_attributes:
                attributes[name] = torch.float16
            for owner, name, tensor in tensor_attributes:
                setattr(owner, name, tensor)


def in_full_precision(value: Any) -> Any:
    """A structure with its FP16 tensors in FP32."""

    def widened(leaf: Any) -> Any:
        is_half = isinstance(leaf, Tensor) and leaf.dtype == torch.float16
        return leaf.float() if is_half else leaf

    return tree_map(widened, value)

"""Measure FP16 modules in FP32, because FP16 rounds gradients below 2**-24 to zero."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def find_loss(output: object) -> Tensor | None:
    """Return the scalar loss in a step's output, if there is one."""
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
    """Check whether a module has FP16 parameters or autocast casts to FP16 now."""
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
    """Warn instead of raising if a module that runs in FP16 fails in FP32 within this context."""
    try:
        yield
    except RuntimeError as error:
        warnings.warn(
            f"{title}: it runs in FP16 and not in FP32 "
            f"({str(error).splitlines()[0]}), so units are measured in FP16, where small "
            "gradients are zero. Expected a step without casts to torch.float16 of its "
            "own. Use tensor.to(other.dtype) for them.",
            stacklevel=6,
        )


@contextlib.contextmanager
def full_precision(trial: nn.Module) -> Iterator[None]:
    """Cast a copy of a module from FP16 to FP32, and turn autocast off within this context."""
    tensors = [*trial.parameters(), *trial.buffers()]
    for tensor in tensors:
        if tensor.dtype == torch.float16:
            tensor.data = tensor.data.float()
    # Steps may cast to an attribute that is FP16, such as a LightningModule's ``dtype``.
    for attributes in map(vars, trial.modules()):
        named = [name for name, value in attributes.items() if value is torch.float16]
        attributes.update(dict.fromkeys(named, torch.float32))
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for device_type in {tensor.device.type for tensor in tensors}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.callback(torch.set_default_dtype, default)
        if default == torch.float16:
            torch.set_default_dtype(torch.float32)
        yield


def in_full_precision(value: Any) -> Any:
    """Cast the FP16 tensors of a structure to FP32."""

    def widened(leaf: Any) -> Any:
        is_half = isinstance(leaf, Tensor) and leaf.dtype == torch.float16
        return leaf.float() if is_half else leaf

    return tree_map(widened, value)

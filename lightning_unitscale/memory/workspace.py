"""Estimate the memory that a kernel allocates while it runs, which no fake tensor shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_unitscale.memory.cpu_workspace import cpu_workspace_bytes
from lightning_unitscale.memory.cuda_workspace import cuda_workspace_bytes
from lightning_unitscale.memory.gpus import DEFAULT_GPU, GPU


def workspace_bytes(
    function: Any, args: Sequence[Any], result: Any, device: str, gpu: GPU | None = None
) -> int:
    """Return the most bytes alive in one call of an operator beyond its arguments and results."""
    if device == "cuda":
        return cuda_workspace_bytes(gpu or DEFAULT_GPU, function, args, result)
    return cpu_workspace_bytes(function, args, result) if device == "cpu" else 0

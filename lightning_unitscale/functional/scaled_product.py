"""The product of two FP8 matrices: the only file that knows torch's private name of it.

``torch._scaled_mm`` (checked on torch 2.13 on a CPU, written to what 2.11 takes) wants the first
matrix in rows and the second in columns, FP32 scales, an inner and an outer dimension that are
multiples of 16, and never E5M2 for both. CPUs take more than that; what is asked of a GPU is asked
of every device here, so that one model is treated alike on all.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Dimensions of the operands must be multiples of this, except the number of rows of the first.
MULTIPLE = 16

_FIRST_CAPABILITY = (8, 9)


def why_no_fp8(device: torch.device) -> str | None:
    """Why a device cannot multiply FP8 matrices, or ``None`` if it can.

    Args:
        device: Where the matrices are.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"no FP8 product is known for devices of type {device.type!r}"
    if torch.version.hip is not None:
        return "AMD's GPUs are not tested, and some of them have FP8 formats of their own"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, FP8 needs 8.9"
    return None


def scaled_product(
    rows: Tensor, columns: Tensor, scale: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """``scale * rows @ columns.T``, summed in FP32 and rounded once.

    Args:
        rows: FP8 of shape ``(m, k)``, in any layout.
        columns: FP8 of shape ``(n, k)``, in any layout; ``n`` is a multiple of 16. At most one of
            the two is E5M2.
        scale: FP32, 0-d.
        dtype: Type of the result: FP32, BF16 or FP16.
        fast: Whether Hopper may keep fewer bits of intermediate sums, as is usual forward and not
            for gradients.

    Returns:
        Shape ``(m, n)``. An inner dimension that is no multiple of 16 is filled up with zeros.
    """
    if rows.shape[0] == 0 or rows.shape[1] == 0:
        return rows.new_zeros((rows.shape[0], columns.shape[0]), dtype=dtype)
    return torch._scaled_mm(
        _filled_rows(rows),
        _filled_rows(columns).t(),
        scale_a=scale,
        scale_b=torch.ones((), dtype=torch.float32, device=rows.device),
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def _filled_rows(matrix: Tensor) -> Tensor:
    """The matrix in contiguous rows, each with zeros up to a multiple of 16."""
    matrix = matrix.contiguous()
    missing = -matrix.shape[1] % MULTIPLE
    if missing == 0:
        return matrix
    # Padding is not there for FP8; the byte 0 is the number 0 in both formats.
    filled = torch.nn.functional.pad(matrix.view(torch.uint8), (0, missing))
    return filled.view(matrix.dtype)

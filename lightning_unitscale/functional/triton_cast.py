"""Cast a matrix to FP8, also transposed, in one read by a Triton kernel.

Both results are in rows, as ``torch._scaled_mm`` needs its operands on Hopper. For an element of e
bytes the kernel moves ``e + 1`` bytes, or ``e + 2`` with the transpose. That is 4 for BF16, where
torch moves 61 for the cast (to FP32, times the factor, clamped, tested for infinity, chosen, cast)
and 2 more for the copy. Each element is rounded independently, so runs agree. It uses arithmetic on
codes, so GPUs without FP8 and the interpreter compute the same bits.

Checked with Triton 3.6 (of torch 2.11), 3.7 (of 2.13) and, in its interpreter, 3.8 (of 2.14).
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_unitscale.functional.scale import Factor
from lightning_unitscale.scales.triton_kernels import wide

NUM_WARPS: Final = 8
# A tile is square. 64 bytes of FP8 in a row are two sectors of memory, in both results.
_TILE: Final = 64
TURNED_TILE: Final = 128  # bytes are few: 128 of them in a row are a line of the cache

_INF = tl.constexpr(math.inf)


def cast_matrix(
    matrix: Tensor, factor: Factor, dtype: torch.dtype, rows: Tensor | None, turned: Tensor | None
) -> None:
    """Write ``matrix * factor``, as ``to_fp8`` rounds it, in one launch."""
    num_rows, num_columns = matrix.shape
    tiles = triton.cdiv(num_columns, _TILE)
    is_tensor = isinstance(factor, Tensor)
    with torch.cuda.device_of(matrix):
        cast_tiles[(triton.cdiv(num_rows, _TILE) * tiles,)](
            matrix,
            factor if is_tensor else None,
            1.0 if is_tensor else factor,
            None if rows is None else rows.view(torch.uint8),
            None if turned is None else turned.view(torch.uint8),
            num_rows,
            num_columns,
            tiles,
            *matrix.stride(),
            0 if rows is None else rows.shape[1],
            0 if turned is None else turned.shape[1],
            **constants_of(dtype),
            num_warps=NUM_WARPS,
        )


def turn_matrix(matrix: Tensor, turned: Tensor) -> None:
    """Write the transpose of an FP8 matrix, in one launch."""
    num_rows, num_columns = matrix.shape
    tiles = triton.cdiv(num_columns, TURNED_TILE)
    with torch.cuda.device_of(matrix):
        turn_tiles[(triton.cdiv(num_rows, TURNED_TILE) * tiles,)](
            matrix.view(torch.uint8),
            turned.view(torch.uint8),
            num_rows,
            num_columns,
            tiles,
            *matrix.stride(),
            TILE=TURNED_TILE,
            num_warps=NUM_WARPS,
        )


def constants_of(dtype: torch.dtype) -> dict[str, Any]:
    """Return the kernel's compile-time constants for a format."""
    info = torch.finfo(dtype)
    return {
        "LARGEST": info.max,
        "MANTISSA_BITS": round(-math.log2(info.eps)),
        "MIN_EXPONENT": round(math.log2(info.smallest_normal)),
        "TILE": _TILE,
    }


@triton.jit
def cast_tiles(
    matrix: tl.tensor,  # FP32, BF16 or FP16
    factor: tl.tensor,  # 0-d, or ``None``
    number: tl.tensor,  # the factor, if that is ``None``
    rows: tl.tensor,  # bytes of shape ``(num_rows, rows_pitch)``, or ``None``
    turned: tl.tensor,  # bytes of shape ``(num_columns, turned_pitch)``, or ``None``
    num_rows: tl.tensor,  # of the matrix
    num_columns: tl.tensor,  # of the matrix
    tiles: tl.tensor,  # number of tiles side by side
    row_stride: tl.tensor,  # of the matrix, in elements
    column_stride: tl.tensor,  # of the matrix, in elements
    rows_pitch: tl.tensor,  # number of columns of ``rows``
    turned_pitch: tl.tensor,  # number of columns of ``turned``
    LARGEST: tl.constexpr,  # largest number of the format
    MANTISSA_BITS: tl.constexpr,  # of the format
    MIN_EXPONENT: tl.constexpr,  # of its normal numbers
    TILE: tl.constexpr,  # rows, and columns, of a tile
) -> None:
    """Cast one tile of a matrix."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (program % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_row, is_column = row < num_rows, column < num_columns
    offset = row[:, None] * row_stride + column[None, :] * column_stride
    x = tl.load(matrix + offset, mask=is_row[:, None] & is_column[None, :], other=0.0)
    if factor is not None:
        number = tl.load(factor)
    x = wide(x).to(tl.float32) * number
    magnitude = tl.abs(x)
    clipped = tl.minimum(magnitude, LARGEST)
    # Added to a number whose last bit is the smallest subnormal, a subnormal is rounded to that.
    anchor = 2.0 ** (MIN_EXPONENT - MANTISSA_BITS + 23)
    first = tl.full((), anchor, tl.float32).to(tl.int32, bitcast=True)
    subnormal = (clipped + anchor).to(tl.int32, bitcast=True) - first
    # Codes are in the order of the numbers, so a carry out of the mantissa is correct.
    cut = 23 - MANTISSA_BITS
    code = clipped.to(tl.int32, bitcast=True)
    code += ((code >> cut) & 1) + ((1 << (cut - 1)) - 1)
    normal = (code >> cut) - ((126 + MIN_EXPONENT) << MANTISSA_BITS)
    code = tl.where(clipped < 2.0**MIN_EXPONENT, subnormal, normal)
    code |= (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    # Values that were not finite become NaN.
    code = tl.where(magnitude < _INF, code, 0x7F).to(tl.uint8)
    if rows is not None:
        inside = is_row[:, None] & (column < rows_pitch)[None, :]
        tl.store(rows + row[:, None] * rows_pitch + column[None, :], code, mask=inside)
    if turned is not None:
        inside = is_column[:, None] & (row < turned_pitch)[None, :]
        to = turned + column[:, None] * turned_pitch + row[None, :]
        tl.store(to, tl.trans(code), mask=inside)


@triton.jit
def turn_tiles(
    matrix: tl.tensor,  # bytes
    turned: tl.tensor,  # bytes of shape ``(num_columns, num_rows)``
    num_rows: tl.tensor,  # of the matrix
    num_columns: tl.tensor,  # of the matrix
    tiles: tl.tensor,  # number of tiles side by side
    row_stride: tl.tensor,  # of the matrix
    column_stride: tl.tensor,  # of the matrix
    TILE: tl.constexpr,  # rows, and columns, of a tile
) -> None:
    """Transpose one tile of a matrix."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (program % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    offset = row[:, None] * row_stride + column[None, :] * column_stride
    code = tl.load(matrix + offset, mask=is_inside)
    to = turned + column[:, None] * num_rows + row[None, :]
    tl.store(to, tl.trans(code), mask=tl.trans(is_inside))

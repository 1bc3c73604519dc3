"""A statistics row on a CPU without a C compiler, in as few passes as separate kernels allow.

Threshold counts are the dear part: a comparison and a sum for each. The smallest and the largest
magnitude settle most of them without looking at the tensor, which is a choice made on data, so this
is for eager execution only. NumPy compares and counts booleans four times as fast as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def moments_and_counts(vector: Tensor, cuts: Sequence[float]) -> Tensor:
    """All columns of a row but the exponent counts.

    Args:
        vector: FP32 on the CPU, contiguous, shape ``(numel,)``, not empty.
        cuts: Thresholds as in ``RowLayout.fp32_cuts``.

    Returns:
        Shape ``(9 + len(cuts),)``, float64, ordered as ``RowLayout`` says.
    """
    numel = vector.numel()
    nans = infs = 0
    # Codes of non-negative floats are in the order of the numbers, and integers have no NaN.
    codes = vector.view(torch.int32) & 0x7FFF_FFFF
    low, high = torch.aminmax(codes)
    if float(high.view(torch.float32)) < math.inf:
        pass
    else:
        finite = codes < _code(math.inf)
        infs = _count(codes.numpy() == _code(math.inf))
        nans = numel - infs - _count(finite.numpy())
        vector = torch.where(finite, vector, 0.0)
        codes = torch.where(finite, codes, 0)
        low, high = torch.aminmax(codes)
    zeros = _count(codes.numpy() == 0) if int(low) == 0 else 0
    if zeros:
        # Codes minus one wrap zeros around to the largest unsigned code.
        above_zero = int((codes - 1).numpy().view(np.uint32).min()) + 1
        low = torch.tensor(above_zero if zeros < numel else _code(math.inf), dtype=torch.int32)
    magnitudes = codes.view(torch.float32).numpy()
    smallest, largest = (float(code.view(torch.float32)) for code in (low, high))
    below = []
    for cut in cuts:
        if largest < cut:
            below.append(numel)
        elif smallest >= cut:
            below.append(zeros)
        else:
            below.append(_count(magnitudes < np.float32(cut)))
    left_out = nans + infs
    exact = vector.double()
    total, squares = float(exact.sum()), float(exact.dot(exact))
    absolute = float(exact.abs_().sum())
    row = [numel, zeros - left_out, nans, infs, total, absolute, squares, largest, smallest]
    for flushed, denormal, in_range in zip(below[0::3], below[1::3], below[2::3], strict=True):
        row += [numel - in_range, denormal - flushed, flushed - zeros]
    return torch.tensor(row, dtype=torch.float64)


def _code(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _count(condition: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> int:
    return int(np.count_nonzero(condition))

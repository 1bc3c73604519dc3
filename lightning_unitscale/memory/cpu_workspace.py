"""Estimate the memory that a CPU's kernel allocates while it runs.

The formulas come from the allocator's events of single operators (torch 2.13). oneDNN tiles 16-bit
matmuls by its own rules. Where it has none (AVX2), torch's own run, which allocate nothing.
``cpu_convolution.py`` has convolutions, and ``cuda_workspace.py`` the formulas of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.memory.cpu_convolution import (
    convolution_backward_workspace,
    convolution_workspace,
    runs_in_onednn,
)
from lightning_unitscale.memory.operator_bytes import (
    by_operator,
    bytes_of,
    copies_of,
    copy_of,
    reduced_loss,
)

_REDUCED_TILES_BYTES = 258 * 1024
# Keys that the CPU's attention kernel takes at a time.
_KEY_BLOCK = 512


def cpu_workspace_bytes(function: Any, args: Sequence[Any], result: Any) -> int:
    """Return the most bytes alive in one call of an operator beyond its arguments and results."""
    formula = _CPU.get(getattr(function, "overloadpacket", function))
    return 0 if formula is None else max(0, int(formula(args, result)))


def _layer_norm_backward(args: Sequence[Any], result: Any) -> int:
    """Count sums of the gradients of gain and bias, one pair per thread."""
    sums = 2 * prod(args[2]) * args[0].element_size() * torch.get_num_threads()
    return sums + copy_of(args[0]) + copy_of(args[1])


def _safe_softmax(args: Sequence[Any], result: Any) -> int:
    """Count a mask of minus infinity, and one of rows that contain nothing else."""
    (scores, dim) = args[:2]
    count = prod(map(int, scores.shape))
    return count + count // max(1, int(scores.shape[dim]))


def _reduced_matmul(args: Sequence[Any], result: Any) -> int:
    """Count tiles of a 16-bit matmul in oneDNN's own layout, roughly for large operands."""
    if not runs_in_onednn(result.dtype):
        return 0
    operands = [value for value in args if isinstance(value, Tensor) and value.dim() > 1]
    return min(sum(map(bytes_of, operands)) + 2 * bytes_of(result), _REDUCED_TILES_BYTES)


def _score_tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    length, keys = int(query.shape[2]), int(key.shape[2])
    block = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(block, length), min(_KEY_BLOCK, keys)


def _cpu_attention(args: Sequence[Any], result: Any) -> int:
    """Count, per thread, tiles of scores and of the result, maxima and sums, in FP32."""
    query, (rows, columns) = args[0], _score_tile(args[0], args[1])
    numbers = rows * columns + 2 * rows + rows * int(query.shape[3])
    reduced = rows * columns * query.element_size() if query.element_size() < 4 else 0
    return (4 * numbers + reduced) * torch.get_num_threads()


def _cpu_attention_backward(args: Sequence[Any], result: Any) -> int:
    """Count, per thread, two tiles of scores and a row sum."""
    rows, columns = _score_tile(args[1], args[2])
    return 4 * (2 * rows * columns + rows) * torch.get_num_threads()


_CPU = by_operator(
    {
        **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _reduced_matmul),
        "convolution": convolution_workspace,
        "convolution_backward": convolution_backward_workspace,
        # Two more statistics per channel.
        **dict.fromkeys(
            ("native_batch_norm", "_native_batch_norm_legit_functional"),
            lambda args, _: 2 * int(args[0].shape[1]) * args[0].element_size(),
        ),
        # A second gradient of the input.
        "native_batch_norm_backward": lambda args, result: bytes_of(result[0]) if args[7] else 0,
        # The input times the mask, before it is scaled.
        "native_dropout": lambda _, result: bytes_of(result[0]),
        # The mask as numbers, then the gradient times it; and the scale twice.
        "native_dropout_backward": lambda _, result: bytes_of(result) + 8 + result.element_size(),
        "native_layer_norm": copies_of(0),
        **dict.fromkeys(("mse_loss", "smooth_l1_loss"), reduced_loss),
        "native_layer_norm_backward": _layer_norm_backward,
        "_safe_softmax": _safe_softmax,
        **dict.fromkeys(("_softmax", "_log_softmax"), copies_of(0)),
        **dict.fromkeys(
            ("_softmax_backward_data", "_log_softmax_backward_data", "embedding_dense_backward"),
            copies_of(0, 1),
        ),
        "embedding": copies_of(1),
        **dict.fromkeys(
            ("upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
            lambda args, result: copy_of(args[0]) and bytes_of(args[0]) + bytes_of(result),
        ),
        "_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
    }
)

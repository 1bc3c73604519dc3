"""Count floating-point operations of the aten operators that multiply matrices.

A multiplication with an addition counts as two. Formulas get the arguments and the result of a
call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

Arguments = Sequence[Any]
Formula = Callable[[Arguments, Any], int]


def _size(lengths: Iterable[Any]) -> int:
    return int(math.prod(lengths))


def contraction(first: int, second: int) -> Callable[[Arguments, Any], int]:
    """Count the operations of a matmul of two matrices, or of two batches of them."""

    def flops(args: Arguments, _: Any) -> int:
        columns = args[second].shape[-1] if args[second].dim() > 1 else 1
        return 2 * int(args[first].numel()) * int(columns)

    return flops


def _convolved(positions: Tensor, weight: Tensor) -> int:
    """Count each element of the weight at each position. Its shape includes groups."""
    return 2 * _size((positions.shape[0], *positions.shape[2:])) * _size(weight.shape)


def convolution_flops(args: Arguments, result: Any) -> int:
    """Count each element of the weight at each position."""
    return _convolved(args[0] if args[6] else result, args[1])


def convolution_backward_flops(args: Arguments, _: Any) -> int:
    """Count the operations of the wanted gradients."""
    # Each gradient takes as many as the forward pass.
    once = _convolved(args[1] if args[7] else args[0], args[2])
    return once * (bool(args[10][0]) + bool(args[10][1]))


def attention_flops(query: int, *, of_depth: int, of_values: int) -> Callable[..., int]:
    """Count matmuls over the depth of keys and over that of values. A mask does not reduce them."""

    def flops(args: Arguments, _: Any) -> int:
        q, k, v = args[query : query + 3]
        scores = _size((*q.shape[:-1], k.shape[-2]))
        return 2 * scores * (of_depth * int(q.shape[-1]) + of_values * int(v.shape[-1]))

    return flops


def trilinear_flops(args: Arguments, result: Any) -> int:
    """Count one matmul of two inputs for each output feature."""
    return 2 * int(args[1].numel()) * int(result.shape[0] if result.dim() else 1)


def grouped_flops(args: Arguments, result: Any) -> int:
    """Count the product of each row and the matrix of its group."""
    if args[0].dim() == args[1].dim() == 2:  # each group sums over its own columns
        return contraction(0, 1)(args, result)
    return 2 * int(result.numel()) * int(args[0].shape[-1])


def conv_tbc_backward_flops(args: Arguments, _: Any) -> int:
    """Count the operations of both gradients."""
    return 4 * int(args[0].numel()) * _size(args[2].shape[:2])


def conv_tbc_flops(args: Arguments, result: Any) -> int:
    """Count the operations of a convolution over time."""
    return 2 * int(result.numel()) * _size(args[1].shape[:2])


def recurrent_flops(args: Arguments, _: Any) -> int:
    """Count the operations of oneDNN's recurrent layer: both matrices for each token."""
    tokens, *matrices = args[:3]
    return 2 * _size(tokens.shape[:2]) * sum(_size(matrix.shape) for matrix in matrices)


def cudnn_recurrent_flops(args: Arguments, _: Any) -> int:
    """Count the operations of cuDNN's recurrent layers: all matrices for each token."""
    matrices = [weight for weight in args[1] if weight.dim() > 1]
    return 2 * _size(args[0].shape[:2]) * sum(_size(matrix.shape) for matrix in matrices)


def encoder_layer_flops(args: Arguments, _: Any) -> int:
    """Count all matrices for each token, without attention."""
    weights = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 2]
    return 2 * _size(args[0].shape[:-1]) * sum(_size(weight.shape) for weight in weights)


def distance_flops(args: Arguments, _: Any) -> int:
    """Count the operations of all inner products."""
    return 2 * int(args[0].numel()) * int(args[1].shape[-2])

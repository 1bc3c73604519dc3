"""Unit-scaled normalizations that the literature names: layer_norm, rms_norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.scaled_call import rule_for, scaled_call

_LAYER_NORM = rule_for(F.layer_norm)
_RMS_NORM = rule_for(F.rms_norm)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Unit-scaled layer normalization: the plain one with scaled gradients of weight and bias.

    Args:
        input: ``(*, *normalized_shape)``.
        normalized_shape: The last dimensions, over which mean and variance are taken.
        weight: ``normalized_shape``, one at the start.
        bias: ``normalized_shape``, zero at the start.
        eps: Added to the variance.

    Returns:
        The shape of ``input``.

    Raises:
        TypeError: If ``input`` is not a floating-point tensor.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops: gradients of weight and
        bias get ``(numel(weight) / numel(input))**0.5``.
    """
    args = (input, list(normalized_shape), weight, bias, eps)
    result: Tensor = scaled_call(_LAYER_NORM, F.layer_norm, args)
    return result


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Unit-scaled RMS normalization: the plain one with a scaled gradient of the weight.

    Args:
        input: ``(*, *normalized_shape)``.
        normalized_shape: The last dimensions, over which the mean square is taken.
        weight: ``normalized_shape``, one at the start.
        eps: Added to the mean square; torch's default is the type's machine epsilon.

    Returns:
        The shape of ``input``.

    Raises:
        TypeError: If ``input`` is not a floating-point tensor.

    References:
        Blake et al., "u-muP" (arXiv 2407.17465), on norms; the factor of
        :func:`layer_norm`.
    """
    args = (input, list(normalized_shape), weight, eps)
    result: Tensor = scaled_call(_RMS_NORM, F.rms_norm, args)
    return result

"""Unit-scaled linear maps: linear, linear_readout, conv1d, matmul, embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.scaled_call import (
    DEFAULT_POWER,
    ScalePower,
    rule_for,
    scaled_call,
)

_LINEAR = rule_for(F.linear)
_CONV1D = rule_for(F.conv1d)
_MATMUL = rule_for(torch.matmul)
_EMBEDDING = rule_for(F.embedding)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    constraint: str | None = "to_output_scale",
    scale_power: ScalePower = DEFAULT_POWER,
) -> Tensor:
    """Unit-scaled linear map, ``fan_in**-0.5 * (input @ weight.T + bias)``.

    Args:
        input: ``(*, in_features)``.
        weight: ``(out_features, in_features)``, at unit standard deviation.
        bias: ``(out_features,)``, zero at the start.
        constraint: Between the factor of the output, ``in_features**-0.5``, and of the gradient of
            the input, ``out_features**-0.5``.
        scale_power: Powers of the number of terms in the sums that make the output, the gradient of
            the input, and the gradients of weight and bias.

    Returns:
        ``(*, out_features)``.

    Raises:
        TypeError: If ``input`` is not a floating-point tensor.
        ValueError: If ``constraint`` or ``scale_power`` is not usable.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops. The gradients of weight
        and bias get ``rows**-0.5``, rows being those of this call: with averaged gradients of
        several devices, or accumulated ones, the caller corrects them.
    """
    result: Tensor = scaled_call(
        _LINEAR,
        F.linear,
        (input, weight, bias),
        constraint=constraint,
        scale_power=scale_power,
    )
    return result


def linear_readout(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    constraint: str | None = None,
) -> Tensor:
    """Unit-scaled linear map for a network's final output: its factor is ``1 / in_features``.

    Args:
        input: ``(*, in_features)``.
        weight: ``(out_features, in_features)``, at unit standard deviation.
        bias: ``(out_features,)``.
        constraint: As in :func:`linear`. None by default: what follows is a loss, so the gradient
            need not be the derivative of the output.

    Returns:
        ``(*, out_features)``, smaller than RMS 1 at the start.

    Raises:
        TypeError: If ``input`` is not a floating-point tensor.
        ValueError: If ``constraint`` is not usable.

    References:
        Blake et al., "u-muP" (arXiv 2407.17465), table 2, output weights.
    """
    return linear(input, weight, bias, constraint=constraint, scale_power=(1.0, 0.5, 0.5))


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    constraint: str | None = "to_output_scale",
    scale_power: ScalePower = DEFAULT_POWER,
) -> Tensor:
    """Unit-scaled convolution over one dimension.

    Args:
        input: ``(batch, in_channels, length)`` or ``(in_channels, length)``.
        weight: ``(out_channels, in_channels / groups, kernel)``, at unit standard deviation.
        bias: ``(out_channels,)``, zero at the start.
        stride: As in torch.
        padding: A number, a sequence of one, ``"same"`` or ``"valid"``. Borders are taken as the
            inside.
        dilation: As in torch.
        groups: As in torch.
        constraint: Between the factors of the output and of the gradient of the input.
        scale_power: As in :func:`linear`.

    Returns:
        ``(batch, out_channels, length_out)`` or without the batch.

    Raises:
        TypeError: If ``input`` is not a floating-point tensor.
        ValueError: If ``constraint`` or ``scale_power`` is not usable.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops: fan_in =
        ``in_channels / groups * kernel``, and ``out_channels * kernel / (stride * groups)`` terms
        in the gradient of the input.
    """
    result: Tensor = scaled_call(
        _CONV1D,
        F.conv1d,
        (input, weight, bias, stride, padding, dilation, groups),
        constraint=constraint,
        scale_power=scale_power,
    )
    return result


def matmul(input: Tensor, other: Tensor, *, constraint: str | None = "to_output_scale") -> Tensor:
    """Unit-scaled matrix product.

    Args:
        input: ``(*, m, k)``; also ``(k,)``.
        other: ``(*, k, n)``; also ``(k,)``. Batch dimensions broadcast.
        constraint: Between the factors of the output, ``k**-0.5``, and of the two gradients,
            ``n**-0.5`` and ``m**-0.5`` where nothing is broadcast.

    Returns:
        ``(*, m, n)``.

    Raises:
        TypeError: If ``input`` is not a floating-point tensor.
        ValueError: If ``constraint`` is unknown.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops.
    """
    result: Tensor = scaled_call(_MATMUL, torch.matmul, (input, other), constraint=constraint)
    return result


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Unit-scaled lookup in a table.

    Args:
        input: Integers of any shape ``(*)``, in ``[0, num_embeddings)``.
        weight: ``(num_embeddings, width)``, at unit standard deviation.
        padding_idx: As in torch.
        max_norm: Must be None: a row cut to a norm is not at RMS 1.
        norm_type: As in torch.
        scale_grad_by_freq: Must be False: a row's gradient would be a mean, at a scale of its own.
        sparse: Must be False: a factor of a gradient needs a dense one.

    Returns:
        ``(*, width)``.

    Raises:
        ValueError: If ``max_norm``, ``scale_grad_by_freq`` or ``sparse`` is given.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops: the gradient of the
        weight gets ``(num_embeddings / number of lookups)**0.5``.
    """
    for name, value, default in (
        ("max_norm", max_norm, None),
        ("scale_grad_by_freq", scale_grad_by_freq, False),
        ("sparse", sparse, False),
    ):
        if value is not default:
            raise ValueError(
                f"embedding: {name}={value}: it has no unit-scaled form; expected {default}. Use "
                "torch.nn.functional.embedding for this table."
            )
    result: Tensor = scaled_call(
        _EMBEDDING,
        F.embedding,
        (input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse),
    )
    return result

"""Define scale rules and unit-scaled forms of losses.

A loss keeps its unscaled value, so that it compares with an unscaled run. Its gradient is at RMS 1
for every element that takes part. So a rule's ``output`` is 1, and a gradient's factor is for a
gradient of 1 at the loss. All gradients are linear in that one, so the factor may be applied there.

Targets are taken as independent of the predictions, which holds at the start of training.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops, cross_entropy, mse_loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.call import scaled_loss, scaled_op
from lightning_unitscale.functional.moments import elementwise_moments, softmax_moments
from lightning_unitscale.functional.rules import (
    Factors,
    ScaleRule,
    numel_of,
    register_rule,
    shape_of,
    specialized,
    unit_factor,
)

__all__ = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy",
    "gaussian_nll_loss", "huber_loss", "kl_div", "l1_loss", "mse_loss", "nll_loss",
    "smooth_l1_loss",
]  # fmt: skip


def reduction_of(arguments: Mapping[str, Any]) -> str:
    """Return the ``reduction`` of a loss, also from the older ``size_average`` and ``reduce``."""
    size_average, reduce = arguments.get("size_average"), arguments.get("reduce")
    if size_average is None and reduce is None:
        return str(arguments.get("reduction", "mean"))
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _factors(
    arguments: Mapping[str, Any], rows: float | None = None, **mean_squares: float
) -> Factors:
    """Return a loss's factors from the mean squares of each element's share in the gradients."""
    reduction = reduction_of(arguments)
    count = 1.0
    if reduction == "batchmean":
        count = shape_of(arguments["input"])[0]
    elif reduction == "mean":
        count = numel_of(arguments["input"]) if rows is None else rows
    mean_squares["input"] *= arguments.get("mult", 1.0) ** 2
    gradients = {name: max(count, 1) * unit_factor(square) for name, square in mean_squares.items()}
    return Factors(1.0, gradients)


def _classes_and_rows(arguments: Mapping[str, Any]) -> tuple[int, float]:
    """Return the number of classes of ``input``, and the number of choices."""
    shape = shape_of(arguments["input"])
    classes = shape[1] if len(shape) > 1 else shape[0]
    return classes, numel_of(arguments["input"]) / max(classes, 1)


def _cross_entropy(arguments: Mapping[str, Any]) -> Factors:
    classes, rows = _classes_and_rows(arguments)
    # Uniform probabilities 1/V against one target: (V - 1)/V^2 per logit. Smoothing moves the
    # target toward the uniform one.
    sharpness = 1 - arguments.get("label_smoothing", 0.0)
    return _factors(arguments, rows, input=sharpness**2 * (classes - 1) / max(classes, 1) ** 2)


def _nll(arguments: Mapping[str, Any]) -> Factors:
    classes, rows = _classes_and_rows(arguments)
    return _factors(arguments, rows, input=1 / classes)


def _bce_with_logits(arguments: Mapping[str, Any]) -> Factors:
    # E (sigmoid(x) - y)^2 for a fair target: E sigmoid(x)^2.
    square, _ = elementwise_moments(torch.sigmoid, arguments.get("mult", 1.0))
    return _factors(arguments, input=square)


def _kl_div(arguments: Mapping[str, Any]) -> Factors:
    shape = shape_of(arguments["input"])
    classes = specialized(shape[-1]) if shape else 1
    # The gradient is minus the target, taken as a softmax of unit logits.
    return _factors(arguments, input=softmax_moments(classes, 1.0).output / max(classes, 1))


def _of_difference(
    mean_square: Callable[[float, Mapping[str, Any]], float],
) -> Callable[[Mapping[str, Any]], Factors]:
    """Return the factors of a loss that is a function of ``input - target``."""

    def factors(arguments: Mapping[str, Any]) -> Factors:
        rms = math.sqrt(arguments.get("mult", 1.0) ** 2 + 1)
        square = mean_square(rms, arguments)
        return _factors(arguments, input=square, target=square)

    return factors


def _smooth_l1(rms: float, arguments: Mapping[str, Any]) -> float:
    beta = float(arguments.get("beta", 1.0))
    return _clipped(rms, beta) / beta**2 if beta else 1.0


def _clipped(rms: float, limit: float) -> float:
    """Return the mean square of a difference that is clipped at a limit."""
    square, _ = elementwise_moments(F.hardtanh, rms, (("min_val", -limit), ("max_val", limit)))
    return square


def _gaussian_nll(arguments: Mapping[str, Any]) -> Factors:
    # The difference d is normal with variance q, and the given variance is 1. The derivatives are
    # d, of mean square q, and (1 - d^2)/2, of mean square (1 - 2q + 3q^2)/4.
    q = arguments.get("mult", 1.0) ** 2 + 1
    return _factors(arguments, input=q, target=q, var=(1 - 2 * q + 3 * q**2) / 4)


_CROSS_ENTROPY = register_rule(
    ScaleRule(
        "cross_entropy",
        tuple(inspect.signature(F.cross_entropy).parameters),
        _cross_entropy,
        "loss",
        "Unit Scaling (arXiv 2303.11257), table of ops; targets that are probabilities count as "
        "sharp, weights and ignored tokens as ordinary ones, since a rule sees no values",
    ),
    F.cross_entropy,
)
_MSE_LOSS = register_rule(
    ScaleRule(
        "mse_loss",
        tuple(inspect.signature(F.mse_loss).parameters),
        _of_difference(lambda rms, _: 4 * rms**2),
        "loss",
        "Unit Scaling (arXiv 2303.11257), table of ops, mse_loss: 8^-1/2 per element",
    ),
    F.mse_loss,
)

_loss = partial(scaled_op, kind="loss", aliases=None)
nll_loss = _loss(F.nll_loss, _nll, reference="one element in num_classes has a gradient")
binary_cross_entropy = _loss(
    F.binary_cross_entropy,
    # (p - y) / (p (1 - p)) at p = 1/2, where an untrained classifier is.
    lambda arguments: _factors(arguments, input=4.0),
    reference="the derivative 2 at a probability of 1/2",
)
binary_cross_entropy_with_logits = _loss(
    F.binary_cross_entropy_with_logits,
    _bce_with_logits,
    reference="E (sigmoid(x) - y)^2 for normal logits and fair targets, by quadrature",
)
kl_div = _loss(
    F.kl_div, _kl_div, reference="E target^2 for a target that is a softmax of unit logits"
)
l1_loss = _loss(F.l1_loss, _of_difference(lambda *_: 1.0), reference="its derivative is a sign")
smooth_l1_loss = _loss(
    F.smooth_l1_loss,
    _of_difference(_smooth_l1),
    reference="E of a normal difference, clipped at beta, over beta, squared, by quadrature",
)
huber_loss = _loss(
    F.huber_loss,
    _of_difference(lambda rms, arguments: _clipped(rms, float(arguments.get("delta", 1.0)))),
    reference="E of a normal difference, clipped at delta, squared, by quadrature",
)
gaussian_nll_loss = _loss(
    F.gaussian_nll_loss,
    _gaussian_nll,
    reference="moments of (input - target) and of (1 - (input - target)^2)/2 at a variance of 1",
)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    mult: float = 1.0,
) -> Tensor:
    """Return the cross-entropy of ``mult * input`` with a unit-scaled gradient.

    The gradient of each token that is not ignored has RMS 1 over the V classes for logits near 0.
    This holds for any reduction, class weights and number of ignored tokens.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops: V / (V - 1)**0.5 per
        token. Unlike there a mean divides by the tokens that count, as in torch.
    """
    kwargs = {
        "weight": weight,
        "size_average": size_average,
        "ignore_index": ignore_index,
        "reduce": reduce,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    correction: float | Tensor = 1.0
    if not target.is_floating_point():
        is_mean = reduction_of(kwargs) == "mean"
        correction = _correction(target, weight, ignore_index, is_mean)
    return scaled_loss(
        _CROSS_ENTROPY, F.cross_entropy, (input, target), kwargs, mult=mult, correction=correction
    )


def _correction(
    target: Tensor, weight: Tensor | None, ignore_index: int, is_mean: bool
) -> float | Tensor:
    """Correct the factor by the targets' values, since the rule knows shapes only."""
    counts = target != ignore_index
    if weight is None:
        return counts.float().mean() if is_mean else 1.0
    weights = weight.float()[target.clamp(0, weight.numel() - 1)] * counts
    rms = (weights.square().sum() / counts.sum().clamp(min=1)).sqrt()
    return weights.mean() / rms if is_mean else 1 / rms


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the mean squared error with unit-scaled gradients.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops: 8^-1/2 per element.
    """
    if input.shape != target.shape:
        raise ValueError(
            f"target={tuple(target.shape)}: the shape of input is {tuple(input.shape)}. Expected "
            "the same one. Reshape or expand the target."
        )
    kwargs = {"size_average": size_average, "reduce": reduce, "reduction": reduction}
    return scaled_loss(_MSE_LOSS, F.mse_loss, (input, target), kwargs)

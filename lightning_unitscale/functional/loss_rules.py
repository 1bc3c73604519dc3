"""Scale rules of losses: the value stays the plain one, the gradient is brought to RMS 1.

``output`` is 1 for each of them, and a gradient's factor is for a gradient of 1 at the loss. All
gradients are linear in that one, so the same factor may be applied there instead.

Targets are taken as independent of the predictions: at the start of training they are.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops, cross_entropy, mse_loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from lightning_unitscale.functional.quadrature import elementwise_moments
from lightning_unitscale.functional.rule import Factors, ScaleRule, register_rule, unit_factor
from lightning_unitscale.functional.sizes import numel_of, shape_of, specialized
from lightning_unitscale.functional.softmax_moments import softmax_moments


def reduction_of(arguments: Mapping[str, Any]) -> str:
    """The ``reduction`` of a loss, from it or from the older ``size_average`` and ``reduce``."""
    size_average, reduce = arguments.get("size_average"), arguments.get("reduce")
    if size_average is None and reduce is None:
        return str(arguments.get("reduction", "mean"))
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _count(arguments: Mapping[str, Any], rows: float | None = None) -> float:
    """What the gradient of each element was divided by.

    Args:
        arguments: Of the call.
        rows: What a mean divides by; the number of elements by default.
    """
    reduction = reduction_of(arguments)
    if reduction == "batchmean":
        return shape_of(arguments["input"])[0]
    if reduction == "mean":
        return numel_of(arguments["input"]) if rows is None else rows
    return 1.0


def _one(mean_square: float, count: float, mult: float = 1.0) -> float:
    return max(count, 1) * unit_factor(mult**2 * mean_square)


def num_classes(arguments: Mapping[str, Any]) -> int:
    """Size of the dimension of ``input`` that holds the classes."""
    shape = shape_of(arguments["input"])
    return shape[1] if len(shape) > 1 else shape[0]


def _cross_entropy(arguments: Mapping[str, Any]) -> Factors:
    classes = num_classes(arguments)
    rows = numel_of(arguments["input"]) / max(classes, 1)
    # Uniform probabilities 1/V against one target: (V - 1)/V^2 per logit. Smoothing moves the
    # target towards the uniform one.
    sharpness = 1 - arguments.get("label_smoothing", 0.0)
    square = sharpness**2 * (classes - 1) / max(classes, 1) ** 2
    factor = _one(square, _count(arguments, rows), arguments.get("mult", 1.0))
    return Factors(1.0, {"input": factor})


def _nll(arguments: Mapping[str, Any]) -> Factors:
    classes = num_classes(arguments)
    rows = numel_of(arguments["input"]) / max(classes, 1)
    count = _count(arguments, rows)
    return Factors(1.0, {"input": _one(1 / classes, count, arguments.get("mult", 1.0))})


def _bce_with_logits(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    # E (sigmoid(x) - y)^2 for a fair target: E sigmoid(x)^2.
    square, _ = elementwise_moments(torch.sigmoid, mult)
    return Factors(1.0, {"input": _one(square, _count(arguments), mult)})


def _bce(arguments: Mapping[str, Any]) -> Factors:
    # (p - y) / (p (1 - p)) at p = 1/2, where an untrained classifier is.
    return Factors(1.0, {"input": _one(4.0, _count(arguments), arguments.get("mult", 1.0))})


def _kl_div(arguments: Mapping[str, Any]) -> Factors:
    shape = shape_of(arguments["input"])
    classes = specialized(shape[-1]) if shape else 1
    # The gradient is minus the target, taken as a softmax of unit logits.
    square = softmax_moments(classes, 1.0).output / max(classes, 1)
    count = _count(arguments)
    return Factors(1.0, {"input": _one(square, count, arguments.get("mult", 1.0))})


def _of_difference(
    mean_square: Callable[[float, Mapping[str, Any]], float],
) -> Callable[[Mapping[str, Any]], Factors]:
    """Factors of a loss that is a function of ``input - target``.

    Args:
        mean_square: Mean square of its derivative, from the RMS of the difference.
    """

    def factors(arguments: Mapping[str, Any]) -> Factors:
        mult = arguments.get("mult", 1.0)
        square = mean_square(math.sqrt(mult**2 + 1), arguments)
        count = _count(arguments)
        return Factors(1.0, {"input": _one(square, count, mult), "target": _one(square, count)})

    return factors


def _mse(rms: float, arguments: Mapping[str, Any]) -> float:
    return 4 * rms**2


def _l1(rms: float, arguments: Mapping[str, Any]) -> float:
    return 1.0


def _huber(rms: float, arguments: Mapping[str, Any]) -> float:
    return _clipped(rms, float(arguments.get("delta", 1.0)))


def _smooth_l1(rms: float, arguments: Mapping[str, Any]) -> float:
    beta = float(arguments.get("beta", 1.0))
    return _clipped(rms, beta) / beta**2 if beta else 1.0


def _clipped(rms: float, limit: float) -> float:
    """Mean square of a difference that is clipped at a limit."""
    square, _ = elementwise_moments(F.hardtanh, rms, (("min_val", -limit), ("max_val", limit)))
    return square


def _gaussian_nll(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    count = _count(arguments)
    # The difference d is normal with variance q, and the variance given is 1: the derivatives are
    # d, of mean square q, and (1 - d^2)/2, of mean square (1 - 2q + 3q^2)/4.
    q = mult**2 + 1
    return Factors(
        1.0,
        {
            "input": _one(q, count, mult),
            "target": _one(q, count),
            "var": _one((1 - 2 * q + 3 * q**2) / 4, count),
        },
    )


def _loss(
    name: str,
    parameters: str,
    factors: Callable[[Mapping[str, Any]], Factors],
    reference: str,
) -> ScaleRule:
    rule = ScaleRule(name, tuple(parameters.split()), factors, "loss", reference)
    return register_rule(rule, getattr(F, name))


_OLD = "size_average reduce reduction"
CROSS_ENTROPY = _loss(
    "cross_entropy",
    "input target weight size_average ignore_index reduce reduction label_smoothing",
    _cross_entropy,
    "Unit Scaling (arXiv 2303.11257), table of ops; targets that are probabilities count as "
    "sharp, weights and ignored tokens as ordinary ones, since a rule sees no values",
)
NLL_LOSS = _loss(
    "nll_loss",
    "input target weight size_average ignore_index reduce reduction",
    _nll,
    "one element in num_classes has a gradient",
)
BINARY_CROSS_ENTROPY = _loss(
    "binary_cross_entropy",
    f"input target weight {_OLD}",
    _bce,
    "the derivative 2 at a probability of 1/2",
)
BINARY_CROSS_ENTROPY_WITH_LOGITS = _loss(
    "binary_cross_entropy_with_logits",
    f"input target weight {_OLD} pos_weight",
    _bce_with_logits,
    "E (sigmoid(x) - y)^2 for normal logits and fair targets, by quadrature",
)
KL_DIV = _loss(
    "kl_div",
    f"input target {_OLD} log_target",
    _kl_div,
    "E target^2 for a target that is a softmax of unit logits",
)
L1_LOSS = _loss(
    "l1_loss", f"input target {_OLD} weight", _of_difference(_l1), "its derivative is a sign"
)
SMOOTH_L1_LOSS = _loss(
    "smooth_l1_loss",
    f"input target {_OLD} beta",
    _of_difference(_smooth_l1),
    "E of a normal difference, clipped at beta, over beta, squared, by quadrature",
)
HUBER_LOSS = _loss(
    "huber_loss",
    "input target reduction delta weight",
    _of_difference(_huber),
    "E of a normal difference, clipped at delta, squared, by quadrature",
)
MSE_LOSS = _loss(
    "mse_loss",
    f"input target {_OLD} weight",
    _of_difference(_mse),
    "Unit Scaling (arXiv 2303.11257), table of ops, mse_loss: 8^-1/2 per element",
)
GAUSSIAN_NLL_LOSS = _loss(
    "gaussian_nll_loss",
    "input target var full eps reduction",
    _gaussian_nll,
    "moments of (input - target) and of (1 - (input - target)^2)/2 at a variance of 1",
)

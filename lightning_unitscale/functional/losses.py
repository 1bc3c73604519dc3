"""Unit-scaled losses that the literature names: cross_entropy, mse_loss.

Their value is that of the plain loss, so that it compares with an unscaled run; their gradient is
at RMS 1 for every element that takes part.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.loss_rules import reduction_of
from lightning_unitscale.functional.scaled_call import rule_for, scaled_loss

_CROSS_ENTROPY = rule_for(F.cross_entropy)
_MSE = rule_for(F.mse_loss)


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
    """Cross-entropy of ``mult * input`` whose gradient is unit-scaled.

    The gradient of each token that is not ignored has RMS 1 over the V classes, for logits near 0,
    whatever the reduction, the weights of the classes and the number of ignored tokens.

    Args:
        input: Logits, ``(V,)``, ``(batch, V)`` or ``(batch, V, *)``.
        target: Classes, ``()``, ``(batch,)`` or ``(batch, *)``; or probabilities of the shape of
            ``input``, taken as sharp.
        weight: ``(V,)``, of the classes.
        size_average: Deprecated in torch.
        ignore_index: Class of targets that do not count.
        reduce: Deprecated in torch.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: In [0, 1).
        mult: Multiplier of the logits.

    Returns:
        The plain loss.

    Raises:
        TypeError: If ``input`` is not a floating-point tensor.
        ValueError: If ``mult`` is not a positive number.

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
    """What the values of the targets change in the factor, which the rule takes from shapes."""
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
    """Mean squared error whose gradients are unit-scaled.

    Args:
        input: Any shape, at RMS 1.
        target: The same shape, at RMS 1.
        size_average: Deprecated in torch.
        reduce: Deprecated in torch.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        The plain loss.

    Raises:
        TypeError: If ``input`` is not a floating-point tensor.
        ValueError: If the shapes differ: the sums that broadcasting adds to the gradient are seldom
            meant.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops: 8^-1/2 per element.
    """
    if input.shape != target.shape:
        raise ValueError(
            f"target={tuple(target.shape)}: the shape of input is {tuple(input.shape)}; expected "
            "the same one. Reshape or expand the target."
        )
    kwargs = {"size_average": size_average, "reduce": reduce, "reduction": reduction}
    return scaled_loss(_MSE, F.mse_loss, (input, target), kwargs)

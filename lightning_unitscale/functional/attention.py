"""Define scale rules and unit-scaled forms of softmax and attention.

Attention over unit queries, keys and values has logits of standard deviation s = mult * scale *
sqrt(d). Its output is a sum of values weighted by the probabilities p, hence E sum p^2. So is the
gradient of the values, over the queries. The gradient of a logit is p (dp - sum p dp), where dp has
variance d_v. That of a query is `scale` times its sum with the keys.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops, softmax: a fit.
    Blake et al., "u-muP" (arXiv 2407.17465), appendix on attention: a fit.

Factors are the moments of a softmax of normal logits, by quadrature. With the published fits of the
softmax's factors the RMS would be:

|  | mult 0.25 | mult 1 | mult 4 |
|---|---|---|---|
| softmax over 8, output | 1.011 | 1.108 | 1.004 |
| softmax over 1024, output | 0.978 | 0.825 | 1.054 |
| softmax over 8, gradient | 0.924 | 0.845 | 0.635 |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.call import positive, scaled_call, scaled_op
from lightning_unitscale.functional.moments import causal_softmax_moments, softmax_moments
from lightning_unitscale.functional.rules import (
    Factors,
    ScaleRule,
    product,
    register_rule,
    shape_of,
    specialized,
    unit_factors,
)

__all__ = ["log_softmax", "scaled_dot_product_attention", "softmax", "softmin"]


def _softmax(arguments: Mapping[str, Any]) -> Factors:
    n, mult = _num_logits(arguments), arguments.get("mult", 1.0)
    moments = softmax_moments(n, mult)
    return unit_factors(moments.output / max(n, 1), input=mult**2 * moments.gradient / max(n, 1))


def _log_softmax(arguments: Mapping[str, Any]) -> Factors:
    n, mult = _num_logits(arguments), arguments.get("mult", 1.0)
    # The mean square of g - p sum(g).
    square = 1 - 2 / max(n, 1) + softmax_moments(n, mult).output
    return unit_factors(1.0, input=mult**2 * square)


def _num_logits(arguments: Mapping[str, Any]) -> int:
    shape = shape_of(arguments["input"])
    dim = arguments.get("dim")
    if dim is None:  # torch guesses it, with a warning
        dim = 0 if len(shape) in (0, 1, 3) else 1
    return specialized(shape[dim]) if shape else 1


def _attention(arguments: Mapping[str, Any]) -> Factors:
    query, key, value = (shape_of(arguments[name]) for name in ("query", "key", "value"))
    num_queries, num_keys = specialized(query[-2]), specialized(key[-2])
    width = specialized(query[-1])
    mult = arguments.get("mult", 1.0)
    scale = arguments.get("scale")
    scale = width**-0.5 if scale is None else scale
    std = mult * scale * width**0.5
    if arguments.get("is_causal"):
        moments = causal_softmax_moments(num_queries, num_keys, std)
    else:
        moments = softmax_moments(num_keys, std)
    kept = 1 - arguments.get("dropout_p", 0.0)
    # Sums over the queries of all heads and samples that share a key.
    sharing = num_queries * product(query[:-2]) / max(num_keys * product(key[:-2]), 1)
    logits = moments.gradient * value[-1] * scale**2 * mult**2 / kept if kept > 0 else 0.0
    output = moments.output / kept if kept > 0 else 0.0
    return unit_factors(output, query=logits, key=logits * sharing, value=output * sharing)


softmax = scaled_op(
    F.softmax,
    _softmax,
    "activation",
    "exact moments of a softmax of normal logits: about n times the probabilities",
)
softmin = scaled_op(
    F.softmin, _softmax, "activation", "a softmax of the negative, which is as normal"
)
log_softmax = scaled_op(
    F.log_softmax,
    _log_softmax,
    "normalization",
    "unscaled: it is half of a loss, whose value stays unscaled; its gradient "
    "g - p sum(g) has the mean square 1 - 2 / n + sum p^2",
)
_ATTENTION = register_rule(
    ScaleRule(
        "scaled_dot_product_attention",
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
        _attention,
        "other",
        "exact moments of a softmax of normal logits; a mask counts only as is_causal, since a "
        "rule sees no values",
        operands=("query", "key", "value"),
    ),
    F.scaled_dot_product_attention,
)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mult: float = 1.0,
    constraint: str | None = "to_output_scale",
    output_scale: float | None = None,
) -> Tensor:
    """Return unit-scaled attention with logits ``mult / head_size * query @ key.T``.

    ``scale`` replaces ``1 / head_size``, and ``mult`` is one more positive factor on the logits.
    ``output_scale`` is a positive factor on the output and the gradients in place of the rule's.

    References:
        Blake et al., "u-muP" (arXiv 2407.17465), appendix on attention: 1/head_size in the logits.
        Factors are the moments of a softmax of normal logits.
    """
    mult = positive("scaled_dot_product_attention: mult", mult)
    if scale is None:
        scale = 1 / specialized(query.shape[-1])
    rule = _ATTENTION
    if output_scale is not None:
        factor = positive("scaled_dot_product_attention: output_scale", output_scale)
        same = Factors(factor, dict.fromkeys(("query", "key", "value"), factor))
        rule = replace(rule, factors=lambda _: same)
    return scaled_call(
        rule,
        F.scaled_dot_product_attention,
        (query, key, value, attn_mask, dropout_p, is_causal),
        {"scale": mult * scale, "enable_gqa": enable_gqa},
        constraint=constraint,
    )

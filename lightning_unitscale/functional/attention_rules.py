"""Scale rules of softmax and of attention, from the exact moments of a softmax of normal logits.

Attention over unit queries, keys and values has logits of standard deviation s = mult * scale *
sqrt(d). Its output is a sum of values weighted by the probabilities p, hence E sum p^2, and so is
the gradient of the values, over the queries. The gradient of a logit is p (dp - sum p dp), where dp
has variance d_v; that of a query is `scale` times its sum with the keys.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops, softmax: a fit.
    Blake et al., "u-muP" (arXiv 2407.17465), appendix on attention: a fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_unitscale.functional.rule import Factors, ScaleRule, register_rule, unit_factor
from lightning_unitscale.functional.sizes import product, shape_of, specialized
from lightning_unitscale.functional.softmax_moments import (
    SoftmaxMoments,
    causal_softmax_moments,
    softmax_moments,
)


def _softmax(arguments: Mapping[str, Any]) -> Factors:
    n, mult = _num_logits(arguments), arguments.get("mult", 1.0)
    moments = softmax_moments(n, mult)
    return Factors(
        unit_factor(moments.output / max(n, 1)),
        {"input": unit_factor(mult**2 * moments.gradient / max(n, 1))},
    )


def _log_softmax(arguments: Mapping[str, Any]) -> Factors:
    n, mult = _num_logits(arguments), arguments.get("mult", 1.0)
    # The mean square of g - p sum(g).
    square = 1 - 2 / max(n, 1) + softmax_moments(n, mult).output
    return Factors(1.0, {"input": unit_factor(mult**2 * square)})


def _num_logits(arguments: Mapping[str, Any]) -> int:
    shape = shape_of(arguments["input"])
    dim = arguments.get("dim")
    if dim is None:  # what torch guesses, with a warning
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
    moments = _moments(num_queries, num_keys, std, bool(arguments.get("is_causal")))
    kept = 1 - arguments.get("dropout_p", 0.0)
    # Sums over the queries of all heads and samples that share a key.
    sharing = num_queries * product(query[:-2]) / max(num_keys * product(key[:-2]), 1)
    logits = moments.gradient * value[-1] * scale**2 * mult**2 / kept if kept > 0 else 0.0
    output = moments.output / kept if kept > 0 else 0.0
    return Factors(
        unit_factor(output),
        {
            "query": unit_factor(logits),
            "key": unit_factor(logits * sharing),
            "value": unit_factor(output * sharing),
        },
    )


def _moments(num_queries: int, num_keys: int, std: float, is_causal: bool) -> SoftmaxMoments:
    if is_causal:
        return causal_softmax_moments(num_queries, num_keys, std)
    return softmax_moments(num_keys, std)


SOFTMAX = register_rule(
    ScaleRule(
        "softmax",
        ("input", "dim", "_stacklevel", "dtype"),
        _softmax,
        "activation",
        "exact moments of a softmax of normal logits; e^(mult^2 / 2) / n for small mult",
    ),
    names=("softmax",),
)
SOFTMIN = register_rule(
    ScaleRule(
        "softmin",
        ("input", "dim", "_stacklevel", "dtype"),
        _softmax,
        "activation",
        "a softmax of the negative, which is as normal",
    ),
    names=("softmin",),
)
LOG_SOFTMAX = register_rule(
    ScaleRule(
        "log_softmax",
        ("input", "dim", "_stacklevel", "dtype"),
        _log_softmax,
        "normalization",
        "left as it is: it is half of a loss, whose value stays the plain one; its gradient "
        "g - p sum(g) has the mean square 1 - 2 / n + sum p^2",
    ),
    names=("log_softmax",),
)
ATTENTION = register_rule(
    ScaleRule(
        "scaled_dot_product_attention",
        (
            "query",
            "key",
            "value",
            "attn_mask",
            "dropout_p",
            "is_causal",
            "scale",
            "enable_gqa",
        ),
        _attention,
        "other",
        "exact moments of a softmax of normal logits; a mask counts only as is_causal, since a "
        "rule sees no values",
    ),
    names=("scaled_dot_product_attention",),
)

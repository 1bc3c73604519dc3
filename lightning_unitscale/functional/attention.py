"""Unit-scaled attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.scale import scale_bwd, scale_fwd
from lightning_unitscale.functional.scaled_call import positive, rule_for, scaled_call
from lightning_unitscale.functional.sizes import specialized

_ATTENTION = rule_for(F.scaled_dot_product_attention)


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
    """Unit-scaled attention with logits ``mult / head_size * query @ key.T``.

    Args:
        query: ``(batch, heads, queries, head_size)``, at RMS 1.
        key: ``(batch, heads, keys, head_size)``, at RMS 1.
        value: ``(batch, heads, keys, value_size)``, at RMS 1.
        attn_mask: As in torch. The factors know a mask only as ``is_causal``: of one that is passed
            here they see no values, and assume that every key is visible.
        dropout_p: As in torch.
        is_causal: As in torch; row i of the output sees ``i + 1`` keys, and is the larger the fewer
            they are.
        scale: Of the logits in place of ``1 / head_size``; ``mult`` multiplies it.
        enable_gqa: As in torch: fewer key and value heads than query heads.
        mult: Multiplier of the logits.
        constraint: Between the factors of the output and of the gradients of query, key and value.
        output_scale: A fixed factor for the output and all gradients. The derived one grows with
            the number of keys (about ``keys**0.5``), so a step of incremental decoding, which sees
            another number of keys than training did, would scale its output in another way: there
            pass the factor of training. ``None`` derives it from the shapes (and a compiled graph
            is then made for each number of keys).

    Returns:
        ``(batch, heads, queries, value_size)``.

    Raises:
        TypeError: If ``query`` is not a floating-point tensor.
        ValueError: If ``constraint``, ``mult`` or ``output_scale`` is not usable.

    References:
        Blake et al., "u-muP" (arXiv 2407.17465), appendix on attention: 1/head_size in the logits.
        Factors are the moments of a softmax of normal logits.
    """
    mult = positive("scaled_dot_product_attention: mult", mult)
    if scale is None:
        scale = 1 / specialized(query.shape[-1])
    if output_scale is not None:
        factor = positive("scaled_dot_product_attention: output_scale", output_scale)
        output = F.scaled_dot_product_attention(
            scale_bwd(query, factor),
            scale_bwd(key, factor),
            scale_bwd(value, factor),
            attn_mask,
            dropout_p,
            is_causal,
            scale=mult * scale,
            enable_gqa=enable_gqa,
        )
        return scale_fwd(output, factor)
    result: Tensor = scaled_call(
        _ATTENTION,
        F.scaled_dot_product_attention,
        (query, key, value, attn_mask, dropout_p, is_causal),
        {"scale": mult * scale, "enable_gqa": enable_gqa},
        constraint=constraint,
    )
    return result

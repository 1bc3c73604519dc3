"""Linear maps and embeddings: their scale rules and their unit-scaled forms.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of scaling factors.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.call import scaled_call, scaled_op
from lightning_unitscale.functional.moments import largest_of_normals
from lightning_unitscale.functional.rules import (
    Factors,
    ScaleRule,
    numel_of,
    register_rule,
    shape_of,
    unit_factors,
)

__all__ = ["bilinear", "embedding", "embedding_bag", "linear", "linear_readout"]

_REFERENCE = "Unit Scaling (arXiv 2303.11257), table of ops; u-muP (arXiv 2407.17465), table 2"


def _linear(arguments: Mapping[str, Any]) -> Factors:
    weight = shape_of(arguments["weight"])
    fan_in, fan_out = weight[-1], weight[0] if len(weight) > 1 else 1
    mult = arguments.get("mult", 1.0)
    rows = numel_of(arguments["input"]) / max(fan_in, 1)
    return unit_factors(mult**2 * fan_in, input=mult**2 * fan_out, weight=mult**2 * rows, bias=rows)


def _bilinear(arguments: Mapping[str, Any]) -> Factors:
    fan_out, left, right = shape_of(arguments["weight"])
    mult = arguments.get("mult", 1.0)
    rows = numel_of(arguments["input1"]) / max(left, 1)
    return unit_factors(
        mult**2 * left * right,
        input1=mult**2 * fan_out * right,
        input2=mult**2 * fan_out * left,
        weight=mult**2 * rows,
        bias=rows,
    )


def _embedding(arguments: Mapping[str, Any]) -> Factors:
    lookups = numel_of(arguments["input"])
    num_embeddings = shape_of(arguments["weight"])[0]
    return unit_factors(1.0, weight=lookups / num_embeddings)


def _embedding_bag(arguments: Mapping[str, Any]) -> Factors:
    input = shape_of(arguments["input"])
    num_embeddings, width = shape_of(arguments["weight"])
    lookups = numel_of(arguments["input"])
    if len(input) == 2:
        bags = float(input[0])
    else:
        offsets = arguments.get("offsets")
        bags = numel_of(offsets) - bool(arguments.get("include_last_offset"))
    size = lookups / max(bags, 1)
    mode = arguments.get("mode", "mean")
    if mode == "max":
        largest = largest_of_normals(max(round(size), 1))
        return unit_factors(largest, weight=bags / num_embeddings)
    share = 1 / size if mode == "mean" and size else 1.0
    return unit_factors(
        size * share**2, weight=share**2 * lookups / num_embeddings, per_sample_weights=width
    )


linear = scaled_op(
    F.linear,
    _linear,
    "linear",
    f"{_REFERENCE}. The gradients of weight and bias get ``rows**-0.5``, rows being those of this "
    "call: with averaged gradients of several devices, or accumulated ones, the caller corrects "
    "them",
    "input, weight, bias=None",
    weights="weight bias",
    operands="input weight",
)
bilinear = scaled_op(
    F.bilinear,
    _bilinear,
    "linear",
    "a sum of in1 * in2 independent products of unit variance, and so for its gradients",
    "input1, input2, weight, bias=None",
    weights="weight bias",
    operands="input1 input2 weight",
)
# torch.embedding has the two tensors the other way round, but F.embedding is what a graph holds.
_EMBEDDING = register_rule(
    ScaleRule(
        "embedding",
        tuple(inspect.signature(F.embedding).parameters),
        _embedding,
        "linear",
        f"{_REFERENCE}; a row of the weight is looked up lookups / num_embeddings times",
        ("weight",),
    ),
    F.embedding,
)
embedding_bag = scaled_op(
    F.embedding_bag,
    _embedding_bag,
    "linear",
    "an embedding, and a sum, mean or maximum over bags of equal size",
    weights="weight",
    aliases=None,
)


def linear_readout(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    constraint: str | None = None,
) -> Tensor:
    """Unit-scaled linear map for a network's final output: its factor is ``1 / in_features``.

    References:
        Blake et al., "u-muP" (arXiv 2407.17465), table 2, output weights.
    """
    result: Tensor = linear(input, weight, bias, constraint=constraint, scale_power=(1.0, 0.5, 0.5))
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

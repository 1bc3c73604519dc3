"""Scale rules of layers that multiply by a weight: linear, bilinear, embedding.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of scaling factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from lightning_unitscale.functional.quadrature import largest_of_normals
from lightning_unitscale.functional.rule import Factors, ScaleRule, register_rule, unit_factor
from lightning_unitscale.functional.sizes import numel_of, shape_of

_REFERENCE = "Unit Scaling (arXiv 2303.11257), table of ops; u-muP (arXiv 2407.17465), table 2"


def _linear(arguments: Mapping[str, Any]) -> Factors:
    weight = shape_of(arguments["weight"])
    fan_in, fan_out = weight[-1], weight[0] if len(weight) > 1 else 1
    mult = arguments.get("mult", 1.0)
    rows = numel_of(arguments["input"]) / max(fan_in, 1)
    return Factors(
        unit_factor(mult**2 * fan_in),
        {
            "input": unit_factor(mult**2 * fan_out),
            "weight": unit_factor(mult**2 * rows),
            "bias": unit_factor(rows),
        },
    )


def _bilinear(arguments: Mapping[str, Any]) -> Factors:
    fan_out, left, right = shape_of(arguments["weight"])
    mult = arguments.get("mult", 1.0)
    rows = numel_of(arguments["input1"]) / max(left, 1)
    return Factors(
        unit_factor(mult**2 * left * right),
        {
            "input1": unit_factor(mult**2 * fan_out * right),
            "input2": unit_factor(mult**2 * fan_out * left),
            "weight": unit_factor(mult**2 * rows),
            "bias": unit_factor(rows),
        },
    )


def _embedding(arguments: Mapping[str, Any]) -> Factors:
    lookups = numel_of(arguments["input"])
    num_embeddings = shape_of(arguments["weight"])[0]
    return Factors(1.0, {"weight": unit_factor(lookups / num_embeddings)})


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
        return Factors(unit_factor(largest), {"weight": unit_factor(bags / num_embeddings)})
    share = 1 / size if mode == "mean" and size else 1.0
    return Factors(
        unit_factor(size * share**2),
        {
            "weight": unit_factor(share**2 * lookups / num_embeddings),
            "per_sample_weights": unit_factor(width),
        },
    )


LINEAR = register_rule(
    ScaleRule(
        "linear",
        ("input", "weight", "bias"),
        _linear,
        "linear",
        _REFERENCE,
        weights=("weight", "bias"),
    ),
    names=("linear",),
)
BILINEAR = register_rule(
    ScaleRule(
        "bilinear",
        ("input1", "input2", "weight", "bias"),
        _bilinear,
        "linear",
        "a sum of in1 * in2 independent products of unit variance, and so for its gradients",
        weights=("weight", "bias"),
    ),
    names=("bilinear",),
)
# torch.embedding has the two tensors the other way round, but F.embedding is what a graph holds.
EMBEDDING = register_rule(
    ScaleRule(
        "embedding",
        (
            "input",
            "weight",
            "padding_idx",
            "max_norm",
            "norm_type",
            "scale_grad_by_freq",
            "sparse",
        ),
        _embedding,
        "linear",
        _REFERENCE + "; a row of the weight is looked up lookups / num_embeddings times",
        weights=("weight",),
    ),
    F.embedding,
)
EMBEDDING_BAG = register_rule(
    ScaleRule(
        "embedding_bag",
        (
            "input",
            "weight",
            "offsets",
            "max_norm",
            "norm_type",
            "scale_grad_by_freq",
            "mode",
            "sparse",
            "per_sample_weights",
            "include_last_offset",
            "padding_idx",
        ),
        _embedding_bag,
        "linear",
        "an embedding, and a sum, mean or maximum over bags of equal size",
        weights=("weight",),
    ),
    F.embedding_bag,
)

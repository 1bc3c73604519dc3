"""Scale rules of normalizations: their output is at RMS 1 by itself, their weights sum a batch.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops, layer_norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from lightning_unitscale.functional.rule import Factors, ScaleRule, register_rule, unit_factor
from lightning_unitscale.functional.sizes import numel_of, product, shape_of

_REFERENCE = "Unit Scaling (arXiv 2303.11257), table of ops, layer_norm"


def _normalization(arguments: Mapping[str, Any], num_weights: float) -> Factors:
    uses = numel_of(arguments["input"]) / max(num_weights, 1)
    # The output does not depend on the scale of the input: no `mult` anywhere.
    gradients = {"input": 1.0, "weight": unit_factor(uses), "bias": unit_factor(uses)}
    return Factors(1.0, gradients)


def _over_last(arguments: Mapping[str, Any]) -> Factors:
    return _normalization(arguments, product(arguments["normalized_shape"]))


def _without_bias(arguments: Mapping[str, Any]) -> Factors:
    factors = _over_last(arguments)
    gradients = {name: factors.gradients[name] for name in ("input", "weight")}
    return Factors(factors.output, gradients)


def _over_channels(arguments: Mapping[str, Any]) -> Factors:
    shape = shape_of(arguments["input"])
    return _normalization(arguments, shape[1])


def _local_response_norm(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    alpha, beta = arguments.get("alpha", 1e-4), arguments.get("beta", 0.75)
    divisor = (arguments.get("k", 1.0) + alpha * mult**2) ** beta
    factor = unit_factor((mult / divisor) ** 2)
    return Factors(factor, {"input": factor})


LAYER_NORM = register_rule(
    ScaleRule(
        "layer_norm",
        ("input", "normalized_shape", "weight", "bias", "eps"),
        _over_last,
        "normalization",
        _REFERENCE,
        weights=("weight", "bias"),
    ),
    names=("layer_norm",),
)
RMS_NORM = register_rule(
    ScaleRule(
        "rms_norm",
        ("input", "normalized_shape", "weight", "eps"),
        _without_bias,
        "normalization",
        _REFERENCE,
        weights=("weight",),
    ),
    names=("rms_norm",),
)
GROUP_NORM = register_rule(
    ScaleRule(
        "group_norm",
        ("input", "num_groups", "weight", "bias", "eps"),
        _over_channels,
        "normalization",
        _REFERENCE + "; one weight per channel",
        weights=("weight", "bias"),
    ),
    names=("group_norm",),
)
# The functions of torch.nn.functional and of torch have their parameters in different orders.
_RUNNING_FIRST = "input running_mean running_var weight bias"
_WEIGHTS_FIRST = "input weight bias running_mean running_var"


def _register(name: str, function: Callable[..., Any], parameters: str) -> None:
    rule = ScaleRule(
        name,
        tuple(parameters.split()),
        _over_channels,
        "normalization",
        _REFERENCE + "; one weight per channel, running statistics like the batch's",
        weights=("weight", "bias"),
    )
    register_rule(rule, function)


_register("batch_norm", F.batch_norm, f"{_RUNNING_FIRST} training momentum eps")
_register("batch_norm", torch.batch_norm, f"{_WEIGHTS_FIRST} training momentum eps cudnn_enabled")
_register("instance_norm", F.instance_norm, f"{_RUNNING_FIRST} use_input_stats momentum eps")
_register(
    "instance_norm",
    torch.instance_norm,
    f"{_WEIGHTS_FIRST} use_input_stats momentum eps cudnn_enabled",
)
LOCAL_RESPONSE_NORM = register_rule(
    ScaleRule(
        "local_response_norm",
        ("input", "size", "alpha", "beta", "k"),
        _local_response_norm,
        "other",
        "divides by (k + alpha * mean square)^beta",
    ),
    names=("local_response_norm",),
)

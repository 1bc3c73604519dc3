"""Normalizations: their scale rules and their unit-scaled forms.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops, layer_norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from lightning_unitscale.functional.call import scaled_op
from lightning_unitscale.functional.rules import (
    Factors,
    numel_of,
    product,
    shape_of,
    torch_rule,
    unit_factor,
)

__all__ = [
    "batch_norm", "group_norm", "instance_norm", "layer_norm", "local_response_norm", "rms_norm",
]  # fmt: skip

_REFERENCE = (
    "Unit Scaling (arXiv 2303.11257), table of ops, layer_norm: gradients of weight and bias get "
    "(numel(weight) / numel(input))^0.5"
)


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


torch_rule(
    "layer_norm",
    "input normalized_shape weight bias eps",
    _over_last,
    "normalization",
    _REFERENCE,
    weights="weight bias",
)
torch_rule(
    "rms_norm",
    "input normalized_shape weight eps",
    _without_bias,
    "normalization",
    _REFERENCE,
    weights="weight",
)
torch_rule(
    "group_norm",
    "input num_groups weight bias eps",
    _over_channels,
    "normalization",
    _REFERENCE + "; one weight per channel",
    weights="weight bias",
)
# The functions of torch.nn.functional and of torch have their parameters in different orders.
_RUNNING_FIRST = "input running_mean running_var weight bias"
_WEIGHTS_FIRST = "input weight bias running_mean running_var"
for _function, _parameters in (
    (F.batch_norm, f"{_RUNNING_FIRST} training momentum eps"),
    (torch.batch_norm, f"{_WEIGHTS_FIRST} training momentum eps cudnn_enabled"),
    (F.instance_norm, f"{_RUNNING_FIRST} use_input_stats momentum eps"),
    (torch.instance_norm, f"{_WEIGHTS_FIRST} use_input_stats momentum eps cudnn_enabled"),
):
    torch_rule(
        _function.__name__,
        _parameters,
        _over_channels,
        "normalization",
        _REFERENCE + "; one weight per channel, running statistics like the batch's",
        _function,
        weights="weight bias",
    )
torch_rule(
    "local_response_norm",
    "input size alpha beta k",
    _local_response_norm,
    "other",
    "divides by (k + alpha * mean square)^beta",
)

layer_norm = scaled_op(F.layer_norm)
rms_norm = scaled_op(F.rms_norm)
group_norm = scaled_op(F.group_norm)
batch_norm = scaled_op(F.batch_norm)
instance_norm = scaled_op(F.instance_norm)
local_response_norm = scaled_op(F.local_response_norm)

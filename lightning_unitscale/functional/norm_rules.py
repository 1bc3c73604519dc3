"""Scale rules of normalizations: their output is at RMS 1 by itself, their weights sum a batch.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops, layer_norm.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        _over_last,
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
_RUNNING = ("running_mean", "running_var")
_WEIGHTS = ("weight", "bias")
for _name, _orders in {
    "batch_norm": {
        F.batch_norm: (*_RUNNING, *_WEIGHTS, "training", "momentum", "eps"),
        torch.batch_norm: (*_WEIGHTS, *_RUNNING, "training", "momentum", "eps", "cudnn_enabled"),
    },
    "instance_norm": {
        F.instance_norm: (*_RUNNING, *_WEIGHTS, "use_input_stats", "momentum", "eps"),
        torch.instance_norm: (
            *_WEIGHTS,
            *_RUNNING,
            "use_input_stats",
            "momentum",
            "eps",
            "cudnn_enabled",
        ),
    },
}.items():
    for _function, _parameters in _orders.items():
        register_rule(
            ScaleRule(
                _name,
                ("input", *_parameters),
                _over_channels,
                "normalization",
                _REFERENCE + "; one weight per channel, running statistics like the batch's",
                weights=_WEIGHTS,
            ),
            _function,
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

"""What a user is told of the learning rates that his optimizer gets by scale rules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_unitscale.optim.learning_rates import (
    Method,
    ParameterInfo,
    family_of,
)
from lightning_unitscale.optim.optimizers import Family
from lightning_unitscale.optim.scaled_step import first_peak_rate

# More than this share of a weight in every step is a decay that was meant for AdamW's convention.
_LARGE_DECAY = 2.0**-8
# A rate of u-muP below it is hardly meant: the paper's searches start at 2**-2 and above.
_SMALL_RATE = 2.0**-6


def rate_notes(
    optimizer: Optimizer, infos: Mapping[Tensor, ParameterInfo], method: Method
) -> list[str]:
    """Sentences for the user on the rates of an optimizer; none if all is as expected."""
    name = type(optimizer).__name__
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(param in infos for param in parameters):
        return []
    family, notes = family_of(optimizer), []
    if family is Family.LINEAR and method == "match":
        notes.append(
            f"lr_scaling='match': the steps of {name} are as large as the gradient, which unit "
            "scaling changes, so no rate makes them what they were; it gets the rates of u-muP, "
            "and its learning rate wants tuning."
        )
    if isinstance(optimizer, torch.optim.RAdam):
        notes.append(
            f"{name}: its first steps are not normalized, and with gradients at unit scale they "
            "are as large as later ones; give them a warm-up."
        )
    notes += [
        f"{info.fqn}: tied to a second role; its rate is that of its role {info.role.value!r}."
        for info in (infos[param] for param in parameters if param in infos)
        if info.is_tied
    ]
    decays = [float(group.get("weight_decay") or 0.0) for group in optimizer.param_groups]
    if method == "u-mup" and max(decays, default=0.0) > _LARGE_DECAY:
        notes.append(
            f"lr_scaling='u-mup': weight_decay={max(decays):g} is independent of the learning "
            f"rate: weights shrink by {max(decays):.1%} in every step at the peak rate; u-muP's "
            "own choice is 2**-13."
        )
    rate = max(first_peak_rate(group) for group in optimizer.param_groups)
    if method == "u-mup" and family is Family.SCALE_INVARIANT and 0 < rate < _SMALL_RATE:
        notes.append(
            f"lr_scaling='u-mup': lr={rate:g} is a usual rate of the plain model, at which this "
            "one learns slowly; u-muP's are near 1. Search it from 2**-2 to 2**3, or pass "
            "lr_scaling='match' (that of method='unit-scaling') to keep the plain model's."
        )
    unknown = sum(param not in infos and param.requires_grad for param in parameters)
    if unknown:
        notes.append(
            f"{name}: {unknown} of its {len(parameters)} parameters are in no scaled graph; their "
            "rates stay as they are."
        )
    return notes

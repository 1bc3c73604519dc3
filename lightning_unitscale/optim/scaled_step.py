"""Learning rates and weight decays per parameter, as :mod:`.learning_rates` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_unitscale.optim.learning_rates import (
    Method,
    ParameterInfo,
    RateFactors,
    check_group,
    check_method,
    rate_factors,
    rate_notes,
)
from lightning_unitscale.optim.optimizers import is_decay_decoupled
from lightning_unitscale.optim.split_step import Group, SplitStep


def scale_learning_rates(
    optimizer: Optimizer, infos: Mapping[Tensor, ParameterInfo], method: Method
) -> ScaledStep:
    """Let an optimizer step with each parameter's own learning rate and weight decay.

    ``optimizer.param_groups`` stays as the user and the schedulers made it, at all times: what
    they, the closure, the learning-rate monitor and checkpoints see is unchanged. Attaching again
    replaces what was attached before. A parameter that is not in ``infos`` keeps its rate. Copies
    of the optimizer (``deepcopy``, pickle) are plain ones.

    Args:
        optimizer: A torch optimizer itself, not a wrapper of it.
        infos: Role and scale of each parameter.
        method: ``"match"`` keeps each parameter's relative updates; ``"u-mup"`` takes the rates of
            u-muP.

    Returns:
        A handle, whose ``remove()`` ends it.

    Raises:
        ValueError: If the optimizer's rates cannot follow (see ``check_group``), or a scale in
            ``infos`` is not positive.
    """
    check_method(method)
    step = ScaledStep(optimizer, infos, method)
    step.attach(optimizer)
    return step


class ScaledStep(SplitStep[RateFactors]):
    """An optimizer's steps with each parameter's own rate.

    Args:
        optimizer: The optimizer.
        infos: Role and scale of each parameter.
        method: How learning rates follow.

    Attributes:
        notes: Notes for the user, to be shown once.
    """

    neutral = RateFactors()
    advice = "pass lr_scaling=None and choose the rates yourself"

    def __init__(
        self, optimizer: Optimizer, infos: Mapping[Tensor, ParameterInfo], method: Method
    ) -> None:
        super().__init__(optimizer)
        self._method: Method = method
        # By identity, since a tensor's own hash is slow; infos keeps the parameters alive.
        self._infos = infos
        self._known = {id(param) for param in infos}
        self._factors: dict[bool, dict[int, RateFactors]] = {}
        self._peak_rates: list[float] = []
        for group in optimizer.param_groups:
            self._adopt(group)
        self.notes = rate_notes(optimizer, infos, method) if self._factors else []

    def factors(self, group: Group, index: int) -> Sequence[RateFactors]:
        """Factors on the rate and the decay of each parameter; a new group is checked first."""
        if index == len(self._peak_rates):
            self._adopt(group)
        factors = self._factors.get(is_decay_decoupled(self._stand_in, group), {})
        return [factors.get(id(param), self.neutral) for param in group["params"]]

    def settings(self, group: Group, index: int, factors: RateFactors) -> dict[str, Any]:
        """Rate, decay and, of Adafactor, the smallest RMS of a parameter."""
        settings: dict[str, Any] = {"lr_scale": factors.lr}
        if factors.lr != 1:
            settings["lr"] = group["lr"] * factors.lr
        if "weight_decay" in group:
            decay = factors.weight_decay
            peak_rate = _peak_rate(group) or self._peak_rates[index]
            if factors.is_decay_independent and peak_rate > 0:
                # A rate that peaks at 0 never decays anything, whatever the decay.
                decay /= peak_rate
            settings["weight_decay"] = group["weight_decay"] * decay
        if factors.floor != 1 and isinstance(group.get("eps"), (tuple, list)):
            smallest_square, floor = group["eps"]
            settings["eps"] = (smallest_square, floor * factors.floor)
        return settings

    def _adopt(self, group: Group) -> None:
        """Check a group that is new, and note the rate that its decay is relative to."""
        rate = group.get("lr")
        # Reading a tensor waits for the device, which a step must not do.
        self._peak_rates.append(_peak_rate(group, read_tensors=True) or float(rate or 0.0))
        if not any(id(param) in self._known for param in group["params"]):
            return
        family = check_group(self._stand_in, group, self._method)
        if self._factors:
            return
        for is_decoupled in (False, True):
            self._factors[is_decoupled] = {
                id(param): rate_factors(info, self._method, family, is_decoupled=is_decoupled)
                for param, info in self._infos.items()
            }


def _peak_rate(group: Group, *, read_tensors: bool = False) -> float | None:
    """The rate that a scheduler started from or goes up to, if it left word of it."""
    for name in ("max_lr", "initial_lr"):  # OneCycleLR's; that of all other schedulers
        rate = group.get(name)
        if rate is not None and (read_tensors or not isinstance(rate, Tensor)):
            return float(rate)
    return None

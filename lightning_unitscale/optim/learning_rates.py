"""Learning rates and weight decay per parameter after scale rules, and the steps that take them.

Write the stored weight as ``V = W / sigma``, its gradient as ``G = c * g`` with ``g`` that of ``W``
in the plain model (``c``, the product of all factors on the way back, is unknown before the first
backward pass), and a step as ``W -= lr * U(g, W)``. The step of ``V`` is that of ``W`` divided by
``sigma`` if its rate is ``lr * U(g, W) / (sigma * U(G, V))``. By the table in :mod:`.optimizers`
that is ``lr / sigma`` for scale-invariant and orthogonal optimizers, ``lr`` for relative ones, and
by the unknown ``c`` unknown for linear ones.

What breaks the invariance is whatever is added to gradients: Adam's ``eps`` changes a step by the
share eps / RMS(G), which is smaller for unit gradients than it was in the plain model. Muon
orthogonalizes in BF16, so its steps agree to BF16's rounding unless ``sigma`` is a power of 2.

Decoupled decay shrinks by ``lr * weight_decay``, so the decay is divided by what the rate is
multiplied by. Decay that is added to the gradient (L2) is linear in SGD, where the same holds. In a
scale-invariant optimizer it would have to be ``c * sigma * weight_decay``, with the unknown ``c``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_unitscale.arguments import check_choice
from lightning_unitscale.optim.optimizers import ALGORITHMS, Family, is_decay_decoupled, known_class
from lightning_unitscale.optim.split_step import Group, SplitStep


class Role(enum.Enum):
    """The role of a parameter, read from the graph (u-muP, arXiv 2407.17465, table 2)."""

    EMBEDDING = "embedding"
    INPUT = "input"
    HIDDEN = "hidden"
    READOUT = "readout"
    NORM = "norm"
    BIAS = "bias"
    OTHER = "other"


@dataclass(frozen=True)
class ParameterInfo:
    """Role and scale of one parameter.

    Attributes:
        fqn: Its path in the module.
        role: Its role; ``OTHER`` for one that the rules leave alone.
        fan_in: Number of terms in each sum that the weight takes part in.
        fan_out: Number of features that it makes; the length of a bias or a norm weight.
        model_width: Width of the residual stream, or of the embedding itself.
        num_residuals: Number of residual branches in the model, if the parameter is inside one;
            0 outside of them.
        sigma: RMS that the parameter had: the stored one is it divided by ``sigma`` (1 where it
            was left as it was).
        output_scale: Factor that the graph puts on what the parameter makes: a bias is multiplied
            by it.
        is_tied: Whether it has a second role (an embedding that is the readout too).
    """

    fqn: str
    role: Role
    fan_in: int
    fan_out: int
    model_width: int
    num_residuals: int = 0
    sigma: float = 1.0
    output_scale: float = 1.0
    is_tied: bool = False


Method = Literal["match", "u-mup"]
METHODS = ("match", "u-mup")


@dataclass(frozen=True)
class RateFactors:
    """Factors on the settings of one parameter.

    Attributes:
        lr: Factor on the learning rate.
        weight_decay: Factor on the weight decay.
        is_decay_independent: Whether the decay is divided by the group's peak rate as well: each
            step then shrinks the weight by ``weight_decay`` times the schedule's share of its peak.
        floor: Factor on the smallest parameter RMS that a relative optimizer counts with
            (Adafactor's second ``eps``), which is in units of the parameter.
    """

    lr: float = 1.0
    weight_decay: float = 1.0
    is_decay_independent: bool = False
    floor: float = 1.0


def family_of(optimizer: Optimizer) -> Family:
    """The family of an optimizer, by its class."""
    cls = known_class(optimizer)
    if cls is not None:
        return ALGORITHMS[cls.__name__].family
    raise ValueError(
        f"optimizer={type(optimizer).__name__}(...): it is not known how its steps follow the "
        f"scales of gradients and weights; expected one of {', '.join(ALGORITHMS)} or a "
        "subclass; use one of them, or pass lr_scaling=None and choose the rates of the scaled "
        "model yourself."
    )


def check_group(optimizer: Optimizer, group: Mapping[str, Any], method: Method) -> Family:
    """The family of an optimizer, if the rates of one of its groups can follow the scale rules."""
    family, name = family_of(optimizer), type(optimizer).__name__
    if family is Family.ORTHOGONAL and method == "u-mup":
        # A step of Muon has spectral norm 1 (times its own factor of the shape), not entries of
        # size 1: with the rule of Adam its share of a weight would shrink as 1/fan_in.
        raise ValueError(
            f"optimizer={name}(...): the rates of u-muP are for steps whose entries have a fixed "
            "size, and those of Muon have a fixed spectral norm; expected lr_scaling='match', "
            "under which Muon's own rule for the width goes on to hold; pass it."
        )
    if family is not Family.SCALE_INVARIANT or method != "match":
        return family
    decay = group.get("weight_decay", 0)
    if decay != 0 and not is_decay_decoupled(optimizer, group):
        raise ValueError(
            f"optimizer={name}(weight_decay={decay}): the decay is added to the gradient, whose "
            "scale the rules change; expected decay that is decoupled from it; use AdamW, or "
            "decoupled_weight_decay=True where there is one, or weight_decay=0."
        )
    accumulated = group.get("initial_accumulator_value", 0)
    if accumulated != 0:
        raise ValueError(
            f"optimizer={name}(initial_accumulator_value={accumulated}): it is added to the "
            "squared gradient, whose scale the rules change; expected 0; leave it out."
        )
    return family


def rate_factors(
    info: ParameterInfo,
    method: Method,
    family: Family,
    *,
    is_decoupled: bool = True,
) -> RateFactors:
    """Factors on the settings of one parameter.

    ``"match"`` keeps the relative update that the parameter had: ``lr / sigma`` for a weight stored
    as ``W / sigma``, ``lr / s`` for a bias that the graph multiplies by ``s``, and ``lr *
    weight_decay`` as it was. An optimizer whose steps are a share of the parameter's RMS does so by
    itself. For the linear family no rate keeps it, and the rate of ``"u-mup"`` is taken: it is
    bounded for unit gradients, whatever the gradient was before.

    ``"u-mup"`` takes the rates of u-muP, and a decay that is independent of them. A decay that is
    added to the gradient of a scale-invariant optimizer stays: it competes with a gradient at RMS
    1, and divided by the rate it would drown it.

    References:
        u-muP (arXiv 2407.17465), table 2, and section 3.1 on independent weight decay.
    """
    if method == "match" and family is not Family.LINEAR:
        scale = _scale(info)
        if family is Family.RELATIVE:
            return RateFactors(floor=1 / scale)
        return RateFactors(lr=1 / scale, weight_decay=scale if is_decoupled else 1.0)
    lr = u_mup_rate(info)
    if not is_decoupled and family is not Family.LINEAR:
        return RateFactors(lr=lr)
    return RateFactors(lr=lr, weight_decay=1 / lr, is_decay_independent=method == "u-mup")


# The size by whose root u-muP divides the rate of each role.
_SIZES = {Role.EMBEDDING: "model_width", Role.HIDDEN: "fan_in"}
_SIZES |= dict.fromkeys((Role.INPUT, Role.NORM, Role.BIAS), "fan_out")


def u_mup_rate(info: ParameterInfo) -> float:
    """The factor of u-muP on a learning rate near 1; of SGD, it is the one for a free readout.

    The gradient factor of the readout is not tied to its output factor here.

    References:
        u-muP (arXiv 2407.17465), table 2 and section 4.4 (embedding). Its models have neither
        biases nor gains, and its code gives both the rate 1. The paper's case for a smaller rate of
        the embedding is theirs too: a step of a vector moves what it makes by its full size in
        every direction, while a step of a matrix does so in the few that the data share.
    """
    depth = info.num_residuals**-0.5 if info.num_residuals > 0 else 1.0
    if info.role not in _SIZES:
        return depth
    return depth * float(_positive(info, _SIZES[info.role]) ** -0.5)


def _scale(info: ParameterInfo) -> float:
    """The plain parameter over the stored one, as far as its updates are concerned.

    A bias is set to zero, so it has no size of its own: what counts is that its updates reach the
    sum that it is added to at the size that they had.
    """
    return _positive(info, "output_scale" if info.role is Role.BIAS else "sigma")


def _positive(info: ParameterInfo, name: str) -> float:
    value = float(getattr(info, name))
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"{name}={value}: of the parameter {info.fqn!r} with role {info.role.value!r}; "
            "expected a positive finite number; give it its measured one, or the role 'other'."
        )
    return value


def scale_learning_rates(
    optimizer: Optimizer, infos: Mapping[Tensor, ParameterInfo], method: Method
) -> ScaledStep:
    """Let an optimizer step with each parameter's own learning rate and weight decay.

    ``optimizer.param_groups`` stays as the user and the schedulers made it, at all times: what
    they, the closure, the learning-rate monitor and checkpoints see is unchanged. Attaching again
    replaces what was attached before. A parameter that is not in ``infos`` keeps its rate. Copies
    of the optimizer (``deepcopy``, pickle) are plain ones.
    """
    advice = "pass 'match' to keep each parameter's relative updates"
    check_choice("lr_scaling", method, METHODS, "unknown method", advice)
    step = ScaledStep(optimizer, infos, method)
    step.attach(optimizer)
    return step


class ScaledStep(SplitStep[RateFactors]):
    """An optimizer's steps with each parameter's own rate; see :func:`scale_learning_rates`."""

    neutral = RateFactors()
    advice = "pass lr_scaling=None and choose the rates yourself"

    def __init__(
        self, optimizer: Optimizer, infos: Mapping[Tensor, ParameterInfo], method: Method
    ) -> None:
        super().__init__(optimizer)
        self._method: Method = method
        self._infos = infos
        # By identity, since a tensor's own hash is slow; infos keeps the parameters alive.
        self._factors: dict[bool, dict[int, RateFactors]] = {}
        self._peak_rates: list[float] = []
        for group in optimizer.param_groups:
            self._adopt(group)

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
            peak = _peak_rate(group) or self._peak_rates[index]
            if factors.is_decay_independent and peak > 0:
                # A rate that peaks at 0 never decays anything, whatever the decay.
                decay /= peak
            settings["weight_decay"] = group["weight_decay"] * decay
        if factors.floor != 1 and isinstance(group.get("eps"), (tuple, list)):
            smallest_square, floor = group["eps"]
            settings["eps"] = (smallest_square, floor * factors.floor)
        return settings

    def _adopt(self, group: Group) -> None:
        """Check a group that is new, and note the rate that its decay is relative to."""
        self._peak_rates.append(first_peak_rate(group))
        if not any(param in self._infos for param in group["params"]):
            return
        family = check_group(self._stand_in, group, self._method)
        if self._factors:
            return
        for is_decoupled in (False, True):
            self._factors[is_decoupled] = {
                id(param): rate_factors(info, self._method, family, is_decoupled=is_decoupled)
                for param, info in self._infos.items()
            }


def first_peak_rate(group: Group) -> float:
    """The peak rate of a new group, or else the rate that it has; waits for those on a device."""
    return _peak_rate(group, read_tensors=True) or float(group.get("lr") or 0.0)


def _peak_rate(group: Group, *, read_tensors: bool = False) -> float | None:
    """The rate that a scheduler started from or goes up to, if it left word of it."""
    for name in ("max_lr", "initial_lr"):  # OneCycleLR's; that of all other schedulers
        rate = group.get(name)
        if rate is not None and (read_tensors or not isinstance(rate, Tensor)):
            return float(rate)
    return None

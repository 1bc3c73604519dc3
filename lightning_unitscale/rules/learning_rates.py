"""Compute learning rates and weight decay per parameter under scale rules.

Write the stored weight as ``V = W / sigma``, its gradient as ``G = c * g`` with ``g`` that of ``W``
in the unscaled model, and a step as ``W -= lr * U(g, W)``. Here ``c``, the product of all factors
on the way back, is unknown before the first backward pass. The step of ``V`` is that of ``W``
divided by ``sigma`` if its rate is ``lr * U(g, W) / (sigma * U(G, V))``. By the table in
:data:`ALGORITHMS` that is ``lr / sigma`` for scale-invariant and orthogonal optimizers and ``lr``
for relative ones. For linear ones it is unknown, because ``c`` is.

Terms that are added to gradients break the invariance. Adam's ``eps`` changes a step by the share
eps / RMS(G), which is smaller for unit gradients than in the unscaled model. Muon orthogonalizes in
BF16, so its steps agree to BF16's rounding unless ``sigma`` is a power of 2.

Decoupled decay shrinks by ``lr * weight_decay``, so the decay is divided by the factor on the rate.
Decay that is added to the gradient (L2) is linear in SGD, where the same holds. In a
scale-invariant optimizer it would have to be ``c * sigma * weight_decay``, with the unknown ``c``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer


class Role(enum.Enum):
    """Role of a parameter, read from the graph (u-muP, arXiv 2407.17465, table 2)."""

    EMBEDDING = "embedding"
    INPUT = "input"
    HIDDEN = "hidden"
    READOUT = "readout"
    NORM = "norm"
    BIAS = "bias"
    OTHER = "other"


@dataclass(frozen=True)
class ParameterInfo:
    """Role and scale of one parameter."""

    fqn: str
    role: Role
    fan_in: int  # number of terms in each sum that the weight takes part in
    fan_out: int  # number of features of its result, or the length of a bias or a norm weight
    model_width: int  # of the residual stream, or of the embedding itself
    num_residuals: int = 0  # branches of the stream whose branch it is in
    sigma: float = 1.0  # its original RMS, by which the stored one is divided
    output_scale: float = 1.0  # the graph's factor on its result, such as a bias's
    is_tied: bool = False  # it has a second role: an embedding that is the readout too


Method = Literal["match", "u-mup"]
METHODS = ("match", "u-mup")


@dataclass(frozen=True)
class RateFactors:
    """Factors on the optimizer settings of one parameter."""

    lr: float = 1.0
    weight_decay: float = 1.0
    # Each step then shrinks the weight by ``weight_decay`` times the schedule's share of its peak.
    is_decay_independent: bool = False
    floor: float = 1.0  # on the smallest RMS that Adafactor uses, its second ``eps``


def family_of(optimizer: Optimizer) -> Family:
    """Return the family of an optimizer, by its class."""
    cls = known_class(optimizer)
    if cls is not None:
        return ALGORITHMS[cls.__name__].family
    raise ValueError(
        f"optimizer={type(optimizer).__name__}(...): no rule says how its steps depend on the "
        f"scales of gradients and weights. Expected one of {', '.join(ALGORITHMS)} or a subclass. "
        "Use one of them, or pass lr_scaling=None and choose the rates of the scaled model "
        "yourself."
    )


def check_group(optimizer: Optimizer, group: Mapping[str, Any], method: Method) -> Family:
    """Return an optimizer's family, if the rates of a group can follow the scale rules."""
    family, name = family_of(optimizer), type(optimizer).__name__
    if family is Family.ORTHOGONAL and method == "u-mup" and "adjust_lr_fn" not in group:
        raise ValueError(
            f"optimizer={name}(...): u-muP needs the spectral norm of its steps, but no rule says "
            "how this optimizer scales them by a weight's shape. Expected torch.optim.Muon. Use "
            "it, optim.MuonAdamW, or lr_scaling='match'."
        )
    if family is not Family.SCALE_INVARIANT or method != "match":
        return family
    decay = group.get("weight_decay", 0)
    if decay != 0 and not is_decay_decoupled(optimizer, group):
        raise ValueError(
            f"optimizer={name}(weight_decay={decay}): the decay is added to the gradient, whose "
            "scale the rules change. Expected decay that is decoupled from it. Use AdamW, or "
            "decoupled_weight_decay=True where there is one, or weight_decay=0."
        )
    accumulated = group.get("initial_accumulator_value", 0)
    if accumulated != 0:
        raise ValueError(
            f"optimizer={name}(initial_accumulator_value={accumulated}): it is added to the "
            "squared gradient, whose scale the rules change. Expected 0. Leave it out."
        )
    return family


def rate_factors(
    info: ParameterInfo,
    method: Method,
    family: Family,
    *,
    is_decoupled: bool = True,
    shape: Sequence[int] = (),
    adjust_lr_fn: str | None = None,
) -> RateFactors:
    """Return factors on the optimizer settings of one parameter.

    ``shape`` is the parameter's, and ``adjust_lr_fn`` the setting of ``torch.optim.Muon``.

    ``"match"`` keeps the relative update that the parameter had: ``lr / sigma`` for a weight stored
    as ``W / sigma``, ``lr / s`` for a bias that the graph multiplies by ``s``, and an unchanged
    ``lr * weight_decay``. An optimizer whose steps are a share of the parameter's RMS does so by
    itself. For the linear family no rate keeps it, so the rate of ``"u-mup"`` is used. It is
    bounded for unit gradients, whatever the gradient was before.

    ``"u-mup"`` uses the rates of u-muP, and a decay that is independent of them. A decay that is
    added to the gradient of a scale-invariant optimizer is not changed. It competes with a gradient
    at RMS 1, and divided by the rate it would dominate.

    References:
        u-muP (arXiv 2407.17465), table 2, and section 3.1 on independent weight decay.
    """
    if method == "match" and family is not Family.LINEAR:
        scale = _scale(info)
        if family is Family.RELATIVE:
            return RateFactors(floor=1 / scale)
        return RateFactors(lr=1 / scale, weight_decay=scale if is_decoupled else 1.0)
    if family is Family.BY_ROLE:
        family = Family.ORTHOGONAL if takes_muon(info, shape) else Family.SCALE_INVARIANT
    is_muon = family is Family.ORTHOGONAL
    lr = muon_rate(info, shape, adjust_lr_fn) if is_muon else u_mup_rate(info)
    if not is_decoupled and family is not Family.LINEAR:
        return RateFactors(lr=lr)
    return RateFactors(lr=lr, weight_decay=1 / lr, is_decay_independent=method == "u-mup")


# The size by whose root u-muP divides the rate of each role.
_SIZES = {Role.EMBEDDING: "model_width", Role.HIDDEN: "fan_in"}
_SIZES |= dict.fromkeys((Role.INPUT, Role.NORM, Role.BIAS), "fan_out")


def u_mup_rate(info: ParameterInfo) -> float:
    """Return u-muP's factor on a learning rate near 1. SGD's is the one for a free readout.

    The gradient factor of the readout is not tied to its output factor here.

    References:
        u-muP (arXiv 2407.17465), table 2 and section 4.4 (embedding). Its models have neither
        biases nor gains, and its code gives both the rate 1. The paper's argument for a smaller
        rate of the embedding applies to them too. A step of a vector moves its result by its full
        size in every direction. A step of a matrix does so only in the few directions of the data.
    """
    if info.role not in _SIZES:
        return _depth_factor(info)
    return _depth_factor(info) * float(_positive(info, _SIZES[info.role]) ** -0.5)


def _depth_factor(info: ParameterInfo) -> float:
    return info.num_residuals**-0.5 if info.num_residuals > 0 else 1.0


def takes_muon(info: ParameterInfo, shape: Sequence[int]) -> bool:
    """Check whether a parameter is a hidden matrix, for which Muon is made."""
    # The others are embeddings, the readout, vectors, and weights with a second role.
    return info.role is Role.HIDDEN and len(shape) == 2 and not info.is_tied


def muon_rate(info: ParameterInfo, shape: Sequence[int], adjust_lr_fn: str | None = None) -> float:
    """Return u-muP's factor on the learning rate of ``torch.optim.Muon``.

    Features are learned at every width if the spectral norm of a weight and of its step are both
    ``sqrt(fan_out / fan_in)``. The graph multiplies a stored hidden weight by ``fan_in**-0.5``, so
    its step must have norm ``sqrt(fan_out)``, and that of the readout ``sqrt(fan_in * fan_out)``.
    Muon's orthogonalized step has norm 1, times a factor of its own for the stored shape, which is
    divided out. So a rate has the meaning that it has for a square weight of the unscaled model.

    Unlike Adam's it does not depend on the number of residual branches ``L``. Steps of all branches
    point the same way at first, so one step changes the loss by ``L**0.5`` times as much. A factor
    of ``L**-0.5`` makes up for that, but in trainings of 100 steps the best rate then moves by 1.8
    from two branches to eight, and without it by less than 1.25 (``benchmarks/muon_transfer.py``).

    Raises:
        ValueError: If the parameter is an embedding, a bias or a gain. Their rows are independent.

    References:
        Yang, Simon, Bernstein (arXiv 2310.17813), condition 1 and equation 5. Large et al. (arXiv
        2405.14813), section 3 (embeddings). Liu et al. (arXiv 2502.16982), section 2.2, for
        ``adjust_lr_fn="match_rms_adamw"``. Yang et al. (arXiv 2310.02244) and Ren et al. (arXiv
        2603.28743) have the factor ``L**-0.5`` that is left out.
    """
    if info.is_tied or info.role in (Role.EMBEDDING, Role.NORM, Role.BIAS):
        role = "tied to a second role" if info.is_tied else f"of role {info.role.value!r}"
        raise ValueError(
            f"optimizer=Muon(...): its parameter {info.fqn!r} is {role}. Muon's steps are for "
            "matrices that multiply features. Expected hidden weights. Give it to AdamW, or use "
            "optim.MuonAdamW for all parameters."
        )
    if info.role is Role.OTHER:
        return 1.0
    norm = _positive(info, "fan_out") ** 0.5
    if info.role is Role.READOUT:
        norm *= _positive(info, "fan_in") ** 0.5
    return norm / _own_factor(shape, adjust_lr_fn)


def _own_factor(shape: Sequence[int], adjust_lr_fn: str | None) -> float:
    """Return the factor by which ``torch.optim.Muon`` multiplies its rate (2.11, 2.13 and 2.14)."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return float(0.2 * max(rows, columns) ** 0.5)
    least = 0.0 if adjust_lr_fn == "spectral_unclamped" else 1.0  # that one since torch 2.14
    return float(max(least, rows / columns) ** 0.5)


def _scale(info: ParameterInfo) -> float:
    """Return the unscaled parameter over the stored one, as far as its updates are concerned."""
    # A bias is set to zero, so it has no size of its own. Its updates must reach the sum that it is
    # added to at their original size.
    return _positive(info, "output_scale" if info.role is Role.BIAS else "sigma")


def _positive(info: ParameterInfo, name: str) -> float:
    value = float(getattr(info, name))
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"{name}={value}: not a value for parameter {info.fqn!r} with role "
            f"{info.role.value!r}. Expected a positive finite number. Give its measured value, "
            "or the role 'other'."
        )
    return value


class Family(enum.Enum):
    """Dependence of a step ``W -= lr * U(g, W)`` on scales, as the value of ``U(c * g, W / s)``."""

    SCALE_INVARIANT = "scale-invariant"  # U(g, W)
    ORTHOGONAL = "orthogonal"  # U(g, W)
    BY_ROLE = "by role"  # orthogonal for hidden matrices, scale-invariant for the others
    RELATIVE = "relative"  # U(g, W) / s
    LINEAR = "linear"  # c * U(g, W)


@dataclass(frozen=True)
class Algorithm:
    """Scaling behavior of one optimizer."""

    family: Family = Family.SCALE_INVARIANT
    adds_decay: bool = False  # to the gradient, unless a group sets it
    is_known_by_name: bool = False  # any implementation of that name has this behavior


ALGORITHMS = {
    "Adam": Algorithm(),
    "AdamW": Algorithm(),
    "NAdam": Algorithm(),
    # Its first steps (5 at beta2 = 0.999) are linear.
    "RAdam": Algorithm(),
    "Adamax": Algorithm(adds_decay=True),
    "SparseAdam": Algorithm(),
    "RMSprop": Algorithm(adds_decay=True),
    "Adagrad": Algorithm(adds_decay=True),
    "Adafactor": Algorithm(Family.RELATIVE),
    "SGD": Algorithm(Family.LINEAR, adds_decay=True),
    "Lion": Algorithm(is_known_by_name=True),
    "Muon": Algorithm(Family.ORTHOGONAL, is_known_by_name=True),
    # Adam in a rotated basis, so its elements are of Adam's size.
    "SOAP": Algorithm(is_known_by_name=True),
    "MuonAdamW": Algorithm(Family.BY_ROLE, is_known_by_name=True),
}


def known_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the optimizer's class in the table, or ``None`` if there is none."""
    classes = [cls for cls in type(optimizer).__mro__ if cls.__name__ in ALGORITHMS]
    by_name = (cls for cls in classes if ALGORITHMS[cls.__name__].is_known_by_name)
    of_torch = (cls for cls in classes if cls is getattr(torch.optim, cls.__name__, None))
    return next(of_torch, next(by_name, None))


def is_decay_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Check whether weight decay shrinks the weight itself and is not added to the gradient."""
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    cls = known_class(optimizer)
    return cls is None or not ALGORITHMS[cls.__name__].adds_decay

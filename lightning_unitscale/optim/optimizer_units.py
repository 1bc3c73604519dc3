"""Optimizers on parameters held in units: factors on their settings and their state.

With ``p = s p'`` and ``g = c g'``, both units powers of two, a step on ``p'`` and ``g'`` is that on
``p`` and ``g`` in units of ``s``, bit for bit, with these settings:

=================================  ===========  ======  ================
step                               lr           eps     added decay (L2)
=================================  ===========  ======  ================
scale-invariant or orthogonal      lr / s       eps/c   decay * s / c
SGD; of RAdam the first few steps  lr * c / s   -       decay * s / c
=================================  ===========  ======  ================

Decoupled decay shrinks by ``lr * decay``, which must stay what it is: it is divided by the factor
of the rate. The table in :mod:`.optimizers` has the units of the state. Everything else that these
optimizers keep has no unit.

Where parameters are FP16, so is the state that torch makes of them, and a square below 2**-24 is
zero: divided by its root, a small gradient would make a large step. There ``eps`` is raised to the
root of the smallest square, 2**-12 of the gradient's unit, with the bias correction of the
optimizer if it has one; Adagrad, whose sum of squares outgrows FP16, is refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_unitscale.optim.optimizers import (
    ALGORITHMS,
    Family,
    is_decay_decoupled,
    is_torchs,
    known_class,
)
from lightning_unitscale.optim.split_step import Group, SplitStep

# Units of a value and of its gradient, as exponents of two.
Units = tuple[int, int]

# The root of the smallest number that FP16 has above zero.
_SMALLEST_ROOT = 2.0**-12


@dataclass(frozen=True)
class HeldFactors:
    """Exponents of two by which the settings of one parameter are multiplied.

    Attributes:
        lr: Of the learning rate.
        weight_decay: Of the weight decay.
        eps: Of what is added to the denominator.
        smallest_eps: The least value of ``eps``, a number and no exponent.
    """

    lr: int = 0
    weight_decay: int = 0
    eps: int = 0
    smallest_eps: float = 0.0


def kind_of(optimizer: Optimizer) -> str:
    """The row of the table that an optimizer belongs to.

    Raises:
        ValueError: If it is in none: then no settings are known to be right.
    """
    cls = known_class(optimizer)
    if cls is not None and ALGORITHMS[cls.__name__].state is not None:
        # Of what torch has, others have other forms; torch wraps the method of the class whose
        # object is made first.
        is_inherited = inspect.unwrap(type(optimizer).step) is inspect.unwrap(cls.step)
        if is_inherited and (is_torchs(cls) or not hasattr(torch.optim, cls.__name__)):
            return cls.__name__
    raise ValueError(
        f"optimizer={type(optimizer).__name__}(...): it is not known how its steps follow the "
        "units in which parameters and gradients are held; expected one of "
        f"{', '.join(name for name, row in ALGORITHMS.items() if row.state is not None)}; use one "
        "of them, or pass Lossless(hold_parameters=False)."
    )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot step on held parameters.

    Raises:
        ValueError: If it is not in the table, or its state outgrows the parameters' type.
    """
    kind = kind_of(optimizer)
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    if kind == "Adagrad" and any(param.dtype == torch.float16 for param in parameters):
        raise ValueError(
            f"optimizer={type(optimizer).__name__}(...): it sums squares over all steps, in the "
            "type of the parameters, and FP16 ends at 65504; expected parameters of another type; "
            "pass Trainer(precision='bf16-true'), or use another optimizer."
        )


def held_factors(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, units: Units, step: int
) -> HeldFactors:
    """Factors on the settings of a group for one parameter.

    Args:
        optimizer: An optimizer of the table.
        group: The group that the parameter is in.
        parameter: The parameter.
        units: Exponents of the units in which it and its gradient are held.
        step: Which step of the parameter's this is, counted from 1.
    """
    kind = kind_of(optimizer)
    algorithm = ALGORITHMS[kind]
    of_value, of_gradient = units
    is_linear = algorithm.family is Family.LINEAR
    if kind == "RAdam":
        is_linear = not _is_rectified(group, step)
    lr = of_gradient - of_value if is_linear else -of_value
    decay = -lr if is_decay_decoupled(optimizer, group) else of_value - of_gradient
    smallest = 0.0
    if parameter.dtype == torch.float16 and 2 in (algorithm.state or {}).values():
        smallest = _SMALLEST_ROOT
        if algorithm.corrects_bias:
            smallest /= math.sqrt(1 - group["betas"][1] ** step)
    return HeldFactors(lr, decay, -of_gradient, smallest)


def next_steps(optimizer: Optimizer, group: Mapping[str, Any]) -> list[int]:
    """Which step the next one is for each parameter of a group, if the factors depend on it."""
    kind, parameters = kind_of(optimizer), group["params"]
    is_half = any(param.dtype == torch.float16 for param in parameters)
    if kind != "RAdam" and not (is_half and ALGORITHMS[kind].corrects_bias):
        return [1] * len(parameters)
    counts = [optimizer.state.get(param, {}).get("step", 0) for param in parameters]
    tensors = [count.detach() for count in counts if isinstance(count, Tensor)]
    # One transfer for all that are on a device.
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    return [int(next(numbers) if isinstance(count, Tensor) else count) + 1 for count in counts]


def state_power(kind: str, name: str) -> int:
    """The power of the gradient's unit in which a tensor of an optimizer's state is.

    Raises:
        RuntimeError: If the optimizer is not known to keep such a tensor.
    """
    powers = ALGORITHMS[kind].state or {}
    if name not in powers:
        raise RuntimeError(
            f"{kind}: it keeps {name!r}, of which it is not known in which units it is; expected "
            f"{', '.join(powers)}; pass Lossless(hold_parameters=False)."
        )
    return powers[name]


class HeldStep(SplitStep[HeldFactors]):
    """An optimizer's steps on parameters that are held in units.

    Args:
        optimizer: An optimizer of the table.
        units_of: The units of a parameter at this moment.
    """

    neutral = HeldFactors()
    advice = "pass Lossless(hold_parameters=False)"

    def __init__(self, optimizer: Optimizer, units_of: Callable[[Tensor], Units]) -> None:
        super().__init__(optimizer)
        self._units_of = units_of

    def factors(self, group: Group, index: int) -> Sequence[HeldFactors]:
        """Exponents on the settings of each parameter, in its next step."""
        units = map(self._units_of, group["params"])
        steps = next_steps(self._stand_in, group)
        return [
            self.neutral if unit == (0, 0) else held_factors(self._stand_in, group, param, unit, n)
            for param, unit, n in zip(group["params"], units, steps, strict=True)
        ]

    def settings(self, group: Group, index: int, factors: HeldFactors) -> dict[str, Any]:
        """Rate, decay and ``eps`` in units of the parameter and of its gradient."""
        settings: dict[str, Any] = {
            name: group[name] * 2.0 ** getattr(factors, name)
            for name in ("lr", "weight_decay", "eps")
            if name in group
        }
        if "eps" in settings and factors.smallest_eps:
            settings["eps"] = max(settings["eps"], factors.smallest_eps)
        return settings


def _is_rectified(group: Mapping[str, Any], step: int) -> bool:
    """Whether a step of RAdam divides by the gradient's size; the first few do not.

    References:
        Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond" (arXiv 1908.03265),
        algorithm 2; torch computes the same numbers in the same order.
    """
    beta = group["betas"][1]
    longest = 2 / (1 - beta) - 1
    length = longest - 2 * step * (beta**step) / (1 - beta**step)
    return bool(length > 5.0)

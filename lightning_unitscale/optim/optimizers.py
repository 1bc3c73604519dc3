"""The optimizers whose steps are known, and their steps on parameters held in units.

Not among them are Adadelta and Rprop (step sizes of their own, in units of the parameter), ASGD and
LBFGS, and what nobody knows here.

With ``p = s p'`` and ``g = c g'``, both units powers of two, a step on ``p'`` and ``g'`` is that on
``p`` and ``g`` in units of ``s``, bit for bit, with these settings:

=================================  ===========  ======  ================
step                               lr           eps     added decay (L2)
=================================  ===========  ======  ================
scale-invariant or orthogonal      lr / s       eps/c   decay * s / c
SGD; of RAdam the first few steps  lr * c / s   -       decay * s / c
=================================  ===========  ======  ================

Decoupled decay shrinks by ``lr * decay``, which must stay what it is: it is divided by the factor
of the rate. ``ALGORITHMS`` has the units of the state. Everything else that these
optimizers keep has no unit.

Where parameters are FP16, so is the state that torch makes of them, and a square below 2**-24 is
zero: divided by its root, a small gradient would make a large step. There ``eps`` is raised to the
root of the smallest square, 2**-12 of the gradient's unit, with the bias correction of the
optimizer if it has one; Adagrad, whose sum of squares outgrows FP16, is refused.
"""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_unitscale.optim.split_step import Group, SplitStep
from lightning_unitscale.scales.transfer import numbers_of


class Family(enum.Enum):
    """How a step ``W -= lr * U(g, W)`` depends on scales: what is ``U(c * g, W / s)``?"""

    SCALE_INVARIANT = "scale-invariant"  # U(g, W)
    ORTHOGONAL = "orthogonal"  # U(g, W)
    RELATIVE = "relative"  # U(g, W) / s
    LINEAR = "linear"  # c * U(g, W)


@dataclass(frozen=True)
class Algorithm:
    """What is known of an optimizer.

    Attributes:
        family: Its family.
        state: Power of the gradient's unit in which each tensor of its state is, as far as that is
            known: without it, parameters cannot be held in units.
        adds_decay: Whether weight decay is added to the gradient where a group does not say.
        corrects_bias: Whether it corrects the bias of the square by whose root it divides.
        is_known_by_name: Whether it is what its name says wherever it is implemented.
    """

    family: Family = Family.SCALE_INVARIANT
    state: Mapping[str, int] | None = None
    adds_decay: bool = False
    corrects_bias: bool = False
    is_known_by_name: bool = False


_ADAM = Algorithm(
    state={"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "mu_product": 0, "step": 0},
    corrects_bias=True,
)
ALGORITHMS = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "NAdam": _ADAM,
    # Its first steps (5 at beta2 = 0.999) are linear.
    "RAdam": Algorithm(state=_ADAM.state),
    "Adamax": Algorithm(state={"exp_avg": 1, "exp_inf": 1, "step": 0}, adds_decay=True),
    "SparseAdam": Algorithm(),
    "RMSprop": Algorithm(
        state={"square_avg": 2, "grad_avg": 1, "momentum_buffer": 0, "step": 0},
        adds_decay=True,
    ),
    "Adagrad": Algorithm(state={"sum": 2, "step": 0}, adds_decay=True),
    "Adafactor": Algorithm(Family.RELATIVE),
    "SGD": Algorithm(Family.LINEAR, {"momentum_buffer": 1}, adds_decay=True),
    "Lion": Algorithm(state={"exp_avg": 1, "step": 0}, is_known_by_name=True),
    "Muon": Algorithm(Family.ORTHOGONAL, {"momentum_buffer": 1}, is_known_by_name=True),
}


def known_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of the table that an optimizer is of; ``None`` if there is none."""
    classes = [cls for cls in type(optimizer).__mro__ if cls.__name__ in ALGORITHMS]
    by_name = (cls for cls in classes if ALGORITHMS[cls.__name__].is_known_by_name)
    return next((cls for cls in classes if is_torchs(cls)), next(by_name, None))


def is_torchs(cls: type) -> bool:
    """Whether a class is the optimizer that torch has by its name."""
    return cls is getattr(torch.optim, cls.__name__, None)


def is_decay_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether weight decay shrinks the weight by itself, instead of being added to the gradient."""
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    cls = known_class(optimizer)
    return cls is None or not ALGORITHMS[cls.__name__].adds_decay


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
        self._kind = kind_of(optimizer)
        self._algorithm = ALGORITHMS[self._kind]

    def factors(self, group: Group, index: int) -> Sequence[HeldFactors]:
        """Exponents on the settings of each parameter, in its next step."""
        return [
            self.neutral if units == (0, 0) else self._factors(group, param, units, step)
            for param, units, step in zip(
                group["params"],
                map(self._units_of, group["params"]),
                self._next_steps(group),
                strict=True,
            )
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

    def _factors(self, group: Group, parameter: Tensor, units: Units, step: int) -> HeldFactors:
        """Exponents for a parameter in its step of this number, counted from 1."""
        of_value, of_gradient = units
        is_linear = self._algorithm.family is Family.LINEAR
        if self._kind == "RAdam":
            is_linear = not _is_rectified(group, step)
        lr = of_gradient - of_value if is_linear else -of_value
        is_decoupled = is_decay_decoupled(self._stand_in, group)
        decay = -lr if is_decoupled else of_value - of_gradient
        smallest = 0.0
        if parameter.dtype == torch.float16 and 2 in (self._algorithm.state or {}).values():
            smallest = _SMALLEST_ROOT
            if self._algorithm.corrects_bias:
                smallest /= math.sqrt(1 - group["betas"][1] ** step)
        return HeldFactors(lr, decay, -of_gradient, smallest)

    def _next_steps(self, group: Group) -> list[int]:
        """Which step the next one is for each parameter, if the factors depend on it."""
        parameters = group["params"]
        is_half = any(param.dtype == torch.float16 for param in parameters)
        if self._kind != "RAdam" and not (is_half and self._algorithm.corrects_bias):
            return [1] * len(parameters)
        states = [self._stand_in.state.get(param, {}) for param in parameters]
        counts = [state.get("step", 0) for state in states]
        numbers = iter(numbers_of([count for count in counts if isinstance(count, Tensor)]))
        return [int(next(numbers) if isinstance(count, Tensor) else count) + 1 for count in counts]


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

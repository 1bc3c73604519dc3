"""The optimizers whose steps are known: how each depends on the scale of gradients and weights."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer


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
        adds_decay: Whether weight decay is added to the gradient where a group does not say.
        is_known_by_name: Whether it is what its name says wherever it is implemented.
    """

    family: Family = Family.SCALE_INVARIANT
    adds_decay: bool = False
    is_known_by_name: bool = False


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

"""What the rule-based transform knows of each parameter, for whoever sets learning rates."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.Enum):
    """What a parameter does, read from the graph (u-muP, arXiv 2407.17465, table 2)."""

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
        role: What it does; ``OTHER`` for one that the rules leave alone.
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

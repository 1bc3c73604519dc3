"""What was measured of the operands of matmuls, and of the gradients that arrive at them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lightning_unitscale.graph.recorder import stored_elements
from lightning_unitscale.scales.reduce import row_dtype

Direction = Literal["forward", "backward"]
# RMS of tensors, or of their gradients, by name in the gauge.
Sizes = Mapping[str, float]
# Direction, name in the gauge, exponent of the unit in force (``None`` without one), and the RMS as
# the model means it.
Row = tuple[Direction, str, int | None, float]

# The range that lossless unit scaling promises for the stored RMS of an operand.
LOW, HIGH = 0.25, 4.0


def root_mean_square(tensor: Tensor) -> Tensor:
    """RMS of a tensor as a 0-d tensor; it neither overflows nor underflows for FP32 values."""
    # A gradient of 1e-25 is ordinary and its square is 0 in FP32, so squares are summed in FP64.
    dtype = row_dtype(tensor.device)
    tensor = stored_elements(tensor.detach())
    if tensor.numel() == 0:
        return torch.zeros((), dtype=dtype, device=tensor.device)
    norm = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm / math.sqrt(tensor.numel())


def combined_rms(values: list[float]) -> float:
    """RMS of equal-sized parts, scaled by the largest so that squares stay in range."""
    largest = max(values)
    if not math.isfinite(largest) or largest == 0.0:
        return largest
    return largest * math.sqrt(sum((rms / largest) ** 2 for rms in values) / len(values))


def is_late_look(count: int) -> bool:
    """Whether what has been zero so far is worth a second run of a step, or a meeting of ranks."""
    return count in (1, 2, 4) or (count > 0 and count % 8 == 0)


@dataclass(frozen=True)
class Measured:
    """What was measured of tensors with units of their own, by name in the gauge."""

    forward: Sizes = field(default_factory=dict)  # RMS as the model means it
    backward: Sizes = field(default_factory=dict)  # RMS of the gradient as the model means it
    # Tensors whose RMS in the units in force has left [1/4, 4], with that RMS.
    outside: Sizes = field(default_factory=dict)

    @staticmethod
    def of(rows: Iterable[Row]) -> Measured:
        """What rows say together: several calls measure one tensor, which has one unit."""
        true: dict[tuple[Direction, str], list[float]] = {}
        units: dict[tuple[Direction, str], int] = {}
        for direction, name, unit, rms in rows:
            true.setdefault((direction, name), []).append(rms)
            if unit is not None:
                units[direction, name] = unit
        joint = {key: combined_rms(values) for key, values in true.items()}
        stored = {key: math.ldexp(joint[key], -unit) for key, unit in units.items()}
        return Measured(
            {name: rms for (direction, name), rms in joint.items() if direction == "forward"},
            {name: rms for (direction, name), rms in joint.items() if direction == "backward"},
            {
                name: rms
                for (_, name), rms in stored.items()
                if rms > 0.0 and not LOW <= rms <= HIGH
            },
        )

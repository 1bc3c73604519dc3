"""What was measured of the operands of matmuls, and of the gradients that arrive at them.

A tensor near RMS 1 fits into FP8 unless its elements differ too much among themselves: a few of
them are many hundred times the RMS, as the massive activations of some language models are, or
most of them are nearly zero next to the others.

References:
    Sun et al., "Massive Activations in Large Language Models" (arXiv 2402.17762); Blake et al.,
    "u-muP" (arXiv 2407.17465), section 4.2, which keeps the layers known for it out of FP8.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lightning_unitscale.capture.graph_recorder import stored_elements
from lightning_unitscale.formats import E4M3FN, E5M2, NumberFormat
from lightning_unitscale.scales.reduce import row_dtype

Direction = Literal["forward", "backward"]

# The range that lossless unit scaling promises for the stored RMS of an operand.
LOW, HIGH = 0.25, 4.0
# An element beyond the range is a wrong number, not a rounded one: not a single one is accepted.
# One that becomes zero was worth less than 2**-10 of the RMS: only many of them matter.
MAX_FLUSHED = 0.25

# The formats that a tensor may be cast to, from the finest on.
FORMATS: dict[Direction, tuple[NumberFormat, ...]] = {
    "forward": (E4M3FN,),
    "backward": (E4M3FN, E5M2),
}
# Shares per tensor that describe what FP8 would lose of it, in either direction.
NUM_SHARES = 4
# Direction, name in the gauge, and the numbers of :func:`stored_row`.
StoredRow = tuple[Direction, str, Sequence[float]]


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
class Unrepresentable:
    """What FP8 cannot represent, by the name of the matmul, with the reason."""

    # Matmuls that are better kept out of FP8.
    matmuls: Mapping[str, str] = field(default_factory=dict)
    # Matmuls that are not, but whose gradients need E5M2's range.
    gradients: Mapping[str, str] = field(default_factory=dict)

    def joined(self, other: Unrepresentable) -> Unrepresentable:
        """Those of both, with the reasons of ``other`` where both have some."""
        return Unrepresentable(
            {**self.matmuls, **other.matmuls}, {**self.gradients, **other.gradients}
        )

    def without(self, other: Unrepresentable) -> Unrepresentable:
        """Those that are not in ``other``."""
        return Unrepresentable(
            {name: why for name, why in self.matmuls.items() if name not in other.matmuls},
            {name: why for name, why in self.gradients.items() if name not in other.gradients},
        )


def unrepresentable_among(rows: Iterable[StoredRow]) -> Unrepresentable:
    """What does not fit; what has left the range of its unit gets another one first."""
    matmuls: dict[str, str] = {}
    gradients: dict[str, str] = {}
    for direction, name, (rms, *shares) in rows:
        if not LOW <= rms <= HIGH:
            continue
        matmul = name.partition(":")[0]
        what = name.rpartition(":")[2] if direction == "forward" else "gradient"
        pairs = zip(shares[::2], shares[1::2], FORMATS[direction], strict=False)
        *narrow, (beyond, flushed, widest) = pairs
        if beyond > 0.0:
            matmuls[matmul] = _beyond(beyond, what, widest)
        elif flushed > MAX_FLUSHED:
            matmuls.setdefault(matmul, _flushed(flushed, what, widest))
        for beyond, flushed, format in narrow:
            if beyond > 0.0:
                gradients[matmul] = _beyond(beyond, what, format)
            elif flushed > MAX_FLUSHED:
                gradients.setdefault(matmul, _flushed(flushed, what, format))
    return Unrepresentable(matmuls, gradients)


def stored_row(tensor: Tensor, direction: Direction) -> Tensor:
    """RMS of a tensor that is in its units, and for each format what is beyond it and flushed."""
    row = root_mean_square(tensor).reshape(1)
    return torch.cat([row, stored_shares(tensor, direction).to(row.dtype)])


def stored_shares(tensor: Tensor, direction: Direction) -> Tensor:
    """What formats would lose of a tensor that is in its units."""
    magnitudes = tensor.abs().float()
    is_some = magnitudes > 0
    count = is_some.sum().clamp(min=1)
    shares = []
    for format in FORMATS[direction]:
        beyond = (magnitudes > format.overflow_threshold).sum() / max(tensor.numel(), 1)
        flushed = (is_some & (magnitudes <= format.flush_threshold)).sum() / count
        shares += [beyond, flushed]
    nothing = torch.zeros_like(shares[0])
    return torch.stack([*shares, *[nothing] * (NUM_SHARES - len(shares))])


def _beyond(share: float, what: str, format: NumberFormat) -> str:
    return f"{share:.2g} of its {what} is beyond {format}'s range"


def _flushed(share: float, what: str, format: NumberFormat) -> str:
    return f"{share:.0%} of its {what} would be zero in {format}"

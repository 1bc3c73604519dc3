"""Measure matmul operands and gradients, and find those that FP8 cannot represent.

A tensor near RMS 1 fits into FP8 unless its elements differ too much in size. A few elements may
be many hundred times the RMS, such as the massive activations of some language models. Or most
elements may be nearly zero relative to the others.

References:
    Sun et al., "Massive Activations in Large Language Models" (arXiv 2402.17762); Blake et al.,
    "u-muP" (arXiv 2407.17465), section 4.2, which keeps the layers known for it out of FP8.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_unitscale.capture.graph_recorder import stored_elements
from lightning_unitscale.formats import E4M3FN, E5M2, NumberFormat
from lightning_unitscale.scales.layout import Direction
from lightning_unitscale.scales.reduce import row_dtype

# The range that lossless unit scaling promises for the stored RMS of an operand.
LOW, HIGH = 0.25, 4.0
# An element beyond the range becomes wrong, not rounded, so none is accepted. A flushed element was
# below 2**-10 of the RMS, so only many of them matter.
MAX_FLUSHED = 0.25

# The formats that a tensor may be cast to, from the finest on.
FORMATS: dict[Direction, tuple[NumberFormat, ...]] = {
    "forward": (E4M3FN,),
    "backward": (E4M3FN, E5M2),
}
NUM_SHARES = 4  # number of shares per tensor that describe FP8's losses, in either direction
# Direction, name in the gauge, and the numbers of :func:`stored_row`.
StoredRow = tuple[Direction, str, Sequence[float]]


def root_mean_square(tensor: Tensor) -> Tensor:
    """Return the RMS of a tensor, 0-d, without overflow or underflow for FP32 values."""
    # The square of an ordinary gradient of 1e-25 is 0 in FP32, so we sum squares in FP64.
    dtype = row_dtype(tensor.device)
    tensor = stored_elements(tensor.detach())
    if tensor.numel() == 0:
        return torch.zeros((), dtype=dtype, device=tensor.device)
    norm = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm / math.sqrt(tensor.numel())


def combined_rms(values: list[float]) -> float:
    """Return the RMS of equal-sized parts, scaled by the largest so that squares stay in range."""
    largest = max(values)
    if not math.isfinite(largest) or largest == 0.0:
        return largest
    return largest * math.sqrt(sum((rms / largest) ** 2 for rms in values) / len(values))


def is_late_look(count: int) -> bool:
    """Decide whether missing units justify another run of a step or a synchronization of ranks."""
    return count in (1, 2, 4) or (count > 0 and count % 8 == 0)


@dataclass(frozen=True)
class Unrepresentable:
    """The matmuls that FP8 cannot represent, each with the reason."""

    matmuls: Mapping[str, str] = field(default_factory=dict)  # matmuls that should not run in FP8
    # Matmuls that fit, but whose gradients need E5M2's range.
    gradients: Mapping[str, str] = field(default_factory=dict)

    def joined(self, other: Unrepresentable) -> Unrepresentable:
        """Return the union of both, with the reasons of ``other`` for common matmuls."""
        return Unrepresentable(
            {**self.matmuls, **other.matmuls}, {**self.gradients, **other.gradients}
        )

    def without(self, other: Unrepresentable) -> Unrepresentable:
        """Return the entries that are not in ``other``."""
        return Unrepresentable(
            {name: why for name, why in self.matmuls.items() if name not in other.matmuls},
            {name: why for name, why in self.gradients.items() if name not in other.gradients},
        )


def unrepresentable_among(
    rows: Iterable[StoredRow], *, awaits_units: bool = True
) -> Unrepresentable:
    """Find the matmuls that do not fit. Tensors outside the RMS range may first get new units."""
    matmuls: dict[str, str] = {}
    gradients: dict[str, str] = {}
    for direction, name, (rms, *shares) in rows:
        if awaits_units and not LOW <= rms <= HIGH:
            continue
        matmul = name.partition(":")[0]
        what = name.rpartition(":")[2] if direction == "forward" else "gradient"
        *narrow, widest = zip(shares[::2], shares[1::2], FORMATS[direction], strict=False)
        losses = [(matmuls, widest), *((gradients, each) for each in narrow)]
        for reasons, (beyond, flushed, format) in losses:
            if beyond > 0.0:
                reasons[matmul] = f"{beyond:.2g} of its {what} is beyond {format}'s range"
            elif flushed > MAX_FLUSHED:
                reason = f"{flushed:.0%} of its {what} would be zero in {format}"
                reasons.setdefault(matmul, reason)
    return Unrepresentable(matmuls, gradients)


def stored_row(tensor: Tensor, direction: Direction) -> Tensor:
    """Return the RMS of a scaled tensor, and each format's shares beyond its range and flushed."""
    row = root_mean_square(tensor).reshape(1)
    return torch.cat([row, stored_shares(tensor, direction).to(row.dtype)])


def stored_shares(tensor: Tensor, direction: Direction) -> Tensor:
    """Return the shares of a scaled tensor that each format would overflow and flush."""
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

"""Which products would lose more than rounding in FP8, found out while their units are measured.

A tensor near RMS 1 fits into FP8 unless its elements differ too much among themselves: a few of
them are many hundred times the RMS, as the massive activations of some language models are, or
most of them are nearly zero next to the others.

References:
    Sun et al., "Massive Activations in Large Language Models" (arXiv 2402.17762); Blake et al.,
    "u-muP" (arXiv 2407.17465), section 4.2, which keeps the layers known for it out of FP8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, fx

from lightning_unitscale.formats import E4M3FN, E5M2, NumberFormat
from lightning_unitscale.transforms.calibration import ArgumentsOf, Calibrator, Direction, NameOf
from lightning_unitscale.transforms.gauge import MAX_LOG2_SIGMA

# An element beyond the range is a wrong number, not a rounded one: not a single one is accepted.
# One that becomes zero was worth less than 2**-10 of the RMS: only many of them matter.
MAX_FLUSHED = 0.25

FORMATS: dict[Direction, NumberFormat] = {"forward": E4M3FN, "backward": E5M2}


class RangeCalibrator(Calibrator):
    """A calibrator that also counts what FP8 would lose of each tensor in its own units."""

    def __init__(self, arguments_of: ArgumentsOf, gradient_of: NameOf, result_of: NameOf) -> None:
        super().__init__(self._operands_of, gradient_of, result_of)
        self._arguments_of = arguments_of
        self._operands: set[str] = set()
        self._lost: dict[tuple[Direction, str], list[Tensor]] = defaultdict(list)

    def record(self, direction: Direction, name: str, tensor: Tensor) -> Tensor:
        """Take down a tensor that was met; returns its RMS."""
        rms = super().record(direction, name, tensor)
        # At depth "all" results are measured as well, which nothing reads in FP8.
        if direction == "backward" or name in self._operands:
            lost = lost_shares(tensor.detach(), rms, FORMATS[direction])
            self._lost[direction, name].append(lost)
        return rms

    def clear(self) -> None:
        """Forget what was measured."""
        super().clear()
        self._lost.clear()

    def unfit(self) -> dict[str, str]:
        """Products that lose too much in FP8, with what they lose; one transfer from the device."""
        places = [place for place, parts in self._lost.items() for _ in parts]
        if not places:
            return {}
        parts = [one for parts in self._lost.values() for one in parts]
        shares = torch.stack([one.to(parts[0].device) for one in parts]).tolist()
        return unfit_products(
            (direction, name, beyond, flushed)
            for (direction, name), (beyond, flushed) in zip(places, shares, strict=True)
        )

    def _operands_of(self, node: fx.Node) -> list[tuple[str, fx.Node]]:
        operands = self._arguments_of(node)
        self._operands.update(name for name, _ in operands)
        return operands


def unfit_products(shares: Iterable[tuple[Direction, str, float, float]]) -> dict[str, str]:
    """Products that lose too much in FP8, with what they lose.

    Args:
        shares: Direction and name in the gauge of tensors, with what :func:`lost_shares` says.
    """
    reasons: dict[str, str] = {}
    for direction, name, beyond, flushed in shares:
        product = name.partition(":")[0]
        what = name.rpartition(":")[2] if direction == "forward" else "gradient"
        if beyond > 0.0:
            reasons[product] = f"{beyond:.2g} of its {what} is beyond {FORMATS[direction]}'s range"
        elif flushed > MAX_FLUSHED:
            reasons.setdefault(
                product, f"{flushed:.0%} of its {what} would be zero in {FORMATS[direction]}"
            )
    return reasons


def lost_shares(tensor: Tensor, rms: Tensor, format: NumberFormat) -> Tensor:
    """What a format would lose of a tensor in units of the power of two nearest to its RMS.

    Args:
        tensor: Floating point, of any shape.
        rms: Its RMS, 0-d.
        format: The format.

    Returns:
        Two numbers: the share of elements that are beyond the range, and the share of those other
        than zero that would become zero. Both 0 for a tensor without a finite RMS above zero.
    """
    usable = rms.isfinite() & (rms > 0)
    exponent = torch.log2(torch.where(usable, rms, 1.0)).round()
    unit = torch.exp2(exponent.clamp(-MAX_LOG2_SIGMA, MAX_LOG2_SIGMA)).float()
    return torch.where(usable, stored_shares(tensor.float() / unit, format), 0.0)


def stored_shares(tensor: Tensor, format: NumberFormat) -> Tensor:
    """What a format would lose of a tensor as it is: :func:`lost_shares` without units."""
    magnitudes = tensor.abs().float()
    count = (magnitudes > 0).sum()
    beyond = (magnitudes > format.overflow_threshold).sum() / max(tensor.numel(), 1)
    flushed = ((magnitudes > 0) & (magnitudes <= format.flush_threshold)).sum() / count.clamp(min=1)
    return torch.stack([beyond, flushed])

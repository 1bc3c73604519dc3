"""Report by name, and once, an operand of which a format makes more than a few elements zero."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_unitscale.dispatch.coverage import percent
from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.lossless.fp8_range import MAX_FLUSHED
from lightning_unitscale.scales.transfer import HostCopy

# Share of the elements other than zero that may become zero without a word, beyond three times what
# the format does to normal numbers: E4M3FN makes one of a thousand zero, E2M1FN one of five. Of the
# gradients of attention, E4M3FN makes 5 % zero in healthy trainings.
MAX_SILENT = 0.1
_OF_NORMAL = 3
# What was reported is reported once more when it has become this bad.
_MAX_SHARES = (MAX_SILENT, MAX_FLUSHED)
# Elements that are none of these: of a small tensor, one is a large share.
_FEW = 2
_NAMED = 5


class FlushedOperands:
    """Collects shares of operands that become zero; reads from a device without waiting for it."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, NumberFormat, Tensor]] = []
        self._sent: list[tuple[list[tuple[str, NumberFormat]], HostCopy]] = []
        self._found: dict[str, str] = {}
        # By operand: the level above which its next report is.
        self._levels: Counter[str] = Counter()

    def measure(self, name: str, stored: Tensor, format: NumberFormat) -> None:
        """Measure an operand."""
        if self._levels[name] == len(_MAX_SHARES):
            return
        magnitudes = stored.detach().abs()
        is_some = magnitudes > 0
        flushed = (is_some & (magnitudes <= format.flush_threshold)).sum()
        share = torch.where(flushed > _FEW, flushed / is_some.sum().clamp(min=1), 0.0)
        self._rows.append((name, format, share))

    def _note(self, name: str, share: float, format: NumberFormat) -> None:
        usual = _OF_NORMAL * math.erf(format.flush_threshold / math.sqrt(2.0))
        level = sum(share > each + usual for each in _MAX_SHARES)
        if level > self._levels[name]:
            self._levels[name] = level
            # A product's own name is that of the gradient that arrives at it.
            shown = name if ":" in name else f"{name}:gradient"
            self._found[name] = f"{shown} ({percent(share)} of its elements in {format})"

    def take(self, is_rounded: Callable[[str], bool] = lambda name: True) -> str:
        """Return what has arrived and was not reported yet; empty if that is nothing."""
        if self._rows:
            rows, self._rows = self._rows, []
            device = rows[0][2].device
            shares = torch.stack([share.to(device) for *_, share in rows])
            self._sent.append(([(name, format) for name, format, _ in rows], HostCopy(shares)))
        while self._sent and self._sent[0][1].has_arrived:
            names, copy = self._sent.pop(0)
            for (name, format), share in zip(names, copy.numbers().tolist(), strict=True):
                if is_rounded(name):
                    self._note(name, share, format)
        if not self._found:
            return ""
        texts, self._found = list(self._found.values()), {}
        more = len(texts) - _NAMED
        return "; ".join(texts[:_NAMED]) + (f"; and {more} more" if more > 0 else "")

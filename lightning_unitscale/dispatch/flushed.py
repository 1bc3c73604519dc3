"""Report by name, and once, an operand of which a format makes more than a few elements zero."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from lightning_unitscale.dispatch.coverage import percent
from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.lossless.fp8_range import MAX_FLUSHED
from lightning_unitscale.scales.transfer import HostCopy

# Share of the elements other than zero that may become zero without a word. In units, a format with
# four bits of exponent makes one of a thousand normal numbers zero.
MAX_SILENT = 0.01
# What was reported is reported once more when it has become this bad.
_LEVELS = (MAX_SILENT, MAX_FLUSHED)
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
        """Measure an operand.

        Args:
            name: The operand's.
            stored: The operand in its unit.
            format: What it is rounded to.
        """
        if self._levels[name] == len(_LEVELS):
            return
        magnitudes = stored.detach().abs()
        is_some = magnitudes > 0
        flushed = (is_some & (magnitudes <= format.flush_threshold)).sum()
        self._rows.append((name, format, flushed / is_some.sum().clamp(min=1)))

    def note(self, name: str, share: float, format: NumberFormat) -> None:
        """Take what was measured of an operand elsewhere; see :meth:`measure`."""
        level = sum(share > each for each in _LEVELS)
        if level > self._levels[name]:
            self._levels[name] = level
            # A product's own name is that of the gradient that arrives at it.
            shown = name if ":" in name else f"{name}:gradient"
            self._found[name] = f"{shown} ({percent(share)} of its elements in {format})"

    def take(self) -> str:
        """Return what has arrived and was not reported yet; empty if that is nothing."""
        if self._rows:
            rows, self._rows = self._rows, []
            device = rows[0][2].device
            shares = torch.stack([share.to(device) for *_, share in rows])
            self._sent.append(([(name, format) for name, format, _ in rows], HostCopy(shares)))
        while self._sent and self._sent[0][1].has_arrived:
            names, copy = self._sent.pop(0)
            for (name, format), share in zip(names, copy.numbers().tolist(), strict=True):
                self.note(name, share, format)
        if not self._found:
            return ""
        texts, self._found = list(self._found.values()), {}
        more = len(texts) - _NAMED
        return "; ".join(texts[:_NAMED]) + (f"; and {more} more" if more > 0 else "")

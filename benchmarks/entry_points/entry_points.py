"""All entry points, by name."""

from __future__ import annotations

from . import diffusion, forecasters, gradients, language, own_loops, preferences, tables
from .entry_point import EntryPoint

_DOMAINS = (forecasters, tables, diffusion, language, preferences, own_loops, gradients)

ENTRY_POINTS: dict[str, EntryPoint] = {
    item.name: item for domain in _DOMAINS for item in domain.ENTRY_POINTS
}

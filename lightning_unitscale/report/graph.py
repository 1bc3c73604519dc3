"""The graph of a step as a picture.

Tensors stand from top to bottom, with their scales; arcs at their left are what they are computed
from.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Final

from lightning_unitscale.scale_table import Array

_ROW: Final = 18
_ARCS: Final = 150
_BOX: Final = 62
_LETTER: Final = 6.6
# As in the dashboard's palette.js.
_COLD: Final = (33, 102, 172)
_WARM: Final = (217, 95, 14)
_FULL_COLOUR: Final = 14.0


def graph_svg(
    names: Sequence[str],
    inputs: Sequence[Sequence[str]],
    log2_rms: Mapping[str, Array],
) -> str:
    """The annotated graph.

    Args:
        names: The tensors, in graph order.
        inputs: For each the names of those that it is computed from; unknown ones are left out.
        log2_rms: Title of a column -> log2 RMS of all tensors, ``-inf`` for zeros, NaN for none.

    Returns:
        An SVG element whose text takes the colour of the page.
    """
    place = {name: row for row, name in enumerate(names)}
    edges = [
        (place[source], row)
        for row, sources in enumerate(inputs)
        for source in sources
        if source in place
    ]
    longest = max((len(name) for name in names), default=0)
    left = _ARCS + 14 + len(log2_rms) * (_BOX + 6)
    width, height = left + 10 + _LETTER * longest, (len(names) + 1) * _ROW + 6
    parts = [_arc(*edge) for edge in edges]
    for column, title in enumerate(log2_rms):
        x = _ARCS + 14 + column * (_BOX + 6) + _BOX / 2
        parts.append(f'<text x="{x}" y="13" text-anchor="middle">{html.escape(title)}</text>')
    for row, name in enumerate(names):
        y = _middle(row)
        parts.append(f'<circle cx="{_ARCS}" cy="{y}" r="3" fill="currentColor"/>')
        for column, values in enumerate(log2_rms.values()):
            parts.append(_box(_ARCS + 14 + column * (_BOX + 6), y, float(values[row])))
        parts.append(f'<text x="{left}" y="{y + 4}">{html.escape(name)}</text>')
    return (
        f'<svg class="step-graph" width="{width:.0f}" height="{height}" role="img" '
        'aria-label="Graph of the step with log2 RMS per tensor" font-size="11" '
        'fill="currentColor" font-family="ui-monospace, Menlo, Consolas, monospace">'
        f"{''.join(parts)}</svg>"
    )


def _middle(row: int) -> float:
    return (row + 1) * _ROW + _ROW / 2


def _arc(source: int, target: int) -> str:
    """An arc; its reach grows with the logarithm of the distance, so that it stays in view."""
    start, end = _middle(source), _middle(target)
    reach = min(14 * math.log2(1 + abs(target - source)) + 4, _ARCS - 6)
    x = _ARCS - reach
    return (
        f'<path d="M{_ARCS} {start} C{x:.0f} {start} {x:.0f} {end} {_ARCS} {end}" fill="none" '
        f'stroke="currentColor" stroke-opacity="0.35" data-from="{source}" data-to="{target}"/>'
    )


def _box(x: float, y: float, value: float) -> str:
    if math.isnan(value):
        return ""
    # Adding zero takes the sign off a zero.
    text = "zero" if math.isinf(value) else f"{round(value, 1) + 0.0:.1f}"
    text = text.replace("-", "\N{MINUS SIGN}")
    red, green, blue = _WARM if value > 0 else _COLD
    strength = 0.0 if math.isinf(value) else min(abs(value) / _FULL_COLOUR, 1.0)
    # At most half covered: the text keeps its contrast on white and on black.
    fill = f"rgba({red},{green},{blue},{0.5 * strength:.2f})"
    return (
        f'<rect x="{x}" y="{y - _ROW / 2 + 1}" width="{_BOX}" height="{_ROW - 2}" rx="3" '
        f'fill="{fill}" stroke="currentColor" stroke-opacity="0.2"/>'
        f'<text x="{x + _BOX / 2}" y="{y + 4}" text-anchor="middle">{text}</text>'
    )

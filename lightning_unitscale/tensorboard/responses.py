"""Encode the answers of the Scales dashboard's server, and the page of a report that contains them.

Arrays are sent in frames, since JSON has no NaN and no compact numbers. A frame is the length of
its header (uint32), the header, and the float32 arrays that the header's ``arrays`` lists. The
header is JSON, padded with spaces to a multiple of four bytes. All of it is little-endian.
The page also has the graph of the step: tensors from top to bottom, and arcs to their inputs.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lightning_unitscale.formats import BF16, E4M3FN, E5M2, FP16
from lightning_unitscale.scales.alerts import ScaleAlert
from lightning_unitscale.scales.layout import MIN_EXPONENT, NUM_EXPONENTS, Direction
from lightning_unitscale.tensorboard.divergence import find_divergence
from lightning_unitscale.tensorboard.history import (
    FractionHistory,
    RunScales,
    ScaleHistory,
    kept_steps,
)
from lightning_unitscale.tensorboard.schema import ExponentCounts
from lightning_unitscale.tensorboard.table import Array

SHOWN_FORMATS = (FP16, BF16, E4M3FN, E5M2)  # the formats whose ranges the dashboard shows
_FORMAT_FIELDS = ("name", "smallest_normal", "flush_threshold", "subnormal_threshold",
                  "overflow_threshold")  # fmt: skip


def frame(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return a frame of a header and arrays."""
    shapes = [{"name": name, "shape": array.shape} for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": shapes}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    parts = [len(text).to_bytes(4, "little"), text]
    parts += [array.astype("<f4", copy=False).tobytes() for array in arrays.values()]
    return b"".join(parts)


@dataclass(frozen=True)
class ListedRun:
    """A run that has scales."""

    name: str
    started: float  # in seconds since 1970. The page opens with the newest run.
    last_steps: Mapping[Direction, int]
    # This changes with each step, and with late data of the last step, such as alerts.
    version: int = 0


def runs_json(runs: Sequence[ListedRun]) -> bytes:
    """Return the runs and the number formats to show."""
    content = {
        "runs": [dataclasses.asdict(run) for run in runs],
        "formats": [
            {field: getattr(item, field) for field in _FORMAT_FIELDS} for item in SHOWN_FORMATS
        ],
    }
    return json.dumps(content, separators=(",", ":")).encode()


def alerts_json(alerts: Sequence[ScaleAlert]) -> bytes:
    """Return the alerts, each with a kind, a step, a tensor, a direction and a text."""
    fields = ("kind", "step", "tensor", "direction")
    shown = [
        {field: getattr(alert, field) for field in fields} | {"text": str(alert)}
        for alert in alerts
    ]
    return json.dumps(shown, separators=(",", ":")).encode()


def precision_json(run: RunScales) -> bytes:
    """Return the last precision report of a run, or null."""
    return json.dumps(run.precision(), separators=(",", ":")).encode()


def divergence_json(run: RunScales, compared: RunScales) -> bytes:
    """Return where two runs diverge, with the report as ``text``, or only an error's text."""
    try:
        found = find_divergence(run, compared)
    except ValueError as error:
        return json.dumps({"diverged": False, "text": str(error)}).encode()
    return json.dumps(found.to_json() | {"text": found.text}, allow_nan=False).encode()


def scales_frame(history: ScaleHistory) -> bytes:
    """Return the steps, tensors and log2 RMS of a run."""
    # Units change rarely, so array `log2_unit` has a row only for each step with new units. The
    # header's `unit_rows` maps every step to its row. Array `nonfinite` has a row for each of the
    # steps that `nonfinite_rows` lists by position.
    units = history.log2_unit
    changed = np.ones(len(units), dtype=bool)
    if len(units):
        same = (units[1:] == units[:-1]) | np.isnan(units[1:]) & np.isnan(units[:-1])
        changed[1:] = ~same.all(axis=1)
    bad = np.flatnonzero(history.nonfinite.any(axis=1))
    header = {
        "names": history.names,
        "modules": history.modules,
        "sources": history.sources,
        "operands": history.operands,
        "steps": history.steps.tolist(),
        "unit_rows": (np.cumsum(changed) - 1).tolist(),
        "nonfinite_rows": bad.tolist(),
    }
    arrays = {
        "log2_rms": history.log2_rms,
        "log2_unit": units[changed],
        "nonfinite": history.nonfinite[bad],
    }
    return frame(header, arrays)


def exponents_frame(counts: Mapping[int, ExponentCounts]) -> bytes:
    """Return the exponent counts of one tensor over the steps, without unused exponents."""
    rows = np.zeros((len(counts), NUM_EXPONENTS), np.float32)
    for row, point in zip(rows, counts.values(), strict=True):
        row[:] = point.counts
    present = np.flatnonzero(rows.any(axis=0))
    first, stop = (present[0], present[-1] + 1) if present.size else (0, 0)
    header = {
        "steps": list(counts),
        "first_exponent": MIN_EXPONENT + int(first),
        "num_sampled": [point.num_sampled for point in counts.values()],
        "log2_unit": [point.log2_unit for point in counts.values()],
    }
    return frame(header, {"counts": rows[:, first:stop]})


def fractions_frame(history: FractionHistory, tensor: int) -> bytes:
    """Return the out-of-range fractions of one stored tensor, array ``(T, F, 3)``."""
    # Array `blocks` has its losses to block formats, `(T, B, 4)`. The header's `share_read` is the
    # share of elements that the fractions come from, for every step.
    header = {
        "steps": history.steps.tolist(),
        "formats": [item.name for item in history.formats],
        "block_formats": [item.name for item in history.block_formats],
        "share_read": np.nan_to_num(history.share_read[:, tensor], nan=1.0).tolist(),
    }
    fractions, blocks = history.fractions[:, tensor], history.blocks[:, tensor]
    return frame(header, {"fractions": fractions, "blocks": blocks})


_ROW: Final = 18
_ARCS: Final = 150
_BOX: Final = 62
_LETTER: Final = 6.6
# As in the dashboard's palette.js.
_COLD: Final = (33, 102, 172)
_WARM: Final = (217, 95, 14)
_FULL_COLOR: Final = 14.0


def graph_svg(
    names: Sequence[str], inputs: Sequence[Sequence[str]], log2_rms: Mapping[str, Array]
) -> str:
    """Return the graph of the step as SVG, with scales."""
    row_of = {name: row for row, name in enumerate(names)}
    edges = [
        (row_of[source], row)
        for row, sources in enumerate(inputs)
        for source in sources
        if source in row_of
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
    """Return an arc, whose width grows with the logarithm of the distance, to stay in view."""
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
    text = "zero" if math.isinf(value) else f"{value:z.1f}"
    text = text.replace("-", "\N{MINUS SIGN}")
    red, green, blue = _WARM if value > 0 else _COLD
    strength = 0.0 if math.isinf(value) else min(abs(value) / _FULL_COLOR, 1.0)
    # At most half opaque, so that the text keeps its contrast on white and on black.
    fill = f"rgba({red},{green},{blue},{0.5 * strength:.2f})"
    return (
        f'<rect x="{x}" y="{y - _ROW / 2 + 1}" width="{_BOX}" height="{_ROW - 2}" rx="3" '
        f'fill="{fill}" stroke="currentColor" stroke-opacity="0.2"/>'
        f'<text x="{x + _BOX / 2}" y="{y + 4}" text-anchor="middle">{text}</text>'
    )


STATIC: Final = Path(__file__).parent / "static"
# A screen has no more pixels for two runs' columns. Histograms are larger.
_MOST_STEPS: Final = 600
_MOST_HISTOGRAMS: Final = 40
_MOST_ALERTS: Final = 200
_COMPARED: Final = 2

_IMPORT = re.compile(r"^import \{([^}]*)\} from '\./([\w.]+)';\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:class|function|const) (\w+))", re.MULTILINE)

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}
/* Leave a part of the tables visible below the map, so that readers scroll to it. */
.scales {{ height: calc(100vh - 60px); min-height: 480px; }}
.report-table {{ padding: 16px; overflow-x: auto; border-top: 1px solid var(--line); }}
.report-table h2 {{ margin: 0 0 12px; font-size: 16px; }}
.report-table :is(pre, ol) + h2 {{ margin-top: 28px; }}
.report-table li {{ overflow-wrap: anywhere; }}
.report-table pre {{ margin: 0; font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; }}
</style>
</head>
<body>
<script type="application/json" id="answers">{answers}</script>
<script type="module">
{script}
</script>
<section class="report-table">
{tables}
</section>
<section class="report-table">
{graphs}
</section>
</body>
</html>
"""

_START = """
const answers = JSON.parse(document.getElementById('answers').textContent);
const app = new App(new EmbeddedSource(answers), watchTheme());
window.scalesDashboard = app;
document.body.prepend(app.node);
app.start();
"""


def report_page(runs: Mapping[str, RunScales], tables: Mapping[str, str], title: str) -> str:
    """Return the page as HTML."""
    answers: dict[str, str] = {}
    for route, data in _answers(runs):
        packed = gzip.compress(data, compresslevel=6, mtime=0)
        answers[route] = base64.b64encode(packed).decode()
    sections = [_table_section(name, table, runs[name]) for name, table in tables.items()]
    graphs = [_graph_section(name, run) for name, run in runs.items()]
    return _PAGE.format(
        title=html.escape(title),
        style=(STATIC / "style.css").read_text(encoding="utf-8"),
        # A name must not be able to end the script element.
        answers=json.dumps(answers, separators=(",", ":")).replace("<", "\\u003c"),
        script=bundle("app.js", "source.js", "theme.js") + _START,
        tables="\n".join(sections),
        graphs="\n".join(graphs),
    )


def _table_section(name: str, table: str, run: RunScales) -> str:
    """Return the table of the last step and the alerts."""
    title = f"<h2>{html.escape(name)}: the last sampled step</h2>"
    parts = [title, f"<pre>{html.escape(table)}</pre>"]
    if precision := run.precision():
        parts += _precision_section(name, precision)
    if alerts := run.alerts():
        items = "\n".join(f"<li>{html.escape(str(alert))}</li>" for alert in alerts[:_MOST_ALERTS])
        parts += [f"<h2>{html.escape(name)}: alerts</h2>", f"<ol>\n{items}\n</ol>"]
        if len(alerts) > _MOST_ALERTS:
            parts.append(
                f"<p>and {len(alerts) - _MOST_ALERTS:,} more, in the list above the map</p>"
            )
    return "\n".join(parts)


def _precision_section(name: str, precision: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of a precision report."""
    yield f"<h2>{html.escape(name)}: precision at step {precision['step']:,}</h2>"
    yield from (f"<p>{html.escape(line)}</p>" for line in precision["summary"])
    head = "".join(f"<th>{html.escape(title)}</th>" for title in precision["columns"])
    for table in precision["tables"]:
        rows = "\n".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in table["rows"]
        )
        yield f'<table class="ledger-table">\n<caption>{html.escape(table["title"])}</caption>'
        yield f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def _graph_section(name: str, run: RunScales) -> str:
    """Return the last step as a graph, folded."""
    histories = {direction: run.history(direction) for direction in run.directions}
    columns: dict[str, Array] = {way: history.log2_rms[-1] for way, history in histories.items()}
    picture = graph_svg(run.names, [run.inputs.get(name, ()) for name in run.names], columns)
    step = max(int(history.steps[-1]) for history in histories.values())
    title = f"{name}: the graph of step {step}, with log2 RMS of the stored tensors"
    return f"<details><summary>{html.escape(title)}</summary>\n{picture}\n</details>"


def bundle(*entries: str) -> str:
    """Join modules of the dashboard and their imports into the text of one module."""
    # Each module becomes a function that returns its exports. Exports of the entries are in scope.
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        if name in texts:
            return
        source = (STATIC / name).read_text(encoding="utf-8")
        for imported in _IMPORT.finditer(source):
            add(imported[2])
        exported = ", ".join(match[1] for match in _EXPORT.finditer(source))
        body = _IMPORT.sub(lambda match: f"const {{{match[1]}}} = modules['{match[2]}'];\n", source)
        body = _EXPORT.sub("", body)
        texts[name] = (
            f"modules['{name}'] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n"
            + (f"const {{ {exported} }} = modules['{name}'];\n" if name in entries else "")
        )

    for entry in entries:
        add(entry)
    return "const modules = {};\n" + "".join(texts.values())


def _answers(runs: Mapping[str, RunScales]) -> Iterator[tuple[str, bytes]]:
    """Yield the answers to the page's requests, with the keys of source.js."""
    listed = []
    for number, (name, run) in enumerate(runs.items()):
        yield _key("alerts", name), alerts_json(run.alerts())
        yield _key("precision", name), precision_json(run)
        last_steps = {}
        for direction in run.directions:
            history = run.history(direction, _MOST_STEPS)
            last_steps[direction] = int(history.steps[-1])
            yield _key("scales", name, direction), scales_frame(history)
            fractions = run.fractions(direction, _MOST_STEPS)
            for column, tensor in enumerate(history.names):
                counts = run.exponents(direction, tensor)
                steps = list(counts)
                kept = {
                    steps[k]: counts[steps[k]] for k in kept_steps(len(steps), _MOST_HISTOGRAMS)
                }
                key = (name, direction, tensor)
                yield _key("exponents", *key), exponents_frame(kept)
                yield _key("fractions", *key), fractions_frame(fractions, column)
        # The page opens with the newest run, so make the first one the newest.
        listed.append(ListedRun(name, float(-number), last_steps))
    if len(runs) == _COMPARED:  # for more pairs this would take longer than the rest of the report
        for a, b in itertools.permutations(runs):
            yield _key("divergence", a, b), divergence_json(runs[a], runs[b])
    yield _key("runs"), runs_json(listed)


def _key(*parts: str) -> str:
    return "\n".join(parts)

"""Write the Scales dashboard as one page, with its modules, its style and the server's answers.

The page also has the graph of the step: tensors from top to bottom, and arcs to their inputs.
"""

from __future__ import annotations

import base64
import gzip
import html
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_unitscale.tensorboard import responses
from lightning_unitscale.tensorboard.history import RunScales, kept_steps
from lightning_unitscale.tensorboard.table import Array

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


STATIC: Final = Path(responses.__file__).parent / "static"
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
        yield _key("alerts", name), responses.alerts_json(run.alerts())
        yield _key("precision", name), responses.precision_json(run)
        last_steps = {}
        for direction in run.directions:
            history = run.history(direction, _MOST_STEPS)
            last_steps[direction] = int(history.steps[-1])
            yield _key("scales", name, direction), responses.scales_frame(history)
            fractions = run.fractions(direction, _MOST_STEPS)
            for column, tensor in enumerate(history.names):
                counts = run.exponents(direction, tensor)
                steps = list(counts)
                kept = {
                    steps[k]: counts[steps[k]] for k in kept_steps(len(steps), _MOST_HISTOGRAMS)
                }
                key = (name, direction, tensor)
                yield _key("exponents", *key), responses.exponents_frame(kept)
                yield _key("fractions", *key), responses.fractions_frame(fractions, column)
        # The page opens with the newest run, so make the first one the newest.
        listed.append(responses.ListedRun(name, float(-number), last_steps))
    if len(runs) == _COMPARED:  # for more pairs this would take longer than the rest of the report
        for a, b in itertools.permutations(runs):
            yield _key("divergence", a, b), responses.divergence_json(runs[a], runs[b])
    yield _key("runs"), responses.runs_json(listed)


def _key(*parts: str) -> str:
    return "\n".join(parts)

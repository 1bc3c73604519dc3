"""A tracked graph as a text table and as HTML for notebooks."""

import math
import re
from html.parser import HTMLParser

import torch
from torch import nn

from lightning_unitscale.transforms import (
    Metrics,
    ScalesGraph,
    prune_non_float_tensors,
    prune_selected_nodes,
    track_scales,
)


class Table(HTMLParser):
    """Reads cells and checks that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.styles: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.styles.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
            self.styles[-1].append(dict(attrs).get("style") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in {"td", "th"}:
            self.rows[-1][-1] += data


def opacity(style: str) -> float:
    found = re.search(r"rgba\(\d+,\d+,\d+,([\d.]+)\)", style)
    return float(found[1]) if found else -1.0


def row(graph: ScalesGraph, mean_abs: float) -> list[str]:
    node = graph.placeholder("x")
    node.meta["metrics"] = Metrics(Metrics.Data(mean_abs, 0.0, math.nan, 1.0, 0.0, 3))
    return Table(graph._repr_html_()).styles[-1]


def test_tracked_graph_is_shown_as_table() -> None:
    model = track_scales(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    model(torch.randn(5, 4)).sum().backward()
    graph = model.scales_graph()
    table = Table(graph._repr_html_())
    assert table.rows[0] == [
        "name", "op", "module", "mean |x|", "std", "mean |grad|", "std of grad",
    ]  # fmt: skip
    assert len(table.rows) == len(graph.nodes)  # the output has no row, the header has one
    by_name = {cells[0]: cells[1:] for cells in table.rows}
    assert by_name["0.linear"][:2] == ["linear", "0"]
    assert by_name["0.weight"][0] == "input"
    found = {node.meta["tensor_name"]: node.meta["metrics"] for node in graph.nodes}["1.relu"]
    assert by_name["1.relu"][2] == f"{found.fwd.mean_abs:.4g}"
    assert by_name["1.relu"][4] == f"{found.bwd.mean_abs:.4g}" == "1"
    text = graph.tabulate()
    assert len(text.splitlines()) == 2 + len(graph.nodes) - 1
    assert "0.linear" in text
    assert graph.tabulate("github").startswith("|")


def test_pruned_graphs_are_shown_as_tables() -> None:
    model = track_scales(nn.Linear(4, 3))
    model(torch.randn(5, 4))
    graph = prune_non_float_tensors(model.scales_graph())
    assert len(Table(graph._repr_html_()).rows) == 5
    assert len(Table(prune_selected_nodes(graph, [torch._C._nn.linear])._repr_html_()).rows) == 4


def test_text_is_escaped() -> None:
    graph = ScalesGraph()
    node = graph.placeholder("x")
    node.meta.update(tensor_name="<script>&\"'", module_path="<b>", metrics=None)
    text = graph._repr_html_()
    assert "<script" not in text and "<b>" not in text
    assert Table(text).rows[1] == ["<script>&\"'", "input", "<b>", "", "", "", ""]


def test_colors_follow_the_scale() -> None:
    for scales, color in (((1.5, 16.0, 2e4, math.inf), "214"), ((0.7, 1e-3, 1e-5, 0.0), "52")):
        styles = [row(ScalesGraph(), scale)[3] for scale in scales]
        assert all(f"rgba({color}," in style for style in styles)
        strengths = [opacity(style) for style in styles]
        assert strengths == sorted(strengths)
        assert 0.0 <= strengths[0] < 0.1 and strengths[-1] == 0.5
    assert opacity(row(ScalesGraph(), 1.0)[3]) == 0.0
    assert opacity(row(ScalesGraph(), math.nan)[3]) == -1.0
    assert opacity(row(ScalesGraph(), 1.0)[4]) == -1.0


def test_empty_graph_has_only_header() -> None:
    graph = track_scales(nn.Linear(2, 2)).scales_graph()
    assert len(graph.nodes) == 0
    assert len(Table(graph._repr_html_()).rows) == 1
    assert "mean |x|" in graph.tabulate()

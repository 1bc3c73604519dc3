"""Profiles as text, as a picture and as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import networkx as nx
import pytest
import torch

from lightning_unitscale.memory.profile_report import format_bytes, format_flops
from lightning_unitscale.profiler import GraphProfile, profile_graph
from tests.memory.networks import NETWORKS
from tests.memory.oracles import sum_of


@pytest.fixture(scope="module")
def profile() -> GraphProfile:
    module, given = NETWORKS["residual"]()
    return profile_graph(module, given, loss=sum_of, optimizer=torch.optim.AdamW).fit_batch()


@pytest.mark.slow
def test_profile_survives_json_round_trip(profile: GraphProfile, tmp_path: Path) -> None:
    assert GraphProfile.from_json(profile.to_json()) == profile
    profile.save(tmp_path / "profile.json")
    again = GraphProfile.load(tmp_path / "profile.json")
    assert again == profile
    assert again.max_batch_size(10**7) == profile.max_batch_size(10**7)
    assert str(Path.home()) not in profile.to_json()


def test_bad_json_is_an_error() -> None:
    for text in ("", "{}", '{"version": 2, "nodes": 3}', '{"version": 0}', "[]"):
        with pytest.raises(ValueError, match="`text`: not a profile"):
            GraphProfile.from_json(text)


def test_table_is_sorted_by_saved_bytes(profile: GraphProfile) -> None:
    lines = profile.table(limit=3).splitlines()
    assert len(lines) == 2 + 3 + 1
    assert lines[-1] == f"({len(profile.nodes) - 3} more nodes)"
    largest = max(profile.nodes, key=lambda node: node.saved_bytes)
    assert lines[2].startswith(largest.name)
    assert profile.table("order", None).splitlines()[2].startswith("mul")
    by_flops = profile.table("fwd_flops", 1).splitlines()[2]
    assert "linear" in by_flops
    with pytest.raises(ValueError, match=r"sort_by='size'.*Expected 'saved_bytes'.* or 'order'"):
        profile.table("size")


def test_summary_has_peak_and_node(profile: GraphProfile) -> None:
    text = profile.summary()
    assert format_bytes(profile.peak_bytes) in text
    assert profile.peak.phase in text and profile.peak.node in text
    assert "optimizer" in text
    assert "LayerNorm" in profile.module_table()
    assert len(profile.module_table(depth=0).splitlines()) == 3


def test_plot_is_written(profile: GraphProfile, tmp_path: Path) -> None:
    figure = profile.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    (axes,) = figure.axes
    assert {text.get_text().strip() for text in axes.texts} >= {"forward", "backward", "optimizer"}
    assert axes.lines[0].get_ydata().max() == pytest.approx(profile.peak_bytes / 2**20)


def test_missing_matplotlib_error_has_extra(
    profile: GraphProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-unitscale\[report\]"):
        profile.plot()


def test_networkx_graph_has_every_node_and_edge(profile: GraphProfile, tmp_path: Path) -> None:
    graph = profile.to_networkx()
    edges = {(read, node.name) for node in profile.nodes for read in node.inputs}
    assert set(graph.edges) == edges
    made = [name for name, op in graph.nodes(data="op") if op != "placeholder"]
    assert made == [node.name for node in profile.nodes] and nx.is_directed_acyclic_graph(graph)
    for node in profile.nodes:
        attributes = graph.nodes[node.name]
        assert attributes["module"] == node.module and attributes["shape"] == str(node.shape)
        assert attributes["fwd_flops"] == node.fwd_flops
        assert attributes["num_bytes"] == 4 * torch.Size(node.shape).numel()
        saved = {read for read, _, is_saved in graph.in_edges(node.name, data="saved") if is_saved}
        assert saved == set(node.save_fwd_in)
    for read, _, num_bytes in graph.edges(data="num_bytes"):
        assert num_bytes == graph.nodes[read].get("num_bytes")
    assert graph.graph["peak_bytes"] == profile.peak_bytes
    assert graph.graph["saved_bytes"] == profile.saved_bytes
    # Through the branch, not past it.
    path = nx.dag_longest_path(graph, weight="num_bytes", default_weight=0)
    assert any("linear" in name for name in path) and path[-1] == profile.nodes[-1].name
    json.dumps(nx.node_link_data(graph), allow_nan=False)
    nx.write_graphml(graph, tmp_path / "step.graphml")
    assert nx.read_graphml(tmp_path / "step.graphml").edges == graph.edges


def test_node_lookup_by_name(profile: GraphProfile) -> None:
    assert profile.node(profile.nodes[2].name) is profile.nodes[2]
    with pytest.raises(KeyError, match="no node has it"):
        profile.node("nowhere")


def test_bytes_and_flops_are_formatted() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1536, 3 * 2**30)] == [
        "0 B", "1023 B", "1.50 KiB", "3.00 GiB",
    ]  # fmt: skip
    assert [format_flops(flops) for flops in (12, 1500, 2.5e12)] == ["12", "1.50 K", "2.50 T"]

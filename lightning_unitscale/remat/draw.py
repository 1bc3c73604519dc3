"""Pictures of a partition: what is saved, what runs again, and where the cut lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import fx

from lightning_unitscale.remat.planner import RematPlan
from lightning_unitscale.remat.problem import Region, recomputed
from lightning_unitscale.remat.report import new_figure

_COLORS = {
    "input": "lightgray",
    "forward": "lightblue",
    "saved": "gold",
    "recomputed": "salmon",
    "backward": "palegreen",
}


def draw_joint_graph(plan: RematPlan, path: str | Path) -> None:
    """Draw a joint graph with a plan's saved, recomputed and backward nodes; cut edges are bold.

    Args:
        plan: The plan.
        path: ``.dot`` writes text for Graphviz; another suffix that matplotlib knows, such as
            ``.svg`` or ``.png``, draws it.

    Raises:
        ModuleNotFoundError: If a picture is asked for and matplotlib is not installed.
    """
    problem = plan.problem
    again = recomputed(problem, plan.saved)
    roles = {}
    for i, node in enumerate(problem.nodes):
        if node.region is Region.INPUT:
            role = "input"
        elif node.region is Region.BACKWARD:
            role = "backward"
        elif plan.saved[i]:
            role = "saved"
        else:
            role = "recomputed" if again[i] else "forward"
        roles[node.name] = role
    edges = [
        (problem.nodes[i].name, node.name, bool(plan.saved[i]) and roles[node.name] != "forward")
        for node in problem.nodes
        for i in node.inputs
    ]
    labels = {node.name: f"{node.name}\\n{node.kind}" for node in problem.nodes}
    _write(roles, labels, edges, path)


def draw_graph(graph_module: fx.GraphModule, path: str | Path) -> None:
    """Draw the forward or the backward graph of a partition; its inputs are grey.

    Args:
        graph_module: The graph.
        path: ``.dot`` for text, another suffix that matplotlib knows for a picture.

    Raises:
        ModuleNotFoundError: If a picture is asked for and matplotlib is not installed.
    """
    nodes = list(graph_module.graph.nodes)
    roles = {one.name: "input" if one.op == "placeholder" else "forward" for one in nodes}
    for one in graph_module.graph.output_node().all_input_nodes:
        roles[one.name] = "saved"
    edges = [(i.name, one.name, False) for one in nodes for i in one.all_input_nodes]
    _write(roles, {one.name: one.name for one in nodes}, edges, path)


def _write(
    roles: Mapping[str, str],
    labels: Mapping[str, str],
    edges: list[tuple[str, str, bool]],
    path: str | Path,
) -> None:
    if Path(path).suffix == ".dot":
        lines = ["digraph remat {", "  node [shape=box, style=filled];"]
        lines += [
            f'  "{name}" [label="{labels[name]}", fillcolor={_COLORS[role]}];'
            for name, role in roles.items()
        ]
        lines += [
            f'  "{tail}" -> "{head}"{" [penwidth=3]" if is_cut else ""};'
            for tail, head, is_cut in edges
        ]
        Path(path).write_text("\n".join([*lines, "}", ""]))
        return
    _picture(roles, edges, path)


def _picture(
    roles: Mapping[str, str], edges: list[tuple[str, str, bool]], path: str | Path
) -> None:
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(roles)
    graph.add_edges_from((tail, head) for tail, head, _ in edges)
    depth: dict[str, int] = {}
    for name in nx.topological_sort(graph):
        depth[name] = 1 + max((depth[i] for i in graph.predecessors(name)), default=-1)
    rows: dict[int, int] = {}
    positions: dict[str, tuple[float, float]] = {}
    for name, level in depth.items():
        positions[name] = (float(rows.get(level, 0)), -float(level))
        rows[level] = rows.get(level, 0) + 1
    size = (max(6.0, 1.6 * max(rows.values(), default=1)), max(4.0, 0.35 * len(rows)))
    figure, axes = new_figure(*size)
    options: dict[str, Any] = {"ax": axes, "pos": positions}
    nx.draw_networkx_nodes(
        graph, node_color=[_COLORS[roles[one]] for one in graph], node_size=120, **options
    )
    nx.draw_networkx_labels(graph, font_size=5, **options)
    bold = {(tail, head) for tail, head, is_cut in edges if is_cut}
    widths = [2.0 if pair in bold else 0.4 for pair in graph.edges]
    nx.draw_networkx_edges(graph, width=widths, arrowsize=5, **options)
    axes.set_axis_off()
    figure.savefig(path)

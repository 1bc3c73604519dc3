"""Show a plan as text, as a curve of bytes and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import networkx as nx
from tabulate import tabulate
from torch import fx

from lightning_unitscale.memory.joint_graph import kind_of
from lightning_unitscale.memory.profile_report import format_bytes, new_figure
from lightning_unitscale.memory.remat_plan import RematPlan


@dataclass(frozen=True)
class RematReport:
    """Report of the values that a plan keeps and of the operations that it recomputes.

    Attributes:
        plan_name: Origin of the plan.
        plan_hash: Hash that is equal on all ranks with the same plan.
        peak_bytes: Predicted peak of all bytes alive in a step.
        peak_at: Pass and node of the peak, or the optimizer's step.
        saved_bytes: Bytes kept for the backward pass, each storage once, also those moved away.
        recomputed: How often each kind of operation is recomputed.
        recomputed_flops: Floating-point operations of their matmuls.
        recomputed_seconds: Their estimated time.
        sizes: Numbers that the plan assumes for sizes that change from call to call.
        num_offloaded: Number of saved values that wait in host memory.
        host_bytes: Their bytes.
        exposed_seconds: Estimated time in which computing waits for their copies.
        part: The graph's part of the step: its Python frame and its parameters. It is the same if a
            frame is recaptured for another value that it reads. ``None`` if unknown.
    """

    plan_name: str
    plan_hash: str
    peak_bytes: int
    peak_at: str
    saved_bytes: int
    recomputed: Mapping[str, int] = field(default_factory=dict)
    recomputed_flops: float = 0.0
    recomputed_seconds: float = 0.0
    sizes: tuple[int, ...] = ()
    part: tuple[object, ...] | None = None
    num_offloaded: int = 0
    host_bytes: int = 0
    exposed_seconds: float = 0.0

    @classmethod
    def of(cls, plan: RematPlan) -> RematReport:
        """Return the report of a plan."""
        nodes = plan.problem.nodes
        counts = Counter(nodes[i].kind for i in plan.again.tolist() if nodes[i].seconds > 0)
        return cls(
            plan.name,
            plan.hash,
            plan.peak_bytes,
            plan.peak_at,
            plan.saved_bytes,
            dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
            plan.flops,
            plan.again_seconds,
            plan.problem.sizes,
            num_offloaded=len(plan.moves),
            host_bytes=plan.host_bytes,
            exposed_seconds=plan.exposed_seconds,
        )

    def table(self) -> str:
        """Return the report as text."""
        sizes = ", ".join(map(str, self.sizes))
        rows = [
            ("plan", f"{self.plan_name} {self.plan_hash}"),
            ("predicted peak", f"{format_bytes(self.peak_bytes)} in {self.peak_at}"),
            *([("for sizes", f"{sizes}; others share the plan")] if sizes else []),
            ("saved for backward", format_bytes(self.saved_bytes)),
            (
                "recomputed",
                f"{sum(self.recomputed.values())} operations, {self.recomputed_flops / 1e9:.3f} "
                f"GFLOP of matmuls, {1e3 * self.recomputed_seconds:.2f} ms by estimate",
            ),
            *((f"  {kind}", count) for kind, count in self.recomputed.items()),
            *([("moved to the host", self._moved())] if self.num_offloaded else []),
        ]
        return tabulate(rows, tablefmt="plain")

    def _moved(self) -> str:
        count = f"{self.num_offloaded} value{'s' * (self.num_offloaded > 1)}"
        waiting = f"{1e3 * self.exposed_seconds:.2f} ms of waiting by estimate"
        return f"{count}, {format_bytes(self.host_bytes)}, {waiting}"


def reports_by_part(reports: Sequence[RematReport]) -> list[list[RematReport]]:
    """Group reports by the part of the step that they plan, each in the order of capture."""
    parts: dict[object, list[RematReport]] = {}
    for index, report in enumerate(reports):
        parts.setdefault(index if report.part is None else report.part, []).append(report)
    return list(parts.values())


def reports_table(reports: Sequence[RematReport]) -> str:
    """Return the last report of each part of a step as text."""
    texts = []
    for index, part in enumerate(reports_by_part(reports)):
        again = f" (the last of {len(part)} captures)" if len(part) > 1 else ""
        texts.append(f"graph {index}{again}\n{part[-1].table()}")
    return "\n\n".join(texts)


def plot_front(plans: Sequence[RematPlan], path: str | Path) -> None:
    """Draw the front: estimated time added to a step over its peak.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    figure, axes = new_figure()
    seconds = [1e3 * plan.seconds for plan in plans]
    axes.plot([plan.peak_bytes / 2**20 for plan in plans], seconds, "o-")
    axes.set_xlabel("peak of a step, MiB")
    axes.set_ylabel("recomputed, ms by estimate")
    figure.savefig(path)


def plot_timeline(plan: RematPlan, path: str | Path) -> None:
    """Draw the bytes alive over the step.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    figure, axes = new_figure()
    axes.plot(plan.timeline.live_bytes / 2**20)
    axes.axvline(plan.timeline.num_forward, linestyle=":", label="start of the backward pass")
    axes.set_xlabel("operation")
    axes.set_ylabel("bytes alive, MiB")
    axes.legend()
    figure.savefig(path)


_COLORS = {"input": "lightgray", "forward": "lightblue", "saved": "gold", "offloaded": "plum",
           "recomputed": "salmon", "backward": "palegreen"}  # fmt: skip


def draw_joint_graph(plan: RematPlan, path: str | Path) -> None:
    """Draw a joint graph with a plan's saved, recomputed and backward nodes, cut edges in bold.

    Args:
        plan: The plan.
        path: ``.dot`` writes text for Graphviz; another suffix that matplotlib knows, such as
            ``.svg`` or ``.png``, draws it.

    Raises:
        ModuleNotFoundError: If a picture is asked for and matplotlib is not installed.
    """
    _write(plan.to_networkx(), path)


def draw_graph(graph_module: fx.GraphModule, path: str | Path) -> None:
    """Draw the forward or the backward graph of a partition, with grey inputs.

    Args:
        graph_module: The graph.
        path: ``.dot`` for text, another suffix that matplotlib knows for a picture.

    Raises:
        ModuleNotFoundError: If a picture is asked for and matplotlib is not installed.
    """
    graph, results = nx.DiGraph(), graph_module.graph.output_node().all_input_nodes
    for node in graph_module.graph.nodes:
        is_input = node.op == "placeholder"
        role = "saved" if node in results else "input" if is_input else "forward"
        graph.add_node(node.name, op=kind_of(node), role=role)
        graph.add_edges_from(((read.name, node.name) for read in node.all_input_nodes), saved=False)
    _write(graph, path)


def _write(graph: nx.DiGraph, path: str | Path) -> None:
    if Path(path).suffix == ".dot":
        lines = ["digraph remat {", "  node [shape=box, style=filled];"]
        lines += [
            f'  "{name}" [label="{name}\\n{data["op"]}", fillcolor={_COLORS[data["role"]]}];'
            for name, data in graph.nodes.items()
        ]
        lines += [
            f'  "{tail}" -> "{head}" [penwidth={3 if is_saved else 1}];'
            for tail, head, is_saved in graph.edges(data="saved")
        ]
        Path(path).write_text("\n".join([*lines, "}", ""]))
        return
    # In rows, each node below all its inputs.
    rows = list(nx.topological_generations(graph))
    size = (max(6.0, 1.6 * max(map(len, rows))), max(4.0, 0.35 * len(rows)))
    figure, axes = new_figure(*size)
    nx.draw_networkx(
        graph,
        {name: (x, -y) for y, row in enumerate(rows) for x, name in enumerate(row)},
        ax=axes,
        node_color=[_COLORS[role] for _, role in graph.nodes(data="role")],
        width=[1.5 if is_saved else 0.5 for *_, is_saved in graph.edges(data="saved")],
        node_size=120,
        font_size=5,
    )
    axes.set_axis_off()
    figure.savefig(path)

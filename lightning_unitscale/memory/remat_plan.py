"""Describe a plan of a joint graph, its values and costs, and show it as text and pictures."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path

import networkx as nx
import numpy as np
from tabulate import tabulate
from torch import fx

from lightning_unitscale.memory.joint_graph import kind_of
from lightning_unitscale.memory.offload import Move
from lightning_unitscale.memory.problem import Floats, Ints, Mask, NodeRegion, RematProblem
from lightning_unitscale.memory.profile_report import format_bytes, new_figure
from lightning_unitscale.memory.schedule import BackwardOrder, PlanTimeline

PLANNER_VERSION = 4  # increased whenever the same problem may get another plan


@dataclass(frozen=True)
class RematPlan:
    """Plan of the values to keep and the operations to recompute, with its costs.

    Attributes:
        problem: The joint graph.
        name: Origin of the plan: ``"default"``, ``"min_cut"``, ``"checkpoint_blocks"``, ``"cut"``
            or ``"blocks"``.
        saved: Nodes whose values are kept.
        kept: Nodes that are recomputed at most once. Others may run once for each block that needs
            them. ``None`` means all nodes.
        segments: Block of each node, if ``kept`` is given.
        order: The order of the backward pass.
        timeline: Bytes alive over the forward and the backward pass.
        least_bytes: Bytes alive in the optimizer's step, which no plan changes.
        moves: Saved values that wait in host memory. ``timeline`` then excludes them.
        exposed_seconds: Estimated time in which computing waits for their copies.
    """

    problem: RematProblem
    name: str
    saved: Mask
    kept: Mask | None
    segments: Sequence[int] | None
    order: BackwardOrder
    timeline: PlanTimeline
    least_bytes: int = 0
    moves: tuple[Move, ...] = ()
    exposed_seconds: float = 0.0

    @cached_property
    def again(self) -> Ints:
        """Return the nodes that run again, once for each additional run."""
        return self.order.again(self.problem)

    @cached_property
    def seconds(self) -> float:
        """Estimate the time that the plan adds to a step: recomputation, and waiting for copies."""
        return self.again_seconds + self.exposed_seconds

    @cached_property
    def again_seconds(self) -> float:
        """Estimate the time of recomputation."""
        return self._again_of(self.problem.seconds)

    @cached_property
    def flops(self) -> float:
        """Count the floating-point operations of the recomputed matmuls."""
        return self._again_of(self.problem.flops)

    def _again_of(self, costs: Floats) -> float:
        # Summed node by node: equal for plans that differ in the order of recomputation only.
        return float(np.bincount(self.again, minlength=len(self.problem)) @ costs)

    @property
    def saved_bytes(self) -> int:
        """Return the bytes kept for the backward pass, each storage once, also those moved away."""
        return self.problem.saved_bytes(self.saved)

    @property
    def host_bytes(self) -> int:
        """Return the bytes that wait in host memory."""
        return sum(self.problem.nodes[move.node].num_bytes for move in self.moves)

    @property
    def peak_bytes(self) -> int:
        """Predict the peak of all bytes alive in a step."""
        return max(self.timeline.peak_bytes, self.least_bytes)

    @property
    def peak_at(self) -> str:
        """Describe where the peak is reached: the pass and the operation."""
        if self.least_bytes > self.timeline.peak_bytes:
            return "the optimizer's step"
        direction, node = self.timeline.peak_at
        return f"the {direction} pass, at {self.problem.nodes[node].name}"

    @cached_property
    def hash(self) -> str:
        """Hash the saved and kept nodes and the order, equal on all ranks with the same plan."""
        digest = hashlib.sha256(f"{PLANNER_VERSION}".encode())
        for node, keeps in zip(self.problem.nodes, self.saved.tolist(), strict=True):
            if keeps:
                digest.update(node.name.encode() + b";")
        digest.update(self.order.nodes.astype("<i8").tobytes())
        digest.update(repr([astuple(move) for move in self.moves]).encode() if self.moves else b"")
        return digest.hexdigest()[:16]

    def to_networkx(self) -> nx.DiGraph:
        """Return the joint graph with the plan's effect on each node.

        Returns:
            A graph of networkx with the totals of the plan. A node has ``op``, ``num_bytes`` (of
            the storage that it allocates), ``flops`` and estimated ``seconds``. Its ``role`` is
            ``"input"``, ``"forward"``, ``"saved"``, ``"offloaded"``, ``"recomputed"`` or
            ``"backward"``. It runs ``num_runs`` times, from ``first_run`` to ``last_run`` in the
            schedule; both are -1 for an input. An edge has the ``num_bytes`` of the storage that is
            read, and ``saved`` (whether the backward pass reads a saved value).
        """
        totals = ("name", "hash", "peak_bytes", "saved_bytes", "flops", "seconds")
        graph = nx.DiGraph(**{total: getattr(self, total) for total in totals})
        nodes, saved = self.problem.nodes, self.saved.tolist()
        num_forward = self.timeline.num_forward
        runs: list[list[int]] = [[] for _ in nodes]
        for position, index in enumerate(self.timeline.nodes.tolist()):
            runs[index].append(position)
        moved = {move.node for move in self.moves}
        for index, (node, keeps, at) in enumerate(zip(nodes, saved, runs, strict=True)):
            first, last = (at[0], at[-1]) if at else (-1, -1)
            again = "recomputed" if last >= num_forward else "forward"
            kept = "offloaded" if index in moved else "saved"
            role = "backward" if first >= num_forward else kept if keeps else again
            graph.add_node(
                node.name,
                op=node.kind,
                role="input" if node.region is NodeRegion.INPUT else role,
                **{name: getattr(node, name) for name in ("num_bytes", "flops", "seconds")},
                **{"num_runs": len(at), "first_run": first, "last_run": last},
            )
            for read in node.inputs:
                size = nodes[nodes[read].base].num_bytes
                is_saved = saved[read] and last >= num_forward
                graph.add_edge(nodes[read].name, node.name, num_bytes=size, saved=is_saved)
        return graph


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
    """Draw the forward or the backward graph of a partition, with gray inputs.

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

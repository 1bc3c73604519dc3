"""What ``explain()`` says of captured steps: what each pass did, and where the capture broke."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from lightning_unitscale.graph.passes import PassRecord


def passes_table(records: Sequence[PassRecord]) -> str:
    """A table of every pass over every graph."""
    rows = [
        (
            record.step,
            record.graph_index,
            "observed" if record.observed else "plain",
            record.pass_name,
            f"{record.nodes_before} -> {record.nodes_after}",
            f"{1e3 * record.seconds:.1f}",
            "\n".join(record.changes),
        )
        for record in records
    ]
    headers = ("step", "graph", "variant", "pass", "nodes", "ms", "changes")
    return tabulate(rows, headers=headers) if rows else "No graph has been captured yet."


def breaks_list(graph_breaks: Sequence[str]) -> str:
    """The graph breaks with their reasons, each once."""
    breaks = list(dict.fromkeys(graph_breaks))
    if not breaks:
        return "No graph breaks."
    lines = "\n".join(f"  {one}" for one in breaks)
    return f"{len(breaks)} graph breaks:\n{lines}\n  (TORCH_LOGS=graph_breaks says more of each)"

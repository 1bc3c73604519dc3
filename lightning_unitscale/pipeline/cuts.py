"""Which stage each node of a graph runs in: the marks, moved to places where a cut is possible."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator

from torch import Tensor, fx

from lightning_unitscale.graph.aliasing import memory_roots, written_arguments
from lightning_unitscale.graph.nodes import op_name, tensor_name
from lightning_unitscale.pipeline.marks import is_mark


def assign_stages(graph_module: fx.GraphModule) -> tuple[dict[fx.Node, int], int]:
    """The stage of each operation, and how many stages there are.

    A mark inside a region that cannot be cut (between the first and the last write into a tensor,
    inside a ``vmap``) takes effect behind the region.

    Raises:
        ValueError: If a stage would be empty, or a mark is inside a checkpoint's body.
    """
    _refuse_nested_marks(graph_module)
    graph = graph_module.graph
    keep_items_with_their_tuples(graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    closed = list(_closed_regions(graph, places))
    cuts = sorted(_behind(places[node], closed) for node in graph.nodes if is_mark(node))
    stages: dict[fx.Node, int] = {}
    for node, place in places.items():
        if node.op in {"placeholder", "get_attr", "output"} or is_mark(node):
            continue
        # A cut in front of place p leaves p to the next stage.
        stages[node] = bisect.bisect_right(cuts, place)
    used = set(stages.values())
    for index in range(len(cuts) + 1):
        if index not in used:
            raise ValueError(
                f"the pipeline's stage {index} of {len(cuts) + 1} would be empty: two cuts, or a "
                "cut and an end of the module, have nothing between them; expected operations in "
                "every stage; remove one of the cuts."
            )
    return stages, len(cuts) + 1


def legal_cuts(graph: fx.Graph) -> list[fx.Node]:
    """Operations in front of which a cut is possible."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    closed = list(_closed_regions(graph, places))
    operations = [n for n in graph.nodes if n.op not in {"placeholder", "get_attr", "output"}]
    return [
        node
        for node in operations[1:]
        if not is_mark(node)
        and node.target is not operator.getitem
        and _behind(places[node], closed) == places[node]
    ]


def keep_items_with_their_tuples(graph: fx.Graph) -> None:
    """Move the items of a tuple right behind it: only tensors can be handed on."""
    for node in list(graph.nodes):
        if node.op in {"placeholder", "get_attr", "output"} or is_mark(node):
            continue
        if isinstance(node.meta.get("example_value"), Tensor):
            continue
        place = node
        for user in list(node.users):
            if user.target is operator.getitem and user.args[0] is node:
                place.append(user)
                place = user


def _behind(place: int, closed: list[tuple[int, int]]) -> int:
    """The first place from here on, in front of which a cut is possible."""
    moved = True
    while moved:
        moved = False
        for start, end in closed:
            if start < place <= end:
                place, moved = end + 1, True
    return place


def _closed_regions(graph: fx.Graph, places: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """First and last place of the regions that must not be cut."""
    roots = memory_roots(graph)
    last_write: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for target in written_arguments(node):
            if roots[target].op not in {"placeholder", "get_attr"}:
                last_write[roots[target]] = places[node]
    for root, last in last_write.items():
        yield places[root], last
    depth, start = 0, 0
    for node in graph.nodes:
        name = op_name(node) if node.op == "call_function" else ""
        if "increment_nesting" in name:
            start = start if depth else places[node]
            depth += 1
        elif "decrement_nesting" in name:
            depth -= 1
            if not depth:
                yield start, places[node]
    for node in graph.nodes:
        if node.op in {"placeholder", "get_attr", "output"}:
            continue
        if not isinstance(node.meta.get("example_value"), Tensor) and node.users:
            # A tuple, or a symbol: its readers are in its stage.
            readers = [places[user] for user in node.users if user.op != "output"]
            if readers and not _is_region_handle(node):
                yield places[node], max(readers)


def _is_region_handle(node: fx.Node) -> bool:
    return "autocast" in op_name(node)


def _refuse_nested_marks(graph_module: fx.GraphModule) -> None:
    for node in graph_module.graph.find_nodes(op="get_attr"):
        nested = getattr(graph_module, str(node.target), None)
        if not isinstance(nested, fx.GraphModule):
            continue
        if any(is_mark(inner) for inner in nested.graph.nodes):
            raise ValueError(
                f"pipe_split(): a cut is inside {tensor_name(node)}, which runs as a whole (a "
                "checkpoint or a branch); expected cuts between such regions; move it out."
            )
        _refuse_nested_marks(nested)

"""Cuts of a graph: marks of the user's or of a split policy, moved to where a cut is possible.

Every mark is the same node of the captured graph, torch's own, which has neither arguments nor a
result.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.graph.aliasing import memory_roots, written_arguments
from lightning_unitscale.graph.nodes import op_name, tensor_name

# A capture records the operator, and a split policy may insert the function or the operator.
_MARKS = (pipe_split, torch.ops.pippy._pipe_split, torch.ops.pippy._pipe_split.default)


def is_mark(node: fx.Node) -> bool:
    """Whether the node marks a cut."""
    return node.op == "call_function" and node.target in _MARKS


def insert_mark(graph: fx.Graph, before: fx.Node) -> fx.Node:
    """Put a cut in front of a node; for split policies."""
    with graph.inserting_before(before):
        return graph.call_function(pipe_split)


def annotate_split_points(
    module: nn.Module, spec: Mapping[str, SplitPoint]
) -> tuple[RemovableHandle, ...]:
    """Mark the edges of submodules as cuts, by hooks that do nothing when the module runs.

    Args:
        module: Root of the paths.
        spec: Path of a submodule to the edge that is a cut.

    Returns:
        Handles whose ``remove()`` takes the marks away.

    Raises:
        ValueError: If a path names no submodule.
        TypeError: If an edge is no :class:`SplitPoint`.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> handles = annotate_split_points(model, {"1": SplitPoint.BEGINNING})
        >>> handles[0].remove()
    """
    _check(module, spec)
    handles = []
    for path, edge in spec.items():
        target = module.get_submodule(path)
        begins = edge is SplitPoint.BEGINNING
        register = target.register_forward_pre_hook if begins else target.register_forward_hook
        handles.append(register(_split))
    return tuple(handles)


@contextlib.contextmanager
def marked(module: nn.Module, spec: Mapping[str, SplitPoint] | None) -> Iterator[None]:
    """Within this context the edges of ``spec`` are cuts."""
    handles = annotate_split_points(module, spec) if spec else ()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _split(*_: Any) -> None:
    pipe_split()


def _check(module: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    paths = dict(module.named_modules())
    for path, edge in spec.items():
        if not path or path not in paths:
            near = [
                candidate
                for candidate in paths
                if candidate.rpartition(".")[2] == path.rpartition(".")[2]
            ]
            example = next(
                iter(near or [candidate for candidate in paths if candidate]), "layers.1"
            )
            raise ValueError(
                f"split_spec={dict(spec)!r}: {type(module).__name__} has no submodule {path!r}; "
                f"expected paths of named_modules(), such as {example!r}; correct the path."
            )
        if not isinstance(edge, SplitPoint):
            raise TypeError(
                f"split_spec[{path!r}]={edge!r}: expected SplitPoint.BEGINNING or SplitPoint.END."
            )


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
    positions = {node: position for position, node in enumerate(graph.nodes)}
    closed = list(_closed_regions(graph, positions))
    cuts = sorted(_behind(positions[node], closed) for node in graph.nodes if is_mark(node))
    stages: dict[fx.Node, int] = {}
    for node, position in positions.items():
        if node.op in {"placeholder", "get_attr", "output"} or is_mark(node):
            continue
        # A cut in front of position p leaves p to the next stage.
        stages[node] = bisect.bisect_right(cuts, position)
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
    positions = {node: position for position, node in enumerate(graph.nodes)}
    closed = list(_closed_regions(graph, positions))
    operations = [n for n in graph.nodes if n.op not in {"placeholder", "get_attr", "output"}]
    return [
        node
        for node in operations[1:]
        if not is_mark(node)
        and node.target is not operator.getitem
        and _behind(positions[node], closed) == positions[node]
    ]


def keep_items_with_their_tuples(graph: fx.Graph) -> None:
    """Move the items of a tuple right behind it: only tensors can be handed on."""
    for node in list(graph.nodes):
        if node.op in {"placeholder", "get_attr", "output"} or is_mark(node):
            continue
        if isinstance(node.meta.get("example_value"), Tensor):
            continue
        last = node
        for user in list(node.users):
            if user.target is operator.getitem and user.args[0] is node:
                last.append(user)
                last = user


def _behind(position: int, closed: list[tuple[int, int]]) -> int:
    """The first position from here on, in front of which a cut is possible."""
    moved = True
    while moved:
        moved = False
        for start, end in closed:
            if start < position <= end:
                position, moved = end + 1, True
    return position


def _closed_regions(graph: fx.Graph, positions: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """First and last position of the regions that must not be cut."""
    roots = memory_roots(graph)
    last_write: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for target in written_arguments(node):
            if roots[target].op not in {"placeholder", "get_attr"}:
                last_write[roots[target]] = positions[node]
    for root, last in last_write.items():
        yield positions[root], last
    depth, start = 0, 0
    for node in graph.nodes:
        name = op_name(node) if node.op == "call_function" else ""
        if "increment_nesting" in name:
            start = start if depth else positions[node]
            depth += 1
        elif "decrement_nesting" in name:
            depth -= 1
            if not depth:
                yield start, positions[node]
    for node in graph.nodes:
        if node.op in {"placeholder", "get_attr", "output"}:
            continue
        if not isinstance(node.meta.get("example_value"), Tensor) and node.users:
            # A tuple, or a symbol: its readers are in its stage.
            readers = [positions[user] for user in node.users if user.op != "output"]
            if readers and not _is_region_handle(node):
                yield positions[node], max(readers)


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

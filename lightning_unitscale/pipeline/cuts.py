"""Cut a graph at marks of the user or a split policy, moved to the next possible cut.

A mark is torch's own operator in the captured graph. It has no arguments and no result.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.arguments import check_instance, nearest
from lightning_unitscale.capture.aliasing import memory_roots, written_arguments
from lightning_unitscale.capture.graph_nodes import op_name
from lightning_unitscale.pipeline.dataflow import is_call, is_switch
from lightning_unitscale.pipeline.program import Program

# A capture records the operator. A split policy may insert the function or the operator.
_MARKS = (pipe_split, torch.ops.pippy._pipe_split, torch.ops.pippy._pipe_split.default)

# A function that puts marks into a captured graph.
SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]
# Key in a graph module's ``meta``: the position of the loss among its results, if known.
LOSS = "loss"


def is_mark(node: fx.Node) -> bool:
    """Check whether a node marks a cut."""
    return node.op == "call_function" and node.target in _MARKS


def insert_mark(graph: fx.Graph, before: fx.Node) -> fx.Node:
    """Insert a cut before a node. Split policies may call it."""
    with graph.inserting_before(before):
        return graph.call_function(pipe_split)


def annotate_split_points(
    module: nn.Module, spec: Mapping[str, SplitPoint]
) -> tuple[RemovableHandle, ...]:
    """Mark the edges of submodules as cuts, with hooks that do nothing when the module runs.

    Args:
        module: Root of the paths.
        spec: Mapping from the path of a submodule to the edge to cut.

    Returns:
        Handles whose ``remove()`` removes the marks.

    Raises:
        ValueError: If a path names no submodule.
        TypeError: If an edge is not a :class:`SplitPoint`.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> handles = annotate_split_points(model, {"1": SplitPoint.BEGINNING})
        >>> handles[0].remove()
    """
    paths = dict(module.named_modules())
    for path, edge in spec.items():
        if not path or path not in paths:
            example = nearest(path, filter(None, paths)) or "layers.1"
            raise ValueError(
                f"split_spec={dict(spec)!r}: {type(module).__name__} has no submodule {path!r}. "
                f"Expected paths of named_modules(), such as {example!r}. Correct the path."
            )
        expected = "SplitPoint.BEGINNING or SplitPoint.END"
        check_instance(f"split_spec[{path!r}]", edge, SplitPoint, expected, "pass one of them")
    handles = []
    for path, edge in spec.items():
        target = module.get_submodule(path)
        begins = edge is SplitPoint.BEGINNING
        register = target.register_forward_pre_hook if begins else target.register_forward_hook
        handles.append(register(lambda *_: pipe_split()))
    return tuple(handles)


@contextlib.contextmanager
def marked(module: nn.Module, spec: Mapping[str, SplitPoint] | None) -> Iterator[None]:
    """Mark the edges of ``spec`` as cuts within this context."""
    handles = annotate_split_points(module, spec) if spec else ()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def num_marks(program: Program) -> int:
    """Return the number of marks in a program."""
    return sum(map(is_mark, program.graph_module.graph.nodes))


def cut_by(program: Program, policy: SplitPolicy | None) -> None:
    """Insert a policy's cuts into the graph of a program without marks."""
    if policy is None:
        raise ValueError(
            "split_spec=None, split_policy=None: there are no cuts, and the model's code "
            "does not call pipe_split(). Expected at least one cut. Pass for example "
            "split_policy=balanced_split(2)."
        )
    if num_marks(program):
        raise ValueError(
            f"split_policy={policy!r}: the model's code calls pipe_split() as well. Expected "
            "only one of them. Leave one out."
        )
    program.graph_module.meta[LOSS] = program.loss
    policy(program.graph_module)
    if getattr(policy, "num_stages", None) != 1 and not num_marks(program):
        raise ValueError(
            f"split_policy={policy!r}: it put no cut into the graph. Expected a call of "
            "pipe_split() in front of every stage but the first. Insert them with "
            "graph.call_function(pipe_split), or pass balanced_split(1) for one stage."
        )


def assign_stages(graph_module: fx.GraphModule) -> tuple[dict[fx.Node, int], int]:
    """Return the stage of each operation, and the number of stages."""
    # Some regions cannot be cut: from the first to the last write into a tensor, or a `vmap`. A
    # mark in such a region takes effect after it.
    for name, nested in graph_module.named_modules():
        is_graph = name and isinstance(nested, fx.GraphModule)
        if is_graph and any(map(is_mark, nested.graph.nodes)):
            raise ValueError(
                f"pipe_split(): a cut is inside {name} (a checkpoint or a branch), which runs as a "
                "whole. Move the cut out of it."
            )
    graph = graph_module.graph
    keep_items_with_their_tuples(graph)
    closed = _closed_positions(graph)
    positions = {node: position for position, node in enumerate(graph.nodes)}
    marks = (position for node, position in positions.items() if is_mark(node))
    cuts = sorted(closed.index(False, position) for position in marks)
    stages: dict[fx.Node, int] = {}
    for node, position in positions.items():
        if is_call(node) and not is_mark(node):
            # A cut before position p puts p into the next stage.
            stages[node] = bisect.bisect_right(cuts, position)
    num_stages = len(cuts) + 1
    if empty := set(range(num_stages)).difference(stages.values()):
        raise ValueError(
            f"the pipeline's stage {min(empty)} of {num_stages} would be empty. There are no "
            "operations between two cuts, or a cut and an end of the module. Remove one cut."
        )
    return stages, num_stages


def legal_cuts(graph: fx.Graph) -> list[fx.Node]:
    """Return the operations before which a cut is possible."""
    first = next(filter(is_call, graph.nodes), None)
    return [
        node
        for node, is_closed in zip(graph.nodes, _closed_positions(graph), strict=True)
        if is_call(node)
        and node is not first
        and not is_closed
        and not is_mark(node)
        and node.target is not operator.getitem
    ]


def keep_items_with_their_tuples(graph: fx.Graph) -> None:
    """Move the items of a tuple right after it, because only tensors can be sent."""
    for node in list(graph.nodes):
        if not is_call(node) or isinstance(node.meta.get("example_value"), Tensor):
            continue
        last = node
        for user in list(node.users):
            if user.target is operator.getitem and user.args[0] is node:
                last.append(user)
                last = user


def _closed_positions(graph: fx.Graph) -> list[bool]:
    """Return the positions before which a cut is impossible."""
    nodes = list(graph.nodes)
    changes = [0] * (len(nodes) + 1)
    for start, end in _closed_regions(graph, {node: index for index, node in enumerate(nodes)}):
        changes[start + 1] += 1
        changes[end + 1] -= 1
    return [depth > 0 for depth in itertools.accumulate(changes[:-1])]


def _closed_regions(graph: fx.Graph, positions: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last position of the regions that must not be cut."""
    roots = memory_roots(graph)
    depth, start = 0, 0
    for node, position in positions.items():
        for target in written_arguments(node):
            if is_call(roots[target]):
                yield positions[roots[target]], position
        name = op_name(node) if node.op == "call_function" else ""
        if "increment_nesting" in name:
            start = start if depth else position
            depth += 1
        elif "decrement_nesting" in name:
            depth -= 1
            if not depth:
                yield start, position
        is_tensor = isinstance(node.meta.get("example_value"), Tensor)
        if is_call(node) and not is_tensor and not is_switch(node):
            # The readers of a tuple or a symbol stay in its stage.
            for user in node.users:
                if user.op != "output":
                    yield position, positions[user]

"""Take the nodes out of a tracked graph that tell nothing about scale.

Every function leaves its argument as it is and returns a new graph, built in one walk over the
nodes: what read a node that is gone reads the node that stands for it, or ``None``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch import fx
from torch.fx.node import Target

from lightning_unitscale.tracking.scales_graph import FLOAT_TENSOR, METRICS, Metrics, ScalesGraph

# Says of a node of the new graph whether it goes, and which earlier node then stands for it.
_Decide = Callable[[fx.Node], tuple[bool, fx.Node | None]]


def prune_non_float_tensors(graph: fx.Graph) -> ScalesGraph:
    """Keep the nodes that make a floating-point tensor, and the output.

    What read a pruned node reads that node's input instead, if exactly one floating-point tensor
    went into it, and else ``None``.

    Args:
        graph: What ``scales_graph()`` of a tracked module returns, pruned before or not.

    Raises:
        RuntimeError: If the graph was not tracked: nothing else says which tensors are of floats.
    """
    _require_tracked(graph)

    def decide(node: fx.Node) -> tuple[bool, fx.Node | None]:
        if node.meta.get(FLOAT_TENSOR):
            return False, None
        return True, _only_float_input(node)

    return _without(graph, decide)


def prune_same_scale_tensors(graph: fx.Graph, rtol: float = 2**-16) -> ScalesGraph:
    """Take out the nodes whose tensor has the scale of the tensor they were made from: views, say.

    The scale is the mean magnitude, of the tensor and of its gradient where both have one. A node
    that reads several floating-point tensors stays, and so does one with a gradient whose input has
    none, or the other way round.

    Args:
        graph: What ``scales_graph()`` of a tracked module returns, pruned before or not.
        rtol: Relative difference up to which two scales are the same.

    Raises:
        RuntimeError: If the graph was not tracked.
        ValueError: If ``rtol`` is negative or no number.
    """
    if not rtol >= 0.0:
        raise ValueError(
            f"rtol={rtol}: no tolerance; expected a number of at least 0; leave it at 2**-16."
        )
    _require_tracked(graph)

    def decide(node: fx.Node) -> tuple[bool, fx.Node | None]:
        source = _only_float_input(node) if node.meta.get(FLOAT_TENSOR) else None
        if source is None:
            return False, None
        return _have_same_scale(node.meta[METRICS], source.meta[METRICS], rtol), source

    return _without(graph, decide)


def prune_selected_nodes(graph: fx.Graph, targets: Iterable[Target]) -> ScalesGraph:
    """Take out the nodes of the given targets; what read them reads ``None``.

    Args:
        graph: Any graph.
        targets: Functions, and names of methods, inputs or attributes, as in ``node.target``.
    """
    selected = frozenset(targets)
    return _without(graph, lambda node: (node.target in selected, None))


def _without(graph: fx.Graph, decide: _Decide) -> ScalesGraph:
    pruned = ScalesGraph()
    stands_for: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        # Copied first, so that what decides sees the inputs that are left.
        copied = pruned.node_copy(node, lambda old: stands_for[old])
        stands_for[node] = copied
        if node.op == "output":
            continue
        goes, replacement = decide(copied)
        if goes:
            pruned.erase_node(copied)
            stands_for[node] = replacement
    return pruned


def _only_float_input(node: fx.Node) -> fx.Node | None:
    floats = [source for source in node.all_input_nodes if source.meta.get(FLOAT_TENSOR)]
    return floats[0] if len(floats) == 1 else None


def _have_same_scale(first: Metrics, second: Metrics, rtol: float) -> bool:
    pairs = [(first.fwd, second.fwd)]
    if first.bwd is not None and second.bwd is not None:
        pairs.append((first.bwd, second.bwd))
    elif first.bwd is not second.bwd:
        return False
    return all(math.isclose(a.mean_abs, b.mean_abs, rel_tol=rtol) for a, b in pairs)


def _require_tracked(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if FLOAT_TENSOR not in node.meta:
            raise RuntimeError(
                f"graph: node {node.name!r} does not say whether it makes a floating-point tensor; "
                "expected a graph that was tracked; pass the result of scales_graph() of a module "
                "that track_scales made."
            )

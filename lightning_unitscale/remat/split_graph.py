"""A plan becomes a forward and a backward graph, by functorch's partitioner.

Private names used here were checked on torch 2.13 and 2.11: ``_extract_fwd_bwd_modules``,
``functionalize_rng_ops``, ``is_opaque_node``, ``thread_graphsafe_rng_from_hops``. Those that an
older torch does not have are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._functorch import partitioners
from torch._functorch.compile_utils import raise_getitems
from torch.utils.checkpoint import CheckpointPolicy

from lightning_unitscale.remat.joint_graph import Symbolic, is_random
from lightning_unitscale.remat.problem import Mask, NodeRegion, RematProblem, recomputed
from lightning_unitscale.remat.schedule import lazy_order


def split(
    joint_module: fx.GraphModule,
    problem: RematProblem,
    nodes: Sequence[fx.Node],
    saved: Mask,
    num_fwd_outputs: int,
    *,
    segments: Sequence[int] | None = None,
    kept: Mask | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph of a plan.

    Args:
        joint_module: The joint graph; its nodes' metadata is marked, and it is used up.
        problem: What was read from it.
        nodes: Its nodes in the problem's order.
        saved: What is kept for the backward pass.
        num_fwd_outputs: How many outputs belong to the forward pass.
        segments: Segment of each backward node; see :func:`lazy_order`.
        kept: What outlives its segment once it has run again.
    """
    runs = recomputed(problem, saved)
    replays = False
    for index, node in enumerate(nodes):
        if runs[index] and is_random(node):
            # functorch replays what is marked so, from the generator's state of the forward pass.
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            replays = True
    # The bodies of a torch.cond or scan are attributes of both graphs.
    chosen = [node for i, node in enumerate(nodes) if saved[i] and node.op != "get_attr"]
    values = [node for node in chosen if not isinstance(node.meta.get("val"), Symbolic)]
    symbols = [node for node in chosen if isinstance(node.meta.get("val"), Symbolic)]
    opaque = [node for node in values if _is_opaque(node)]
    values = [node for node in values if not _is_opaque(node)]
    options: dict[str, Any] = {"saved_sym_nodes": symbols, "num_fwd_outputs": num_fwd_outputs}
    accepted = inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
    if "saved_opaque_nodes" in accepted:
        options["saved_opaque_nodes"] = opaque
    elif "saved_opaque_objects" in accepted:
        options["saved_opaque_objects"] = opaque
    fwd_module, bwd_module = partitioners._extract_fwd_bwd_modules(joint_module, values, **options)
    if replays:
        fwd_module, bwd_module = partitioners.functionalize_rng_ops(
            joint_module, fwd_module, bwd_module, len(symbols)
        )
    region = {node.name: problem.nodes[index].region for index, node in enumerate(nodes)}
    # FX takes random operations for impure and keeps dead ones: each draws in its own pass only.
    _drop_dead(fwd_module.graph, lambda node: region.get(node.name) is NodeRegion.BACKWARD)
    _drop_dead(bwd_module.graph, lambda node: region.get(node.name) is NodeRegion.FORWARD)
    number = {node.name: index for index, node in enumerate(nodes)}
    bwd_module = _reordered(bwd_module, problem, number, segments, kept)
    fwd_module = raise_getitems(fwd_module)
    bwd_module = raise_getitems(bwd_module)
    thread = getattr(partitioners, "thread_graphsafe_rng_from_hops", None)
    if thread is not None:
        fwd_module = thread(fwd_module, is_backward=False)
        bwd_module = thread(bwd_module, is_backward=True)
    return fwd_module, bwd_module


def _is_opaque(node: fx.Node) -> bool:
    check = getattr(partitioners, "is_opaque_node", None)
    return check is not None and bool(check(node))


def _drop_dead(graph: fx.Graph, is_foreign: Callable[[fx.Node], bool]) -> None:
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and is_random(node) and is_foreign(node):
            graph.erase_node(node)


def _reordered(
    module: fx.GraphModule,
    problem: RematProblem,
    number: dict[str, int],
    segments: Sequence[int] | None,
    kept: Mask | None,
) -> fx.GraphModule:
    """The backward graph with what runs again where it is needed, as often as it is needed."""
    old = list(module.graph.nodes)
    index = {node: i for i, node in enumerate(old)}
    of_joint = [number.get(node.name) for node in old]
    is_placed = [node.op in ("placeholder", "output") for node in old]
    # What was renamed is a replayed random operation, or hands on a generator: never run twice.
    is_backward = [
        j is not None and problem.nodes[j].region is NodeRegion.BACKWARD for j in of_joint
    ]
    anchors = [
        i
        for i, node in enumerate(old)
        if not is_placed[i] and (is_backward[i] or _has_effect(node))
    ]
    # Effects keep their place relative to the operations of the backward pass.
    order = lazy_order(
        [[index[read] for read in node.all_input_nodes] for node in old],
        anchors,
        [not placed for placed in is_placed],
        wanted_at_end=[index[read] for read in module.graph.output_node().all_input_nodes],
        segments=None if segments is None else [0 if j is None else segments[j] for j in of_joint],
        kept=None if kept is None else [True if j is None else bool(kept[j]) for j in of_joint],
    )
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in old:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
    for i in order.nodes:
        # A later copy takes over: what comes after it reads it.
        copies[old[i]] = graph.node_copy(old[i], copies.__getitem__)
    output = module.graph.output_node()
    copies[output] = graph.node_copy(output, copies.__getitem__)
    graph.lint()
    return fx.GraphModule(module, graph)


def _has_effect(node: fx.Node) -> bool:
    return node.op == "call_function" and node.is_impure() and not is_random(node)

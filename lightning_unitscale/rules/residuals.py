"""Find residual adds by their dependencies, and compute the weights of their branches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import networkx as nx
from networkx.algorithms.traversal.breadth_first_search import generic_bfs_edges
from torch import fx

from lightning_unitscale.capture.graph_matmuls import matmul_of
from lightning_unitscale.capture.graph_nodes import Path, op_name
from lightning_unitscale.rules.flow import (
    SUBTRACTS,
    TIMES,
    Flow,
    added_tensors,
    handed_on,
    is_attention,
    is_operation,
    numel,
    rule_of,
)
from lightning_unitscale.rules.patterns import is_logits, logit_factor, times_number
from lightning_unitscale.rules.plan import RuleOptions

_MAX_PARALLEL = 8  # number of adds from one skip within which branches may be parallel


@dataclass(frozen=True)
class Residual:
    """Residual add: ``skip + branch``, where the branch was computed from the skip."""

    add: fx.Node
    skip: Path
    branch: Path
    nodes: frozenset[fx.Node]
    has_attention: bool
    # The chain of residual adds that it belongs to, its position there, and the chain's length.
    stream: int = 0
    index: int = 0
    length: int = 1


def find_residuals(flow: Flow) -> dict[fx.Node, Residual]:
    """Find every residual add of a step."""
    # An add is residual when one operand, or its origin before products with numbers, is an
    # ancestor of the other, with a matmul in between. An add inside a hand-written activation is
    # not residual. The search stops at the ancestor, so its time over a chain of blocks is linear
    # in the number of nodes.
    residuals: dict[fx.Node, Residual] = {}
    lengths: Counter[int] = Counter()  # of streams
    for node in flow.nodes:
        operands = added_tensors(node)
        if operands is None or not flow.is_learned(node):
            continue
        if numel(node) == 1:
            continue  # a sum of losses, one of which was computed from the other
        if logit_factor(flow, node) is not None:
            continue  # a bias of attention scores, at any depth of the layers that have used it
        if _is_interpolation(flow, operands):
            continue
        # The skip was there first.
        first, second = sorted(operands, key=lambda operand: flow.order(_stem(flow, operand[1])))
        for skip, branch in ((first, second), (second, first)):
            residual = _as_residual(flow, node, skip, branch, residuals)
            if residual is not None:
                previous = _previous(flow, skip[1], residuals)
                stream = len(lengths) if previous is None else residuals[previous].stream
                residuals[node] = replace(residual, stream=stream, index=lengths[stream])
                lengths[stream] += 1
                break
    return {
        add: replace(residual, length=lengths[residual.stream])
        for add, residual in residuals.items()
    }


def _is_interpolation(
    flow: Flow, operands: tuple[tuple[Path, fx.Node], tuple[Path, fx.Node]]
) -> bool:
    """Check whether a gate moves one tensor toward another: ``h + z * (n - h)``."""
    (_, first), (_, second) = operands
    for skip, step in ((first, second), (second, first)):
        gated = flow.root(step)
        if not is_operation(gated) or op_name(gated) not in TIMES:
            continue
        differences = (
            node
            for node in map(flow.root, flow.sources(gated))
            if is_operation(node) and op_name(node) in SUBTRACTS
        )
        if any(flow.root(skip) in map(flow.root, flow.sources(node)) for node in differences):
            return True
    return False


def branch_weights(
    residuals: Mapping[fx.Node, Residual], options: RuleOptions
) -> dict[fx.Node, float]:
    """Return each branch's weight tau: the add is ``(skip + tau * branch) / sqrt(1 + tau**2)``.

    References:
        u-muP (arXiv 2407.17465), section 3.4 and appendix G.2: with a_i the mult of branch i and L
        branches, tau_i**2 = a_i**2 / (L / 2 + sum of a_j**2 over the branches before).
    """
    if options.residual is not None:
        with_attention, without = options.residual
        return {
            add: with_attention if residual.has_attention else without
            for add, residual in residuals.items()
        }
    ratio = options.residual_attn_ratio
    feed_forward = options.residual_mult * math.sqrt(2 / (1 + ratio**2))
    attention = ratio * feed_forward
    weights: dict[fx.Node, float] = {}
    before: Counter[int] = Counter()  # sums of squares, by stream
    for add, residual in residuals.items():
        own = attention if residual.has_attention else feed_forward
        weights[add] = own / math.sqrt(residual.length / 2 + before[residual.stream])
        before[residual.stream] += own**2  # type: ignore[assignment]
    return weights


def _as_residual(
    flow: Flow,
    add: fx.Node,
    skip: tuple[Path, fx.Node],
    branch: tuple[Path, fx.Node],
    residuals: dict[fx.Node, Residual],
) -> Residual | None:
    for root in _skip_roots(flow, skip[1], residuals):
        nodes = _branch_nodes(flow, flow.resolve(branch[1]), root)
        if nodes is not None:
            attention = any(is_attention(node) or is_logits(flow, node) for node in nodes)
            return Residual(add, skip[0], branch[0], nodes, attention)
    return None


def _skip_roots(flow: Flow, skip: fx.Node, residuals: dict[fx.Node, Residual]) -> Iterator[fx.Node]:
    """Return the nodes that a branch may start from: the skip, or that of the add before it."""
    root = _stem(flow, skip)
    yield root
    for _ in range(_MAX_PARALLEL):
        if root not in residuals:
            return
        operands = dict(added_tensors(root) or ())
        root = _stem(flow, operands[residuals[root].skip])
        yield root


def _stem(flow: Flow, node: fx.Node) -> fx.Node:
    """Return the root of a tensor, also through products with numbers."""
    node = flow.root(node)
    while (scaled := times_number(flow, node)) is not None:
        node = flow.root(scaled[0])
    return node


def _branch_nodes(flow: Flow, branch: fx.Node, root: fx.Node) -> frozenset[fx.Node] | None:
    """Return the nodes on the paths from ``root`` to ``branch``, if one of them is a matmul."""
    graph, start = flow.graph, flow.order(root)
    before = _reached(graph, branch, graph.predecessors, lambda node: flow.order(node) >= start)
    if root not in before:
        return None
    nodes = _reached(graph, root, graph.successors, {branch, *before}.__contains__)
    return frozenset(nodes) if any(matmul_of(node) for node in nodes) else None


def _reached(
    graph: nx.DiGraph,
    start: fx.Node,
    neighbors: Callable[[fx.Node], Iterable[fx.Node]],
    is_among: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """Return the nodes that a search from ``start`` reaches, without ``start`` itself."""
    # A view of the graph would count its nodes in each search, which is quadratic in all.
    edges = generic_bfs_edges(graph, start, lambda node: filter(is_among, neighbors(node)))
    return {node for _, node in edges}


def _previous(flow: Flow, skip: fx.Node, residuals: dict[fx.Node, Residual]) -> fx.Node | None:
    """Return the residual add before this one on the same stream, also through norms."""
    node = _stem(flow, skip)
    while node not in residuals:
        rule = rule_of(node)
        if rule is None or rule.kind not in {"normalization", "activation"}:
            return None
        source = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(source, fx.Node) or handed_on(node) is not None:
            return None
        node = _stem(flow, source)
    return node

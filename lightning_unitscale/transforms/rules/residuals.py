"""Residual adds, found by what depends on what, and the weights of their branches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from lightning_unitscale.graph.nodes import is_float_tensor, op_name
from lightning_unitscale.graph.products import product_of
from lightning_unitscale.transforms.rules.flow import (
    Flow,
    Path,
    handed_on,
    is_attention,
    is_operation,
    numel,
)
from lightning_unitscale.transforms.rules.logits import is_logits, logit_factor, times_number
from lightning_unitscale.transforms.rules.lookup import rule_of

# How many adds on from one skip are still looked at as branches side by side.
_MAX_PARALLEL = 8


@dataclass(frozen=True)
class Residual:
    """A residual add: ``skip + branch``, where the branch was computed from the skip.

    Attributes:
        add: The node.
        skip: Which argument is the skip.
        branch: Which argument is the branch.
        nodes: What the branch consists of.
        has_attention: Whether there is an attention in the branch.
        stream: Number of the chain of residual adds that this one belongs to.
        index: Its position in that chain, from 0.
        length: Number of residual adds in that chain.
    """

    add: fx.Node
    skip: Path
    branch: Path
    nodes: frozenset[fx.Node]
    has_attention: bool
    stream: int = 0
    index: int = 0
    length: int = 1


def added_tensors(node: fx.Node) -> tuple[tuple[Path, fx.Node], tuple[Path, fx.Node]] | None:
    """The two float tensors that a node adds up as they are, with where they stand."""
    if not is_operation(node) or op_name(node) not in {"add", "iadd", "radd"}:
        return None
    if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2 or not is_float_tensor(node):
        return None
    values: list[tuple[Path, Any]] = [((i,), one) for i, one in enumerate(node.args)]
    values += [((key,), one) for key, one in node.kwargs.items() if key in {"input", "other"}]
    if len(values) != 2 or not all(is_float_tensor(one) for _, one in values):
        return None
    return values[0], values[1]


def find_residuals(flow: Flow) -> dict[fx.Node, Residual]:
    """Every residual add of a step.

    An add is residual when one operand, or what it was made of without a product, is an ancestor of
    the other, with a matrix product in between: an add inside a hand-written activation is none.
    The search for an ancestor never goes back beyond it, so over a chain of blocks it takes time
    and memory in proportion to the number of nodes.
    """
    found: dict[fx.Node, Residual] = {}
    predecessors: dict[fx.Node, fx.Node | None] = {}
    for node in flow.nodes:
        operands = added_tensors(node)
        if operands is None or not flow.is_learned(node):
            continue
        if numel(node) == 1:
            continue  # a sum of losses, one of which was made with the help of the other
        if logit_factor(flow, node) is not None:
            continue  # a bias of attention scores, however deep the layers it has served already
        if _is_interpolation(flow, operands):
            continue
        # The skip was there first.
        first, second = sorted(operands, key=lambda one: flow.order(_stem(flow, one[1])))
        for skip, branch in ((first, second), (second, first)):
            one = _as_residual(flow, node, skip, branch, found)
            if one is not None:
                found[node] = one
                predecessors[node] = _previous(flow, skip[1], found)
                break
    return _with_streams(found, predecessors)


def _is_interpolation(
    flow: Flow, operands: tuple[tuple[Path, fx.Node], tuple[Path, fx.Node]]
) -> bool:
    """Whether a gate moves one tensor towards another: ``h + z * (n - h)``."""
    (_, first), (_, second) = operands
    for skip, step in ((first, second), (second, first)):
        gated = flow.root(step)
        if not is_operation(gated) or op_name(gated) not in {"mul", "imul", "multiply"}:
            continue
        differences = (
            one
            for one in map(flow.root, flow.sources(gated))
            if is_operation(one) and op_name(one) in {"sub", "isub", "subtract"}
        )
        if any(flow.root(skip) in map(flow.root, flow.sources(one)) for one in differences):
            return True
    return False


def branch_weights(
    residuals: Mapping[fx.Node, Residual],
    *,
    fixed: tuple[float, float] | None = None,
    residual_mult: float = 1.0,
    residual_attn_ratio: float = 1.0,
) -> dict[fx.Node, float]:
    """The weight tau of each branch: the add is ``(skip + tau * branch) / sqrt(1 + tau**2)``.

    Args:
        residuals: The residual adds of a step.
        fixed: Weights of branches with and without attention, in place of the depth rule.
        residual_mult: Share of all branches together in the last sum.
        residual_attn_ratio: Share of a branch with attention, relative to one without.

    References:
        u-muP (arXiv 2407.17465), section 3.4 and appendix G.2: with a_i the mult of branch i and L
        branches, tau_i**2 = a_i**2 / (L / 2 + sum of a_j**2 over the branches before).
    """
    if fixed is not None:
        return {add: fixed[0 if one.has_attention else 1] for add, one in residuals.items()}
    feed_forward = residual_mult * math.sqrt(2 / (1 + residual_attn_ratio**2))
    attention = residual_attn_ratio * feed_forward
    weights: dict[fx.Node, float] = {}
    before: Counter[int] = Counter()  # sums of squares, by stream
    for add, one in residuals.items():
        own = attention if one.has_attention else feed_forward
        weights[add] = own / math.sqrt(one.length / 2 + before[one.stream])
        before[one.stream] += own**2  # type: ignore[assignment]
    return weights


def _as_residual(
    flow: Flow,
    add: fx.Node,
    skip: tuple[Path, fx.Node],
    branch: tuple[Path, fx.Node],
    found: dict[fx.Node, Residual],
) -> Residual | None:
    for root in _skip_roots(flow, skip[1], found):
        nodes = _branch_nodes(flow, flow.resolve(branch[1]), root)
        if nodes is not None:
            attention = any(is_attention(one) or is_logits(flow, one) for one in nodes)
            return Residual(add, skip[0], branch[0], nodes, attention)
    return None


def _skip_roots(flow: Flow, skip: fx.Node, found: dict[fx.Node, Residual]) -> Iterator[fx.Node]:
    """What a branch may start from: the skip itself, or that of the add before it."""
    root = _stem(flow, skip)
    yield root
    for _ in range(_MAX_PARALLEL):
        if root not in found:
            return
        one = found[root]
        arguments = dict(added_tensors(root) or ())
        root = _stem(flow, arguments[one.skip])
        yield root


def _stem(flow: Flow, node: fx.Node) -> fx.Node:
    """Where a tensor comes from, also seen through products with numbers."""
    node = flow.root(node)
    while (source := times_number(flow, node)) is not None:
        node = flow.root(source)
    return node


def _branch_nodes(flow: Flow, branch: fx.Node, root: fx.Node) -> frozenset[fx.Node] | None:
    """The nodes on the ways from ``root`` to ``branch`` if one of them is a product."""
    start = flow.order(root)
    if flow.order(branch) <= start:
        return None
    seen = {branch}
    pending = [branch]
    while pending:
        for source in flow.sources(pending.pop()):
            if source not in seen and flow.order(source) > start:
                seen.add(source)
                pending.append(source)
    reached: set[fx.Node] = set()
    through_product: set[fx.Node] = set()
    for node in sorted(seen, key=flow.order):
        sources = flow.sources(node)
        if root in sources or any(one in reached for one in sources):
            reached.add(node)
            if product_of(node) is not None or any(one in through_product for one in sources):
                through_product.add(node)
    return frozenset(reached) if branch in through_product else None


def _previous(flow: Flow, skip: fx.Node, found: dict[fx.Node, Residual]) -> fx.Node | None:
    """The residual add before this one on the same stream, also seen through norms."""
    node = _stem(flow, skip)
    while node not in found:
        rule = rule_of(node)
        if rule is None or rule.kind not in {"normalization", "activation"}:
            return None
        source = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(source, fx.Node) or handed_on(node) is not None:
            return None
        node = _stem(flow, source)
    return node


def _with_streams(
    found: dict[fx.Node, Residual], predecessors: dict[fx.Node, fx.Node | None]
) -> dict[fx.Node, Residual]:
    streams: dict[fx.Node, int] = {}
    count = 0
    for add in found:
        previous = predecessors[add]
        if previous is None:
            streams[add], count = count, count + 1
        else:
            streams[add] = streams[previous]
    lengths = Counter(streams.values())
    positions: Counter[int] = Counter()
    result = {}
    for add, one in found.items():
        stream = streams[add]
        result[add] = replace(one, stream=stream, index=positions[stream], length=lengths[stream])
        positions[stream] += 1
    return result

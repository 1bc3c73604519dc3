"""Split a stage's backward pass: gradients of received tensors, then of the weights.

Zero-bubble schedules send the results of the first half at once, and fill their bubbles with second
halves. Together, both halves compute the same as the whole pass:

- An operation whose result depends on received values runs in the first half. A parameter may only
  be reached through this operation. Its gradient is then deferred: the operation runs again in the
  second half for this gradient only, with the same incoming gradients.
- The gradients of other parameters, such as those that several operations read, are computed in the
  first half. So no sum is divided, and every gradient has the bits of the whole pass.
- An ``autograd.Function``, fused attention and a recurrent kernel always compute the gradients of
  all their arguments, so they run in the first half only.
- Operations that depend only on parameters (a relayed embedding) run in the second half.

A hook on the result of an operation that runs twice would be called twice. ``checkpoint`` would
recompute its region for each such operation. :func:`is_separable` finds stages without either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, fx
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_unitscale.capture.graph_nodes import op_name

_RUN_WHOLE = frozenset({"checkpoint", "register_hook"})
# Parts of the names of autograd's nodes for fused kernels.
_FUSED = (
    "ScaledDotProduct", "FlashAttention", "EfficientAttention", "Rnn", "FusedLstm", "FusedGru",
)  # fmt: skip


@dataclass
class WeightGradients:
    """Gradients that are deferred to the second half."""

    parameters: list[Tensor] = field(default_factory=list)
    # The results that lead to the parameters, with their gradients.
    starts: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)


def is_separable(graph: fx.Graph) -> bool:
    """Check whether the backward pass of a stage's graph can run in two halves."""
    calls = (node for node in graph.nodes if node.op in {"call_function", "call_method"})
    return not any(op_name(node) in _RUN_WHOLE for node in calls)


def backward_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None] | None, received: Sequence[Tensor]
) -> tuple[tuple[Tensor | None, ...], list[WeightGradients]]:
    """Run the first half. Return the gradients of ``received``, and the deferred ones."""
    if gradients is None:
        gradients = [torch.ones_like(output) for output in outputs]
    starts = [
        (get_gradient_edge(output), gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad and gradient is not None
    ]
    asked = [tensor for tensor in received if tensor.requires_grad]
    roots = [edge.node for edge, _ in starts]
    nodes = _in_order(roots)
    # The nodes whose gradients lead to a received tensor.
    dependent = {get_gradient_edge(tensor).node for tensor in asked}
    for node, targets in reversed(nodes.items()):
        if not dependent.isdisjoint(targets):
            dependent.add(node)
    waiting, at_once = _parameters(nodes, dependent, roots)
    handles = []
    for source, part in waiting.items():
        if source is None:
            part.starts += [start for start in starts if start[0].node not in dependent]
        else:
            handles.append(source.register_prehook(partial(_start_from, part, source)))
    try:
        _run(starts, [*asked, *at_once], retain_graph=bool(waiting))
    finally:
        for handle in handles:
            handle.remove()
    for output in outputs:
        output.detach_()
    handed = tuple(tensor.grad if tensor.requires_grad else None for tensor in received)
    for tensor in asked:
        tensor.grad = None
    return handed, list(waiting.values())


def backward_weights(waiting: Iterable[WeightGradients]) -> None:
    """Run the second half, which adds the deferred gradients to ``.grad``."""
    for part in waiting:
        _run(part.starts, part.parameters)


def _run(
    starts: Sequence[tuple[GradientEdge, Tensor]],
    leaves: Sequence[Tensor],
    *,
    retain_graph: bool = False,
) -> None:
    if starts and leaves:
        edges, gradients = zip(*starts, strict=True)
        torch.autograd.backward(edges, gradients, inputs=leaves, retain_graph=retain_graph)


def _start_from(part: WeightGradients, node: Node, gradients: Sequence[Tensor | None]) -> None:
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            part.starts.append((GradientEdge(node, index), gradient))


def _in_order(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the targets of each node's gradients, with each node before its targets."""
    targets: dict[Node, list[Node]] = {}
    finished: list[Node] = []
    pending = [(root, False) for root in roots]
    while pending:
        node, is_finished = pending.pop()
        if is_finished:
            finished.append(node)
        elif node not in targets:
            targets[node] = [target for target, _ in node.next_functions if target is not None]
            pending.append((node, True))
            pending += [(target, False) for target in targets[node]]
    return {node: targets[node] for node in reversed(finished)}


def _parameters(
    nodes: Mapping[Node, Sequence[Node]], dependent: Collection[Node], roots: Iterable[Node]
) -> tuple[dict[Node | None, WeightGradients], list[Tensor]]:
    """Return the deferred parameters by the operation that runs again, and all others."""
    # The key `None` has the parameters that no dependent operation leads to.
    waiting: dict[Node | None, WeightGradients] = defaultdict(WeightGradients)
    at_once: list[Tensor] = []
    # For each node, the dependent operations that lead to it.
    sources: dict[Node, set[Node | None]] = defaultdict(set)
    for root in roots:
        sources[root].add(None)
    for node, targets in nodes.items():
        if node in dependent:
            sources[node] = {node}
        elif isinstance(parameter := getattr(node, "variable", None), Tensor) and not targets:
            source, *others = sources[node]
            if others or _computes_all(source):
                at_once.append(parameter)
            else:
                waiting[source].parameters.append(parameter)
        for target in targets:
            sources[target] |= sources[node]
    return waiting, at_once


def _computes_all(node: Node | None) -> bool:
    """Check whether a node always computes all of its gradients."""
    if node is None or isinstance(node, BackwardCFunction):
        return node is not None
    return any(part in node.name() for part in _FUSED)

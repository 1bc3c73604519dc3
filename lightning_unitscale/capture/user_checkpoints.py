"""Refuse user checkpoints whose meaning in torch a plan cannot keep.

A plan recomputes what a checkpoint would, and keeps no other effect of torch's there. Torch gives
no gradient to a reentrant checkpoint whose inputs need none, updates BatchNorm's statistics twice,
and draws new random numbers if their state is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from lightning_unitscale.capture.aliasing import is_random, memory_roots, written_arguments
from lightning_unitscale.capture.copy_graphs import is_checkpoint
from lightning_unitscale.capture.dynamo_capture import GraphInput
from lightning_unitscale.capture.graph_nodes import line_of, op_name, requires_grad


class CheckpointNotKept(Exception):
    """Error about a user's checkpoint that would mean something else in a plan."""


def refuse_checkpoints(graph_module: fx.GraphModule, inputs: Sequence[GraphInput]) -> None:
    """Refuse a graph with a checkpoint whose meaning a plan does not keep."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    own = {
        node
        for node, described in zip(placeholders, inputs, strict=True)
        if described.kind in ("parameter", "buffer")
    }
    for node in graph_module.graph.nodes:
        if is_checkpoint(node) and (reason := _why_not_kept(graph_module, node, own)):
            line = line_of(node)
            where = f" at {line[0]}:{line[1]}" if line else ""
            raise CheckpointNotKept(f"the checkpoint{where} {reason}")


def _why_not_kept(graph_module: fx.GraphModule, node: fx.Node, own: set[fx.Node]) -> str:
    body: Any = node.args[0]
    region = getattr(graph_module, str(body.target)).graph
    given = [argument for argument in node.all_input_nodes if argument not in own | {body}]
    if node.kwargs.get("use_reentrant") and not any(map(requires_grad, given)):
        return "is reentrant and none of its inputs needs a gradient, so torch gives it none"
    roots = memory_roots(region)
    writes = (
        target
        for one in region.nodes
        for target in written_arguments(one)
        if roots[target].op == "placeholder"
    )
    if next(writes, None) is not None or any(map(_updates_statistics, region.nodes)):
        return "writes into a buffer, which torch does a second time when it runs again"
    if node.kwargs.get("preserve_rng_state", True) is False and any(map(is_random, region.nodes)):
        return "draws random numbers with preserve_rng_state=False, others when it runs again"
    return ""


def _updates_statistics(node: fx.Node) -> bool:
    """Check whether a normalization updates running statistics, which its schema omits."""
    if op_name(node) not in ("batch_norm", "instance_norm"):
        return False
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    trains = given.get("training", given.get("use_input_stats", op_name(node) == "instance_norm"))
    return given.get("running_mean") is not None and bool(trains)

"""Make the rows of a compiled graph by few calls, each for tensors that are made near each other.

Each call of an operator of ours costs a compiled graph tens of microseconds, and code that runs
once between others runs slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, fx

from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.statistics import JOINT_ROWS_OPERATOR, ROW_OPERATOR

# A tensor lives until its row is made: no more than these wait for each other.
_MOST_BYTES: Final = 2**24
_MOST_TENSORS: Final = 64


def join_rows(graph_module: fx.GraphModule) -> None:
    """Replace calls for one light row each by calls for several."""
    graph = graph_module.graph
    if not graph.find_nodes(op="call_function", target=ROW_OPERATOR):
        return
    waiting: list[fx.Node] = []
    num_bytes = 0
    for node in list(graph.nodes):
        is_read = any(source in waiting for source in node.all_input_nodes)
        size = _bytes(node) if _makes_light_row(node) else None
        is_full = len(waiting) == _MOST_TENSORS or num_bytes + (size or 0) > _MOST_BYTES
        if waiting and (is_read or is_full or _may_write(node) or node.op == "output"):
            _join(graph, waiting)
            waiting, num_bytes = [], 0
        if size is not None:
            if waiting and _value(waiting[0]).device != _value(node).device:
                _join(graph, waiting)
                waiting, num_bytes = [], 0
            waiting.append(node)
            num_bytes += size
    # Inductor looks for what it has compiled before by the code.
    graph_module.recompile()


def _makes_light_row(node: fx.Node) -> bool:
    if node.target is not ROW_OPERATOR:
        return False
    _, factor, key = node.args
    return factor is None and RowLayout.from_key(str(key)).is_sampled


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _bytes(node: fx.Node) -> int | None:
    """Size of the tensor of a row; ``None`` if it differs from call to call."""
    tensor = _value(node.all_input_nodes[0])
    numel = tensor.numel()
    return numel * tensor.element_size() if isinstance(numel, int) else None


def _may_write(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    return node.target.__module__ != "_operator" if schema is None else schema.is_mutable


def _join(graph: fx.Graph, rows: Sequence[fx.Node]) -> None:
    if len(rows) == 1:
        return
    key = rows[0].args[2]
    with graph.inserting_before(rows[-1]):
        tensors = [row.args[0] for row in rows]
        joint = graph.call_function(JOINT_ROWS_OPERATOR, (tensors, key))
        one = _value(rows[0])
        joint.meta["val"] = one.new_empty((len(rows), *one.shape))
        for index, row in enumerate(rows):
            part = graph.call_function(torch.ops.aten.select.int, (joint, 0, index))
            part.meta.update(row.meta)
            row.replace_all_uses_with(part)
            graph.erase_node(row)
